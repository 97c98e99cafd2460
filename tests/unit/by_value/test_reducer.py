"""Definitions are created once in a receiving process, and never in the process that sent them."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle.cloudpickle
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fabricx import by_value
from fabricx.by_value import definitions
from fabricx.by_value.definitions import DEFINITIONS, Definitions

Receive = Callable[[Any], Any]
SCRIPT = """
from __future__ import annotations
import abc, dataclasses, enum, functools, typing
T = typing.TypeVar("T")
P = typing.ParamSpec("P")
UserId = typing.NewType("UserId", int)
SCALE = [2]
class Color(enum.Enum):
    RED = 1
@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 0.1
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
@dataclasses.dataclass(slots=True)
class Slotted:
    a: int = 1
class Point(typing.NamedTuple):
    x: int
    y: int = 2
class Options(typing.TypedDict, total=False):
    a: int
class Box(typing.Generic[T]):
    def __init__(self, value): self.value = value
class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class Registered(type):
    def __new__(cls, name, bases, body):
        if bases and "needed" not in body: raise TypeError("needed")
        return super().__new__(cls, name, bases, body)
class Plugin(metaclass=Registered):
    def __init_subclass__(cls, *, tag): cls.tag = tag
class Mine(metaclass=Registered): pass
class Strict(Mine): needed = 3
class Tagging:
    def __init_subclass__(cls, *, tag): cls.tag = tag
class Tagged(Tagging, tag="t"): pass
class Parent:
    def who(self): return "parent"
def make():
    class Local(Parent):
        def who(self): return "local of " + super().who()
    return Local
Local = make()
class Outer:
    class Inner: pass
    @functools.cached_property
    def late(self): return 5
    @property
    def own(self): return 6
    @classmethod
    def kind(cls): return cls
    bound = None
Outer.bound = Outer.kind
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def scaled(x): return x * SCALE[0]
@functools.lru_cache(maxsize=7)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
@functools.singledispatch
def kind(value): return "other"
@kind.register
def _(value: int): return "int"
add = functools.partial(lambda a, b: a + b, 1)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(SCRIPT, "<a cell>", "exec"), vars(module))
    return module


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Receive:
    """Return a function that pickles an object, and unpickles it as in a process without a script."""

    def received(value: Any) -> Any:
        data = by_value.dumps(value)
        with monkeypatch.context() as other:
            process = Definitions()
            process.script = types.ModuleType("__main__")
            process.reads_job = False
            other.setattr(definitions, "DEFINITIONS", process)
            other.setitem(sys.modules, "__main__", process.script)
            other.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
            other.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", weakref.WeakKeyDictionary())
            result = pickle.loads(data)
            assert pickle.loads(data) is not None  # a second load creates no definitions
            pickle.dumps(getattr(process.script, "Config", None))  # by name, since the receiver has the script's name
            if (outer := getattr(process.script, "Outer", None)) is not None:
                assert type(pickle.loads(pickle.dumps(outer.Inner()))) is outer.Inner
        return result

    return received


def test_classes_and_functions_of_all_kinds_are_sent_by_value(script: types.ModuleType, receive: Receive) -> None:
    sent = {name: value for name, value in vars(script).items() if getattr(value, "__module__", "") == "__main__"}
    received = types.SimpleNamespace(**receive({**sent, "add": script.add}))
    for name, value in sent.items():
        assert getattr(received, name) is not value, name
    dataclasses: Any = script.dataclasses
    assert dataclasses.fields(received.Config)[1].default is dataclasses.MISSING
    assert dataclasses.replace(received.Config(), lr=1).sizes == [1, 2]
    assert not hasattr(received.Slotted(), "__dict__")
    assert received.Color(1) is received.Color.RED
    assert (received.Point(1).y, received.Options(a=1), received.Options.__total__, received.Box[int](3).value) == (
        2,
        {"a": 1},
        False,
        3,
    )
    with pytest.raises(TypeError, match="abstract"):
        received.Abstract()
    assert (received.Strict.needed, received.Tagged.tag, received.Tagged.__bases__) == (3, "t", (received.Tagging,))
    assert received.Local().who() == "local of parent"
    assert (received.Outer().late, received.Outer().own, received.Outer.bound()) == (5, 6, received.Outer)
    assert (received.Outer.Inner.__qualname__, received.Local.__qualname__) == ("Outer.Inner", "make.<locals>.Local")
    assert (received.even(4), received.odd(4)) == (True, False)
    assert (received.fib(20), received.fib.cache_parameters()["maxsize"]) == (6765, 7)
    assert (received.kind(1), received.kind("a"), received.add(2), received.UserId(3)) == ("int", "other", 3, 3)
    assert (received.T.__name__, received.P.__name__) == ("T", "P")


