"""Guards: what a replacement was derived from, checked in every call.

A replacement is right for what was tried: these values of attributes and of a configuration, these functions, nobody
who looks at a module that is no longer called. All of that can change afterwards. So what was tried is written down as
**facts**, expressions in the names of a method and what they gave, and a call asks whether they still hold; where one
does not, the original runs, with one warning, and the report says which fact it was and what ran. The facts of a method
are one compiled expression: some tenths of a microsecond in eager mode, and in a compiled graph Dynamo's own guards,
because Dynamo traces the expression.

What is read is seen while a module is tried, not told from its source: its attributes are read through a class that
writes down their names.
"""

import dis
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk.registry import autocast_dtype, foreign_kind
from llmk.registry.eager.bypass import is_eager
from llmk.registry.private.compilers import constant_in_graphs
from llmk.registry.private.modes import forward_mode_level, functorch_depth
from llmk.registry.private.modules import buffers_of, children_of, has_hooks, hooks_of, parameters_of
from llmk.registry.private.tensors import version_of
from llmk.transformers.probe import OWN_OF_MODULES, Differs, apart, tried
from llmk.transformers.subclass import quiet_subclass

FELL_BACK = "_llmk_fell_back"
"""The attribute of a module that says which of its guards failed, and what ran then."""
METHOD = "llmk_fell_back"
"""The method of patched modules that says so."""
KEPT, WHY = "llmk_kept_", "llmk_why_"
"""Methods of patched modules, with the name of a guarded one: whether its guard holds, and why not."""
ORIGINAL = "the model's own code runs"


MISSING = object()
PART = "llmk_part"
"""The name of a part of the module in the facts about it, after the one that finds it."""
PLAIN = (nn.Parameter, Tensor, type(None))
LINEAR = nn.Linear.forward


class Fact(NamedTuple):
    """An expression, and what it gave."""

    expression: str
    value: Any

    @property
    def is_identity(self) -> bool:
        """Return True if the value is compared by identity: functions, classes, True, False and None."""
        return not _is_plain(self.value) or self.value is None or isinstance(self.value, bool | type)


Facts = tuple[Fact, ...]


@functools.cache
def checked(facts: Facts, function: FunctionType) -> Callable[[Any], bool]:
    """Return what tells whether all facts hold for a module, `self` in them, in the globals of a function.

    They do not where a name is gone.
    """
    values = {f"llmk_{i}": fact.value for i, fact in enumerate(facts)}
    tests = [f"{f.expression} {'is' if f.is_identity else '=='} llmk_{i}" for i, f in enumerate(facts)]
    source = f"""def factory({", ".join(["is_hooked", "kind", *values])}):
    def holds(self):
        try:
            return {" and ".join(tests) or "True"}
        except AttributeError:
            return False
    return holds"""
    scope: dict[str, Any] = {}
    exec(compile(source, function.__code__.co_filename, "exec"), function.__globals__, scope)
    return scope["factory"](is_hooked, type, **values)


def broken(facts: Facts, function: FunctionType, module: nn.Module) -> str:
    """The first fact that does not hold for a module, in words."""
    names = {"self": module, "is_hooked": is_hooked, "kind": type}
    for fact in facts:
        try:
            now = eval(fact.expression, function.__globals__, names)
        except AttributeError:
            now = "not there"
        if now is fact.value or (not fact.is_identity and now == fact.value):
            continue
        if fact.expression.startswith("is_hooked("):
            return f"a hook looks at {fact.expression[len('is_hooked(') : -1].replace(PART, 'a part of it')}"
        return f"{fact.expression} is {_words(now)}, and was {_words(fact.value)}"
    return "it has changed"


def _words(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)[:40]


# ---- in a call


