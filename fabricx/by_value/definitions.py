"""Classes and functions that a process has received by value, and the namespace of their functions."""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.util
import linecache
import pickle
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, cast, final


@final
class Definitions:
    """Classes and functions that this process has sent or received, by the unique names of their definitions.

    Attributes:
        home: names of the definitions that came from the process that began this process.
        reads_job: definitions that are received now belong to `home`.
        script: module in the place of the script, in a process without one.
        forward: method `reducer_override` of multiprocessing's pickler from the first received definition on.
    """

    def __init__(self) -> None:
        self.home: set[str] = set()
        self.reads_job = True
        self.script: types.ModuleType | None = None
        self.forward: Callable[[Any, Any], Any] | None = None
        self._by_name: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}  # by id, because a class may have no hash
        self._incomplete: set[str] = set()

    def name_of(self, value: Any) -> str:
        """Return the name of an object's definition; a new name for a new object.

        Args:
            value: a class or function.
        """
        reference, name = self._names.get(id(value), (None, ""))
        if reference is None or reference() is not value:
            self._add(name := secrets.token_hex(16), value)
        return name

    def _add(self, name: str, value: Any) -> None:
        number = id(value)
        self._names[number] = weakref.ref(value, lambda _: self._names.pop(number, None)), name
        self._by_name[name] = value

    def find(self, name: str) -> Any:
        """Return the object of a definition that this process has.

        Args:
            name: name of the definition.

        Raises:
            UnpicklingError: the object does not exist any more.
        """
        if (definition := self._by_name.get(name)) is None:
            raise pickle.UnpicklingError("a class or function of this process was deleted while a worker used it")
        return definition

    def make(self, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the object of a definition: that of this process, or a new object, which `fill` completes.

        Args:
            name: name of the definition.
            make: constructor.
            arguments: arguments of the constructor.
        """
        value = self._by_name.get(name)
        if value is None:
            value = make(*arguments)
            self._add(name, value)
            self._incomplete.add(name)
            if self.reads_job and self.has_no_script():
                self.home.add(name)
                if "reducer_override" not in vars(ForkingPickler):
                    ForkingPickler.reducer_override = self.forward  # type: ignore[method-assign, assignment]
        return value

    def fill(self, value: Any, name: str, visible: str | None, fill: Callable[[Any, Any], None], state: Any) -> None:
        """Complete a new object; other objects are kept as they are.

        Args:
            value: value from `make`.
            name: name of the definition.
            visible: name of the object in `__main__` of the script.
            fill: called with the object and the state.
            state: state of the object.
        """
        if name in self._incomplete:
            self._incomplete.discard(name)
            if visible is not None and self.has_no_script():
                self.namespace({}).setdefault(visible, value)
            fill(value, state)

    def has_no_script(self) -> bool:
        """Return whether multiprocessing has started this process, without the script of its parent."""
        if self.script is not None:
            return True
        return "from multiprocessing." in " ".join(sys.orig_argv) and sys.modules["__main__"].__name__ == "__main__"

    def namespace(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of this process's script; a process without a script gets an empty `__main__` first.

        Args:
            variables: first variables of the empty module.
        """
        if self.script is None and self.has_no_script():
            self.script = sys.modules["__main__"] = types.ModuleType("__main__")
            vars(self.script).update(variables)
        return vars(sys.modules["__main__"])


DEFINITIONS: Final = Definitions()


def find(name: str) -> Any:
    """In a pickle: see `Definitions.find`.

    Args:
        name: see `Definitions.find`.
    """
    return DEFINITIONS.find(name)


def make(name: str, maker: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """In a pickle: see `Definitions.make`.

    Args:
        name, maker, arguments: see `Definitions.make`.
    """
    return DEFINITIONS.make(name, maker, arguments)


def fill(value: Any, state: tuple[str, str | None, Callable[[Any, Any], None], Any]) -> None:
    """In a pickle: see `Definitions.fill`.

    Args:
        value: definition to fill.
        state: further arguments of `Definitions.fill`.
    """
    DEFINITIONS.fill(value, *state)


def script_namespace(variables: Mapping[str, Any]) -> dict[str, Any]:
    """In a pickle: see `Definitions.namespace`.

    Args:
        variables: variables of the script's module, by name.
    """
    return DEFINITIONS.namespace(variables)


def namespace_of(module: str) -> dict[str, Any]:
    """In a pickle: the variables of a module of a file.

    Args:
        module: name of the module.
    """
    return vars(importlib.import_module(module))


def new_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Return an empty class; without `__init_subclass__` and the metaclass if these require attributes or options.

    Args:
        make: of cloudpickle.
        arguments: arguments of `make`: metaclass, name, bases, namespace and others.
    """
    try:
        return make(*arguments)
    except Exception:
        if make.__name__ != "_make_skeleton_class":
            raise
        kind, name, bases, namespace, *_ = arguments
        real = types.resolve_bases(bases)
        body = {**namespace, **({} if real is bases else {"__orig_bases__": bases})}
        make_class = abc.ABCMeta.__new__ if issubclass(kind, abc.ABCMeta) else type.__new__
        if real == (object,):
            return cast(type, make_class(kind, name, (), body))
        made: type = make_class(kind, name, (_WithoutInit, *real), body)
        made.__bases__ = real
        return made


class _WithoutInit:
    def __init_subclass__(cls, **options: Any) -> None:
        pass


def fill_class(value: type, state: Any) -> None:
    """Set the attributes of a class.

    Args:
        value: value from `new_class`.
        state: state of cloudpickle.
    """
    from cloudpickle.cloudpickle import _class_setstate

    _class_setstate(value, state)


def new_enumeration(
    kind: Any, name: str, bases: tuple[type, ...], base: Any, members: Mapping[str, tuple[Any, tuple[Any, ...]]],
    boundary: Any,
) -> Any:  # fmt: skip
    """Return an enumeration, whose methods and attributes of members are set later.

    Args:
        kind: metaclass.
        name, bases: of the class.
        base: the first of its base classes that is not defined in Python.
        members: for each name, the value and the arguments of `base`.
        boundary: of a flag; None for other enumerations.
    """
    contents = list(members.values())

    def new(cls: type, number: int) -> Any:
        value, content = contents[number]
        member = base.__new__(cls, *content)
        member._value_ = value
        return member

    body = kind.__prepare__(name, bases)
    if members:
        body["__new__"], body["__init__"] = new, lambda member, number: None
    for number, member in enumerate(members):
        body[member] = number
    made = kind.__new__(kind, name, bases, body, boundary=boundary)
    for added in ("__init__", "__new_member__") if members else ():
        type.__delattr__(made, added)
    return made


def fill_enumeration(value: Any, state: tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]) -> None:
    """Set the attributes of an enumeration and of its members.

    Args:
        value: value from `new_enumeration`.
        state: attributes of the class; and those of the members, by name.
    """
    attributes, of_members = state
    fill_class(value, (attributes, {}))
    for name, of_member in of_members.items():
        vars(value.__members__[name]).update(of_member)


def fill_function(value: types.FunctionType, state: Any) -> None:
    """Complete a function; variables that its module has already are kept.

    Args:
        value: a new function.
        state: attributes and slots of cloudpickle; file and lines of the source, or None.
    """
    from cloudpickle.cloudpickle import _function_setstate

    attributes, slots, source = state
    new = {name: item for name, item in slots["__globals__"].items() if name not in value.__globals__}
    _function_setstate(value, (attributes, {**slots, "__globals__": new}))
    if source is not None:
        linecache.cache.setdefault(source[0], (sum(map(len, source[1])), None, source[1], source[0]))


def attribute_of(module: str, name: str) -> Any:
    """In a pickle: an object of a module.

    Args:
        module: name of the module, which is imported.
        name: name of the object in it.
    """
    return getattr(importlib.import_module(module), name)


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes.

    Args:
        value: any object.
        attributes: attributes by name.
    """
    for name, attribute in attributes.items():
        setattr(value, name, attribute)


def new_object(cls: Any) -> Any:
    """Return an object without attributes.

    Args:
        cls: its class.
    """
    return cls.__new__(cls)


def fill_parametrized(module: Any, state: Any) -> None:
    """Complete a module of `torch.nn.utils.parametrize`, which gives each module a class with properties of its own.

    Args:
        module: of the class that it had before it was parametrized.
        state: its attributes.
    """
    from torch.nn.utils import parametrize

    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def new_registered(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return a model of transformers, and register which outputs its class records, as its constructor does.

    Without the registration hidden states, attentions and the logits of routers are missing from the outputs.

    Args:
        make: makes the model, without its attributes.
        arguments: of `make`.
    """
    model = make(*arguments)
    if importlib.util.find_spec("transformers.utils.output_capturing") is not None:  # from version 5 on
        registry = importlib.import_module("transformers.utils.output_capturing")._CAN_RECORD_REGISTRY
        registry[model] = model._can_record_outputs
    return model


def new_reference(target: Any) -> Any:
    """Return a weak reference.

    Args:
        target: the object; None if it no longer existed, as for the result.
    """
    return weakref.ref(set() if target is None else target)


def set_handle(handle: Any, state: tuple[int, list[Any]]) -> None:
    """Set the state of a handle of torch, which removes a hook.

    Args:
        handle: without state.
        state: number of the hook; and the dictionaries that have an item of this number: a dictionary, or the object
            and the name of its attribute.
    """
    number, places = state
    found = [getattr(*place) if isinstance(place, tuple) else place for place in places]
    hooks, *others = [new_reference(items) for items in found]
    handle.id, handle.hooks_dict_ref, handle.extra_dict_ref = number, hooks, tuple(others)
    type(handle).next_id = max(type(handle).next_id, number + 1)


def new_enumerator(module: str, name: str, value: int) -> Any:
    """Return an enumerator of a compiled enumeration.

    Args:
        module, name: of the enumeration.
        value: of the enumerator.
    """
    return getattr(importlib.import_module(module), name)(value)


def new_cached(maxsize: int | None, typed: bool) -> Any:
    """Return a function with an empty `functools.lru_cache`, whose `__wrapped__` is set later: it may call itself.

    Args:
        maxsize, typed: of `functools.lru_cache`.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        return cached.__wrapped__(*arguments, **options)

    cached = functools.lru_cache(maxsize, typed)(call)
    return cached


def new_compiled(function: Any, backend: Any, fullgraph: bool, dynamic: bool | None) -> Any:
    """Return a function of `torch.compile`, which compiles it anew.

    Args:
        function: function to compile.
        backend, fullgraph, dynamic: of `torch.compile`.
    """
    import torch

    return torch.compile(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic)


def new_disabled(function: Any) -> Any:
    """Return a function of `torch.compiler.disable`.

    Args:
        function: not to compile.
    """
    import torch

    return torch.compiler.disable(function)