ENUMERATIONS = """
import dataclasses, enum
class Planet(enum.Enum):
    EARTH = (5.976, "blue")
    WORLD = (5.976, "blue")
    def __init__(self, mass, colour): self.mass, self.colour = mass, colour
class Key(bytes, enum.Enum):
    A = (0, "first")
    B = (1, "second")
    def __new__(cls, number, label):
        key = bytes.__new__(cls, [number])
        key._value_, key.label = number, label
        return key
@dataclasses.dataclass
class Size:
    width: int
    height: int
class Sizes(Size, enum.Enum):
    SMALL = 1, 2
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
    BOTH = READ | WRITE
class Wide(enum.IntFlag, boundary=enum.KEEP):
    LOW = 1
    ALL = 255
    def half(self): return Wide(self // 2)
class Named(str, enum.Enum):
    def _generate_next_value_(name, start, count, last): return name.lower()
    LEFT = enum.auto()
    def __str__(self): return f"<{self.value}>"
"""


def test_members_of_enumerations_keep_their_values_attributes_and_aliases(
    script: types.ModuleType, receive: Receive
) -> None:
    exec(ENUMERATIONS, vars(script))
    names = ("Planet", "Key", "Sizes", "Access", "Wide", "Named")
    received = types.SimpleNamespace(**receive({name: vars(script)[name] for name in names}))
    for name in names:
        assert [*getattr(received, name).__members__] == [*vars(script)[name].__members__], name
    assert received.Planet["WORLD"] is received.Planet.EARTH is received.Planet((5.976, "blue"))
    assert (received.Planet.EARTH.mass, received.Planet.EARTH.colour) == (5.976, "blue")
    assert (received.Key(1).label, bytes(received.Key.B)) == ("second", b"\1")
    assert (received.Sizes.SMALL.width, received.Sizes.SMALL.height) == (1, 2)
    assert received.Access["BOTH"] == received.Access.READ | received.Access.WRITE
    assert (received.Wide.ALL.half(), received.Wide(256).name) == (127, script.Wide(256).name)  # type: ignore[attr-defined]
    assert (received.Named("left"), str(received.Named.LEFT), received.Named.LEFT.upper()) == ("left", "<left>", "LEFT")


def test_variables_of_the_script_are_copied_and_shared_by_its_functions(
    script: types.ModuleType, receive: Receive
) -> None:
    scaled, even, odd = receive((script.scaled, script.even, script.odd))
    script.SCALE.append(3)
    assert scaled.__globals__["SCALE"] == [2]
    assert scaled.__globals__ is even.__globals__ is odd.__globals__
    assert "kind" not in scaled.__globals__  # no function uses it