def guarded(base: type, name: str, made: Any, facts: Facts, otherwise: Any = None) -> dict[str, Any]:
    """Methods for a subclass of `base`: NAME, which is `made` while the guard holds, and what tells whether it does.

    Args:
        facts: Must hold, and `base` must have the method that `made` was made from.
        otherwise: Runs where the guard does not hold, the method of `base` if it is None.
    """
    original = getattr(base, name)
    still = checked(facts, inspect.unwrap(original))

    def kept(self: Any) -> bool:
        return getattr(base, name) is original and not is_transformed() and still(self)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kept(self):
            return made(self, *args, **kwargs)
        getattr(self, METHOD)(name)
        return (otherwise or getattr(base, name))(self, *args, **kwargs)

    def why(self: Any) -> str:
        if getattr(base, name) is not original:
            return f"{base.__qualname__}.{name} was replaced"
        if is_transformed():
            return "a transform of torch.func, or forward-mode AD, is active"
        return broken(facts, inspect.unwrap(original), self)

    call = functools.update_wrapper(with_own_code(call, f"{base.__qualname__}.{name}"), made)
    return {name: call, f"{KEPT}{name}": kept, f"{WHY}{name}": why}


def is_transformed() -> bool:
    """Return True inside a transform of `torch.func` or forward-mode AD, which operators refuse."""
    return functorch_depth() > 0 or forward_mode_level() >= 0


def with_own_code(function: FunctionType, name: str) -> FunctionType:
    """The function with a code object that no other has, because what is compiled is kept by code."""
    code = function.__code__.replace(co_name=name.rpartition(".")[2], co_qualname=name)
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


@constant_in_graphs
def llmk_fell_back(self: nn.Module, method: str = "forward", why: str = "", ran: str = ORIGINAL) -> None:
    """Write down, and warn once, that a guard failed: in a compiled graph where it is traced."""
    why = why or getattr(self, WHY + method)()
    known = vars(self).setdefault(FELL_BACK, {})
    if why not in known:
        known[why] = ran
        warnings.warn(f"llmk: {type(self).__name__}: {ran}, as before patch(): {why}", stacklevel=4)


def is_hooked(module: nn.Module) -> bool:
    """Return True if somebody looks at, or changes, what goes into `module` or comes out of it."""
    return has_hooks(module) or has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Return True if `module` itself has a `forward`, other than its class's.

    The package `kernels` writes that of the class into a module for which it has no kernel.
    """
    return "forward" in module.__dict__ and getattr(module.forward, "__func__", None) is not type(module).forward


def why_no_weight(tensor: Any) -> str | None:
    """The reason for which an operator does not take a weight, in words: a tensor subclass computes in its own way.

    A quantized weight of torchao's is one, which dequantizes or takes over products. A DTensor is what operators know.
    """
    kind = None if type(tensor) in PLAIN else foreign_kind(tensor)
    return None if kind is None else f"a weight is a {kind}"


def has_plain_weights(module: nn.Module, *tensors: Any) -> bool:
    """Return True if operators take a patched module's weights; say so in the report if they do not."""
    for tensor in tensors:
        if type(tensor) not in PLAIN and (why := why_no_weight(tensor)):
            getattr(module, METHOD)("forward", why)
            return False
    return True


def recomputes() -> bool:
    """Return True if a call may keep less for a backward pass: plain eager mode, in which nobody else decides that."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_eager()


def is_plain_linear(module: Any, x: Tensor) -> bool:
    """Return True for PyTorch's linear layer that nobody looks at, whose weight wants a gradient, for an x it takes."""
    if type(module) is not nn.Linear or nn.Linear.forward is not LINEAR or is_hooked(module):
        return False
    weight, bias = module.weight, module.bias
    if type(weight) not in PLAIN or type(bias) not in PLAIN or hasattr(weight, "ds_id") or not weight.requires_grad:
        return False
    return weight.dtype == x.dtype or autocast_dtype(x.device) is not None


BRINGERS = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.utils.", "deepspeed.", "llmk.")
"""The modules of hooks that bring a module its weights, and neither look at what passes nor change it."""


