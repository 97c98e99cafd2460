"""Pickling of classes and functions that other processes cannot import: those of the script, and local ones.

A process that cannot import a class or a function receives its definition. Each definition has a unique name: a process
that has the definition already uses its own object, so that `isinstance` holds for results. Variables of the script are
copied into `__main__` of the receiver with the functions that use them; the script is never executed again. Objects of
modules in files are pickled by reference, as everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import linecache
import os
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Collection, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, final

from fabricx.by_value import definitions, shared_objects
from fabricx.by_value.definitions import DEFINITIONS
from fabricx.by_value.resolvers import Resolvers, new_configuration

SCRIPTS: Final = ("__main__", "__mp_main__")  # names of a script as a module; the second in spawned processes
_LRU: Final = type(functools.lru_cache(abs))
_NAMED: Final = (types.FunctionType, _LRU, typing.TypeVar, typing.ParamSpec, typing.NewType)  # pickled by their names
_PARTS: Final[tuple[type, ...]] = (  # parts of classes and functions that pickle refuses and cloudpickle reduces
    types.CellType, types.CodeType, types.GetSetDescriptorType, types.MappingProxyType, classmethod, property,
    staticmethod, weakref.WeakSet, type({}.keys()), type({}.values()), type({}.items()),
    type(dataclasses._FIELD),  # type: ignore[attr-defined]
)  # fmt: skip
_SENTINELS: Final = {dataclasses.MISSING: "MISSING", dataclasses.KW_ONLY: "KW_ONLY"}  # compared by identity
_WEAK: Final = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_OF_SCRIPT: Final = ("__file__", "__package__", "__path__")  # variables of the script that functions may rely on
_Reduced = tuple[Callable[..., Any], tuple[Any, ...], Any, Callable[[Any, Any], None]]
_COMPILED: Final = "pybind11_builtins"
_CONFIGURATIONS: Final = ("omegaconf.dictconfig", "omegaconf.listconfig")
_HOOKS: Final = "torch.utils.hooks"
_PARAMETRIZE: Final = "torch.nn.utils.parametrize"
_HEAP_TYPE: Final = 1 << 9  # flag of a class that was made by a class statement


def dump(value: object, file: Any, *, home: bool = False, reduce: Callable[[object], Any] | None = None) -> None:
    """Pickle an object with all definitions that it needs, for a process that may have none of them.

    Args:
        value: any object.
        file: open for writing bytes; `pickle.load` reads it.
        home: the receiver is the process that has sent this process its definitions, and needs only their names; and
            the names of objects that both have (`share`).
        reduce: called with each object that the receiver lacks; returns its reduced form or `NotImplemented`, or raises
            an error if it must not be pickled.
    """
    reducer = Reducer(DEFINITIONS.home, shared=shared_objects.names()) if home else Reducer()
    _Pickler(file, reducer, reduce).dump(value)


def dumps(value: object, *, home: bool = False) -> bytes:
    """Pickle an object as `dump` does, and return the bytes.

    Args:
        value: any object.
        home: see `dump`.
    """
    file = io.BytesIO()
    dump(value, file, home=home)
    return file.getvalue()


RESOLVERS: Final = Resolvers(dumps)  # one object, so that a pickle has the resolvers once


def dumps_for_peer(value: object) -> bytes:
    """Pickle an object for a process with the same script or job, which has all definitions.

    Args:
        value: any object.

    Raises:
        Exception: of pickle; also for an instance of a class that was defined in a function on each rank, and that is
            a different class on each rank for this reason.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        file = io.BytesIO()
        try:
            _Pickler(file, Reducer(DEFINITIONS.home, defines=False)).dump(value)
        except pickle.PicklingError:
            raise error from None
        return file.getvalue()


def supply_children() -> None:
    """Send definitions to the child processes of this worker, such as loader processes, after its job was read.

    Random generators of torch are sent, too, which torch's own form loses if the process is not forked.
    """
    import torch

    DEFINITIONS.reads_job = False
    ForkingPickler.register(torch.Generator, _reduced_generator)
    if DEFINITIONS.home:
        ForkingPickler.reducer_override = _with_definitions  # type: ignore[method-assign, assignment]