def test_an_imported_object_without_a_copy_is_imported_by_the_receiver(
    script: types.ModuleType, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories = types.ModuleType("factories_of_layers")
    exec(FACTORIES, vars(factories))
    monkeypatch.setitem(sys.modules, "factories_of_layers", factories)
    vars(script).update(Norm=factories.Norm, LIST=factories.LIST)
    exec("def norm(): return Norm\ndef names(): return LIST", vars(script))
    factories.LIST.append("added by the script")
    assert receive(script.norm)() is factories.Norm
    assert receive(script.names)() == ["added by the script"]
    assert receive(script.names)() is not factories.LIST  # a copy, with the script's changes, has precedence


FACTORIES = """
class Factory:
    def __init__(self): self.layers = {}
    def __getattr__(self, name): return self.layers[name]
class Names(list): pass
Norm = Factory()
LIST = Names()
"""


def test_the_sender_uses_its_own_objects(script: types.ModuleType) -> None:
    for value in (script.Config, script.scaled, script.fib, script.Outer.Inner, lambda: 1, script.Local):
        assert pickle.loads(by_value.dumps(value)) is value
    assert pickle.loads(by_value.dumps(script.Local())).who() == "local of parent"


def test_functions_of_a_module_in_a_file_use_its_variables(receive: Receive) -> None:
    def local() -> Any:
        return SCRIPT

    assert receive(local).__globals__ is globals()
    assert receive(Definitions) is Definitions


def test_enum_members_of_torch_are_resolved_by_the_public_name_of_their_class(receive: Receive) -> None:
    backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    assert receive({"call": functools.partial(sdpa_kernel, backends)})["call"].args == (backends,)


def test_weak_references_refer_to_the_copies_that_are_sent_with_them(receive: Receive) -> None:
    model, temporary = torch.nn.Linear(2, 2), {1}
    average = types.SimpleNamespace(weights=[weakref.ref(p) for p in model.parameters()], gone=weakref.ref(temporary))
    del temporary
    arrived = receive({"average": average, "model": model})
    weights = [reference() for reference in arrived["average"].weights]
    assert weights[0] is arrived["model"].weight
    assert weights[1] is arrived["model"].bias
    assert arrived["average"].gone() is None


def test_modules_of_any_class_are_imported_by_name(receive: Receive) -> None:
    looks_up_names: Any = importlib.import_module("fabricx.pytorch.callbacks")

    def uses_modules() -> Any:
        return looks_up_names.EarlyStopping, torch.nn

    assert type(looks_up_names) is not types.ModuleType
    assert receive(uses_modules)() == (looks_up_names.EarlyStopping, torch.nn)
    assert receive([looks_up_names])[0] is looks_up_names


def test_returned_definitions_are_sent_by_name_and_peers_receive_no_other_definitions(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = script.Local()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        by_value.dumps_for_peer(box)  # each rank may have defined such a class
    monkeypatch.setattr(DEFINITIONS, "home", {DEFINITIONS.name_of(script.Local)})
    for data in (by_value.dumps_for_peer(box), by_value.dumps(box, home=True)):
        assert len(data) < 200
        assert type(pickle.loads(data)) is script.Local
    assert by_value.dumps_for_peer([1]) == pickle.dumps([1], pickle.HIGHEST_PROTOCOL)
    monkeypatch.setattr(DEFINITIONS, "_by_name", {})
    with pytest.raises(pickle.UnpicklingError, match="was deleted while a worker used it"):
        pickle.loads(data)


def test_compiled_functions_are_compiled_again_by_the_receiver(receive: Receive) -> None:
    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    received = receive(double)
    assert received is not double
    assert float(received(torch.ones(()))) == 2.0
    disabled = receive(torch.compiler.disable(lambda x: x + 1))
    assert disabled(1) == 2


@pytest.mark.parametrize("parametrized", [False, True])
def test_layers_compiled_in_place_are_compiled_again_by_the_receiver(receive: Receive, parametrized: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(1, 1))
    if parametrized:
        torch.nn.utils.parametrizations.weight_norm(layer[0])
    layer[0].compile(backend="eager", dynamic=True)
    received = receive(torch.nn.ModuleList([layer, layer]))
    assert received[0] is received[1]
    compiled = received[0][0]._compiled_call_impl
    assert inspect.unwrap(compiled._torchdynamo_orig_callable).__self__ is received[0][0]
    assert torch.equal(received[0](torch.ones(2, 1)), layer(torch.ones(2, 1)))
    assert received[0]._compiled_call_impl is None


def test_source_lines_of_a_notebook_cell_are_sent_for_tracebacks(
    script: types.ModuleType, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = SCRIPT.splitlines(keepends=True)
    monkeypatch.setattr("linecache.cache", {"<a cell>": (len(SCRIPT), None, lines, "<a cell>")})
    data = by_value.dumps(script.scaled)
    assert b"def scaled(x)" in data


def test_cloudpickle_is_not_imported_for_objects_that_pickle_can_send() -> None:
    reducer = by_value.Reducer()
    assert reducer(torch.nn.Linear) is NotImplemented
    assert reducer([1]) is NotImplemented
    assert reducer._cloudpickle is None


def test_a_parametrized_module_has_its_class_in_another_process() -> None:
    """torch creates a separate class for each of these modules, and refuses to pickle them."""
    from torch import nn
    from torch.nn.utils import parametrizations

    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, layer, parametrizations.orthogonal(nn.Linear(4, 4)))
    received = pickle.loads(by_value.dumps(model))
    again = pickle.loads(by_value.dumps(received))
    for other in (received, again):
        assert other[0] is other[1]
        assert isinstance(other[0], nn.Linear)
        assert torch.equal(other(torch.ones(4)), model(torch.ones(4)))
        assert other.state_dict().keys() == model.state_dict().keys()
    received[0].weight = torch.full((4, 4), 2.0)  # by the inverse of the parametrization
    assert torch.allclose(received[0].weight, torch.full((4, 4), 2.0))


def test_a_generator_is_sent_to_loader_processes_by_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sends a shared tensor, which is released before a spawned process opens it."""
    monkeypatch.setattr(ForkingPickler, "_extra_reducers", dict(ForkingPickler._extra_reducers))
    monkeypatch.setattr(DEFINITIONS, "reads_job", False)
    by_value.supply_children()
    generator = torch.Generator().manual_seed(4)
    sent = bytes(ForkingPickler.dumps(generator))
    assert b"storage" not in sent
    assert torch.equal(torch.rand(3, generator=pickle.loads(sent)), torch.rand(3, generator=generator))