def _brings_weights(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    kinds = [hook] if isinstance(hook, FunctionType | MethodType) else type(hook).__mro__
    return any(f"{kind.__module__}.".startswith(BRINGERS) for kind in kinds)


@constant_in_graphs
def llmk_only_brings_weights(self: nn.Module) -> bool:
    """Return True if all hooks on a module bring its weights."""
    return "forward" not in vars(self) and all(map(_brings_weights, hooks_of(self)))


# ---- what is no longer called


class Called(NamedTuple):
    """A function or a module that a replacement no longer calls, or a module's class and the facts of such a module."""

    what: Any
    facts: Facts = ()

    def check(self) -> Callable[[Any], bool]:
        """Return what tells whether an object is still what was tried, and nobody looks at it."""
        what, still = self.what, checked(self.facts, self._function) if self.facts else lambda now: True
        if isinstance(what, type):
            return lambda now: type(now) is what and still(now)
        return lambda now: now is what and still(now)

    @property
    def _function(self) -> FunctionType:
        """The function in whose globals its facts are."""
        if self.what is functools.partial:
            return _facts_of_partial
        what = type(self.what) if isinstance(self.what, nn.Module) else self.what
        return inspect.unwrap(what.forward if isinstance(what, type) else what)

    def as_part(self, path: str) -> Facts:
        """The same as facts of the module around, for a module at a path."""
        own = [fact for fact in self.facts if "self" in fact.expression]
        inside = (Fact(fact.expression.replace("self", PART, 1), fact.value) for fact in own)
        return (Fact(f"kind({PART} := {path})", self.what), *inside)

    def why(self, name: str, now: Any) -> str:
        """The reason for which an object of that name is not what was tried, in words."""
        if now is self.what or type(now) is self.what:
            return broken(self.facts, self._function, now).replace("self", name, 1)
        return f"{name} is {_words(type(now) if isinstance(now, nn.Module) else now)}, and was {_words(self.what)}"


def called_of(value: Any, args: Collection[Any] = ()) -> Called:
    """Return a function, or a module without parameters, as what a replacement calls no longer.

    Args:
        value: The function or the module.
        args: The arguments to call a module with, to see what it reads, so that each module of its class that reads
            the same is taken; without them it stands for itself alone.

    Raises:
        Differs: It keeps something for later, reads what may change unseen, or has parts, which may do so.
    """
    if isinstance(value, functools.partial):
        return Called(functools.partial, _facts_of_partial("self", value))
    if isinstance(value, FunctionType):
        return Called(value, _globals_of(inspect.unwrap(value), strict=False))
    if not isinstance(value, nn.Module):
        return Called(value)
    unhooked = Fact("is_hooked(self)", False)
    if not args:
        return Called(value, (unhooked,))
    if has_parts(value):
        raise Differs(f"{type(value).__name__} has parts of its own")
    forward = type(value).forward
    facts = dict.fromkeys([Fact("kind(self).forward", forward), unhooked])
    for training in (True, False):
        facts |= dict.fromkeys(reads_of(forward, apart(value, {}, training), args))
    return Called(type(value), tuple(facts))


def has_parts(module: nn.Module) -> bool:
    return bool(parameters_of(module) or buffers_of(module) or children_of(module))


def no_longer(self: nn.Module, name: str, called: Called, now: Any) -> None:
    """Say in the report of a patched module that what it calls is another one now."""
    why = f"{name} is no longer what was tried" if torch.compiler.is_compiling() else called.why(name, now)
    getattr(self, METHOD)("forward", why)


# ---- finding facts


def reads_of(function: Callable[..., Any], twin: nn.Module, args: Iterable[Any]) -> Facts:
    """Return the facts that a method reads when it is called with a twin of a module, see `probe.apart`.

    Raises:
        Differs: It keeps something for later, or reads what may change unseen.
    """
    facts = dict.fromkeys(_globals_of(inspect.unwrap(function), strict=True))
    log: dict[str, Any] = {}
    before, buffers = _snapshot(twin), {n: version_of(b) for n, b in buffers_of(twin).items() if b is not None}
    object.__setattr__(twin, "__class__", _recording(type(twin), "self", log))
    tried(function, twin, *args)
    kept = [*_changed(before, _snapshot(twin))]
    kept += [name for name, b in buffers_of(twin).items() if b is not None and buffers.get(name) != version_of(b)]
    if kept:
        raise Differs(f"its forward keeps something for later: {', '.join(sorted(kept))}")
    for path, value in log.items():
        facts |= dict.fromkeys(_fact(path, value, twin))
    return tuple(facts)


def _snapshot(module: nn.Module) -> dict[str, tuple[int, Any]]:
    plain = (list, dict, set)
    return {
        name: (id(value), value.copy() if isinstance(value, plain) and name not in OWN_OF_MODULES else None)
        for name, value in vars(module).items()
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            yield name


def _recording(cls: type, path: str, log: dict[str, Any]) -> type:
    """A class whose objects write down what is read of them."""
    read: Any = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        if name in OWN_OF_MODULES or name.startswith("__"):
            return read(self, name)
        try:
            value = read(self, name)
        except AttributeError:
            log.setdefault(f"{path}.{name}", MISSING)
            raise
        if _is_record(value):
            return _recorded(value, f"{path}.{name}", log)
        log[f"{path}.{name}"] = value
        return value

    return quiet_subclass(cls, {"__getattribute__": __getattribute__})


def _recorded(value: Any, path: str, log: dict[str, Any]) -> Any:
    """A copy of an object that writes down what is read of it; the object where it has no such copy."""
    try:
        twin = object.__new__(_recording(type(value), path, log))
    except TypeError:
        log[path] = value
        return value
    vars(twin).update(vars(value))
    return twin


_OPAQUE = (
    nn.Module,
    Tensor,
    tuple,
    list,
    dict,
    set,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    MethodType,
    Enum,
)
_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum)


def _is_record(value: Any) -> bool:
    """Return True if it is an object whose attributes may be read, such as a configuration."""
    return not isinstance(value, _OPAQUE) and hasattr(value, "__dict__") and not callable(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _fact(path: str, value: Any, twin: nn.Module) -> Facts:
    """Return the facts by which a value that was read at a path is known to be still the same."""
    *_, name = path.split(".")
    of_twin = path.count(".") == 1
    if value is MISSING:
        if of_twin and any(name in held for held in (parameters_of(twin), buffers_of(twin), children_of(twin))):
            if buffers_of(twin).get(name) is not None:
                raise Differs(f"reads {path}, a buffer, whose values may change")
            return ()
        return (Fact(f"hasattr({path.rpartition('.')[0]}, {name!r})", False),)
    if isinstance(value, MethodType):
        return (Fact(f"{path}.__func__", value.__func__),)
    if isinstance(value, functools.partial):
        return _facts_of_partial(path, value)
    if _is_plain(value) or callable(value):
        return (Fact(path, value),)
    raise Differs(f"reads {path}, a {type(value).__name__}, which may change")


def _facts_of_partial(path: str, value: "functools.partial[Any]") -> Facts:
    """Return the facts of what a partial calls and gives: a copy of a partial is another object."""
    items = [(f"{path}.args", value.args), *((f"{path}.keywords[{k!r}]", v) for k, v in value.keywords.items())]
    for _, item in items:
        if not _is_plain(item):
            raise Differs(f"{path} is given a {type(item).__name__}, which may change")
    facts = [(f"{path}.func", value.func), (f"len({path}.keywords)", len(value.keywords)), *items]
    return tuple(Fact(expression, item) for expression, item in facts)


def _globals_of(function: FunctionType, *, strict: bool) -> Facts:
    """The functions and numbers among the globals of a function, and of its module's functions that it calls.

    Raises:
        Differs: It stores a global or, where one is `strict`, reads another kind of object.
    """
    found: dict[Fact, None] = {}
    todo, seen = [function], set()
    while todo:
        code = todo.pop().__code__
        seen.add(code)
        for name in _names(code):
            value = function.__globals__.get(name, MISSING)
            if isinstance(value, types.ModuleType | type) or value is MISSING or _is_table(value):
                continue
            if not _is_plain(value) and not callable(value):
                if not strict:
                    continue
                raise Differs(f"reads {name}, a {type(value).__name__}, which may change")
            found[Fact(name, value)] = None
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                todo += [value] if value.__code__ not in seen else []
    return tuple(found)


def _is_table(value: Any) -> bool:
    """Return True if it is a mapping of names to functions and classes, such as a library has of its activations."""
    items = value.values() if isinstance(value, dict) else [None]  # of which None is no function
    return all(callable(item[0] if isinstance(item, tuple) and item else item) for item in items)


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that a function and those inside it load.

    Raises:
        Differs: It stores one.
    """
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Differs(f"its forward keeps something for later: {instruction.argval}")
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