def _reduced_generator(generator: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a generator to bytes: torch's tensor of its state is released before a spawned process opens it."""
    return _generator, (str(generator.device), generator.get_state().numpy().tobytes())


def _generator(device: str, state: bytes) -> Any:
    import torch

    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _is_imported(module: types.ModuleType) -> bool:
    # Classes of modules may look up attributes at first access, also names that pickle asks for.
    return sys.modules.get(module.__name__) is module


def is_importable(value: Any) -> bool:
    """Return whether other processes can import a class or a function by its name.

    Args:
        value: a class or a function.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None) or value.__name__
    imported: Any = None if module in SCRIPTS else sys.modules.get(module)  # type: ignore[arg-type]
    try:
        for part in name.split("."):
            imported = getattr(imported, part)
    except AttributeError:
        return False
    return imported is value


def _public_name(kind: type) -> str:
    """Return the name by which a compiled class is imported, if it is not its own name; otherwise ""."""
    name = kind.__name__.lstrip("_")
    return name if not is_importable(kind) and getattr(sys.modules.get(kind.__module__), name, None) is kind else ""


def variables_of(function: types.FunctionType) -> list[str]:
    """Return the names of the script's variables that a function uses, and which are copied with it.

    Args:
        function: sent by value.
    """
    from cloudpickle.cloudpickle import _extract_code_globals

    if function.__globals__ is not vars(sys.modules["__main__"]):
        return []
    return [name for name in _extract_code_globals(function.__code__) if name in function.__globals__]


# -- sending -------------------------------------------------------------------------------------------------------


@final
class Reducer:
    """The method `reducer_override` of a pickler of any class.

    Args:
        known: names of the definitions that the receiver has.
        defines: send other definitions; False refuses them.
        shared: objects that the receiver has, with their names, by `id`.
    """

    def __init__(
        self, known: Collection[str] = (), *, defines: bool = True, shared: Mapping[int, tuple[str, Any]] | None = None
    ) -> None:  # fmt: skip
        self._known = known
        self._shared = shared or {}
        self._defines = defines
        self._cloudpickle: Any = None  # imported when needed
        self._hooks: dict[int, tuple[Any, str]] | None = None  # dictionaries of shared modules, built when needed
        self._script = _Namespace("__main__")

    def __call__(self, value: Any) -> Any:
        """Return the reduced form of an object, or `NotImplemented` for pickle's own."""
        kind = type(value)
        if self.shares(value):
            return shared_objects.find, (self._shared[id(value)][0],)
        if kind in _NAMED or issubclass(kind, type):
            return NotImplemented if is_importable(value) else self._definition(value)
        if kind in _PARTS:
            return self._pickler().dispatch_table[kind](value)
        if kind is types.ModuleType or (issubclass(kind, types.ModuleType) and _is_imported(value)):
            return self._pickler().dispatch_table[types.ModuleType](value)
        if kind.__module__ == "dataclasses" and value in _SENTINELS:
            return _SENTINELS[value]
        if kind is types.MethodType:  # pickle would look it up in a class that may be incomplete
            owner = value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
            return NotImplemented if is_importable(owner) else (kind, (value.__func__, value.__self__))
        if type(kind).__module__ == _COMPILED and hasattr(kind, "__members__") and _public_name(kind):
            # An enumeration such as torch.nn.attention.SDPBackend.
            return definitions.new_enumerator, (kind.__module__, _public_name(kind), int(value))
        if kind is weakref.ref:  # such as those of averages of weights to their parameters
            return definitions.new_reference, (value(),)
        if kind.__name__ == "RemovableHandle" and kind.__module__ == _HOOKS:
            return object.__new__, (kind,), self._handle(value), None, None, definitions.set_handle
        if kind is functools.cached_property:  # has a lock up to Python 3.11
            return kind, (value.func,), {"attrname": value.attrname, "__doc__": value.__doc__}
        if kind.__module__ == _PARAMETRIZE and "__getstate__" in vars(kind):  # a class of its own for each module
            base: Any = kind.__base__
            defines = getattr(base, "__getstate__", None) is not getattr(object, "__getstate__", None)
            state = base.__getstate__(value) if defines else vars(value)
            state = {**state, **_compilation(value)}
            return definitions.new_object, (base,), state, None, None, definitions.fill_parametrized
        if kind.__module__ in _CONFIGURATIONS and self._defines and not self._known:
            make, arguments, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return new_configuration, (RESOLVERS, make, arguments), *rest
        registers = _registers_class(value)
        if (compilation := _compilation(value)) or registers:
            make, arguments, state, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if registers:
                make, arguments = definitions.new_registered, (make, arguments)
            return make, arguments, {**state, **compilation}, *rest
        return (kind, (dict(value),)) if kind in _WEAK else NotImplemented

    def shares(self, value: object) -> bool:
        """Return whether the receiver has this object.

        Args:
            value: object that a pickle refers to.
        """
        return id(value) in self._shared

    def _handle(self, value: Any) -> tuple[int, list[Any]]:
        """Return the state of a handle: dictionaries of hooks of shared objects are those of the receiver."""
        if self._hooks is None:
            parts = [part for _, part in self._shared.values() if hasattr(part, "_forward_hooks")]
            items = [(part, name, held) for part in parts for name, held in vars(part).items()]
            self._hooks = {id(held): (part, name) for part, name, held in items if isinstance(held, dict)}
        held = [reference() for reference in (value.hooks_dict_ref, *value.extra_dict_ref)]
        return value.id, [self._hooks.get(id(hooks), hooks) for hooks in held]

    def _definition(self, value: Any) -> Any:
        if isinstance(value, type):
            if not value.__flags__ & _HEAP_TYPE:  # such as the class of None
                return self._pickler().reducer_override(value)
            if "__by_value__" in vars(value):
                return vars(value)["__by_value__"]
        name = DEFINITIONS.name_of(value)
        if name in self._known:
            return definitions.find, (name,)
        if not self._defines:
            raise pickle.PicklingError(f"{value.__qualname__} is defined in this process only")
        make, arguments, state, fill = self._reduced(value)
        public = getattr(value, "__qualname__", value.__name__)
        visible = public if vars(sys.modules["__main__"]).get(public) is value else None
        return definitions.make, (name, make, arguments), (name, visible, fill, state), None, None, definitions.fill

    def _reduced(self, value: Any) -> _Reduced:
        """Return constructor and arguments, and state and function that complete the object."""
        if isinstance(value, type):
            return self._reduced_class(value)
        attributes = {"__module__": value.__module__}
        if isinstance(value, typing.NewType):
            return typing.NewType, (value.__name__, value.__supertype__), attributes, definitions.set_attributes
        if isinstance(value, typing.ParamSpec):
            return typing.ParamSpec, (value.__name__,), attributes, definitions.set_attributes
        if isinstance(value, typing.TypeVar):
            make, arguments = self._pickler().dispatch_table[typing.TypeVar](value)
            return make, arguments, attributes, definitions.set_attributes
        if isinstance(value, _LRU):
            arguments = tuple(value.cache_parameters().values())
            return definitions.new_cached, arguments, vars(value), definitions.set_attributes
        if "_is_torch_compile" in vars(value):
            return definitions.new_compiled, _compiled(value), {}, definitions.set_attributes
        if "_torchdynamo_disable" in vars(value):
            return definitions.new_disabled, (value._torchdynamo_orig_callable,), {}, definitions.set_attributes
        return self._reduced_function(value)

    def _reduced_class(self, value: type) -> _Reduced:
        from cloudpickle.cloudpickle import _dynamic_class_reduce

        make, arguments, (attributes, slots), *_ = _dynamic_class_reduce(value)
        kept = {k: v for k, v in attributes.items() if not isinstance(v, types.MemberDescriptorType)}
        kept["__qualname__"] = value.__qualname__  # by which pickle finds a class within a class
        if issubclass(value, enum.Enum):
            return _reduced_enumeration(value, kept)
        kind, name, bases, namespace, *rest = arguments
        if issubclass(value, tuple):  # typing's NamedTuple among the original bases would make another class
            bases = value.__bases__
        if "__slots__" in vars(value):
            namespace["__slots__"] = vars(value)["__slots__"]
        return (
            definitions.new_class,
            (make, (kind, name, bases, namespace, *rest)),
            (kept, slots),
            definitions.fill_class,
        )

    def _reduced_function(self, value: types.FunctionType) -> _Reduced:
        make, (code, variables, *rest), (attributes, slots), *_ = self._pickler()._dynamic_function_reduce(value)
        if value.__globals__ is vars(sys.modules["__main__"]):
            variables = self._script
            slots["__globals__"] = {name: _importable(item) for name, item in slots["__globals__"].items()}
        elif (module := sys.modules.get(value.__globals__.get("__name__", ""))) and vars(module) is value.__globals__:
            variables, slots["__globals__"] = _Namespace(module.__name__), {}  # the receiver imports the module
        return make, (code, variables, *rest), (attributes, slots, _source(code.co_filename)), definitions.fill_function

    def _pickler(self) -> Any:
        if self._cloudpickle is None:
            import cloudpickle

            self._cloudpickle = cloudpickle.Pickler(io.BytesIO())
        return self._cloudpickle


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, reducer: Reducer, reduce: Callable[[object], Any] | None = None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._reducer, self._reduce = reducer, reduce

    def reducer_override(self, value: Any) -> Any:
        reduced = NotImplemented
        if self._reduce is not None and not self._reducer.shares(value):
            reduced = self._reduce(value)
        return self._reducer(value) if reduced is NotImplemented else reduced


def _with_definitions(pickler: Any, value: Any) -> Any:
    """Method `reducer_override` of multiprocessing's pickler in a worker, whose children may have no definitions."""
    if "_reducer" not in vars(pickler):
        pickler._reducer = Reducer()
    return pickler._reducer(value)


def _with_names(pickler: Any, value: Any) -> Any:
    """Method `reducer_override` of multiprocessing's pickler in a child of a worker, which has sent its definitions."""
    if "_reducer" not in vars(pickler):
        pickler._reducer = Reducer(DEFINITIONS.home)
    return pickler._reducer(value)


DEFINITIONS.forward = _with_names


def _reduced_enumeration(value: type[enum.Enum], attributes: Mapping[str, Any]) -> _Reduced:
    """Reduce an enumeration to the values, contents and attributes of its members, which are set without its methods.

    Cloudpickle sends the values only: members have no attributes that `__init__` or `__new__` sets, and no aliases.
    """
    base: Any = next(cls for cls in value.__mro__ if not cls.__flags__ & _HEAP_TYPE)
    members: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name, member in value.__members__.items():
        content = member._value_ if isinstance(member._value_, tuple) else (member._value_,)
        if (arguments_of := getattr(base, "__getnewargs__", None)) is not None:  # int, str, float, bytes, tuple
            content = arguments_of(member)
        members[name] = member._value_, () if base is object else content
    kept = {name: attribute for name, attribute in attributes.items() if name not in members}
    of_members = {
        name: {key: item for key, item in vars(member).items() if not (key[0] == key[-1] == "_")}
        for name, member in value.__members__.items()
    }
    boundary = getattr(value, "_boundary_", None)
    arguments = (type(value), value.__name__, value.__bases__, base, members, boundary)
    return definitions.new_enumeration, arguments, (kept, of_members), definitions.fill_enumeration


@final
class _Attribute:
    """An object of a module, pickled as a reference to the receiver's object."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __reduce__(self) -> tuple[Any, ...]:
        return definitions.attribute_of, (self._module, self._name)


def _importable(value: Any) -> Any:
    """Return a reference to an object that a script has imported, if a copy of it can't be made; else the object.

    A copy has the changes that the script has made to the object, and is preferred therefore.
    """
    module = getattr(type(value), "__module__", None)
    if isinstance(value, (type, *_NAMED)) or module in (*SCRIPTS, "builtins", None) or module not in sys.modules:
        return value
    named = [name for name, item in vars(sys.modules[module]).items() if item is value]
    if not named:
        return value
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # such as a recursion in __getattr__ of an object without its attributes
        return _Attribute(module, named[0])
    return value


@final
class _Namespace:
    """The variables of a module, pickled as a reference to the receiver's module."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        if self._module != "__main__":
            return definitions.namespace_of, (self._module,)
        script = vars(sys.modules["__main__"])
        return definitions.script_namespace, ({name: script[name] for name in _OF_SCRIPT if name in script},)


def _source(file: str) -> tuple[str, list[str]] | None:
    """Return the lines of a cell of a notebook, which is not a file, for tracebacks."""
    lines = [] if os.path.exists(file) else linecache.getlines(file)
    return (file, lines) if lines else None


def _compilation(value: Any) -> dict[str, Any]:
    """Return the attribute that `module.compile()` sets, and that torch's modules leave out of their state."""
    name = "_compiled_call_impl"
    compiled = vars(value).get(name) if hasattr(type(value), name) else None
    return {} if compiled is None else {name: compiled}


def _registers_class(value: Any) -> bool:
    """Return whether an object is a model of transformers, whose constructor registers its class in the process."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(value, library.PreTrainedModel)


def _compiled(value: Any) -> tuple[Any, ...]:
    """Return function, backend and options of a function from `torch.compile`."""
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    [context] = [content for content in cells if hasattr(content, "enter_exit_hooks")]
    backend = context.callback
    while not isinstance(backend, (bool, type(None))) and hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return value._torchdynamo_orig_callable, backend, getattr(context, "fullgraph", False), context._dynamic
