"""A call's arguments as one value: taken by name from a public function, handed on whole, and an operator's schema.

A loss has many options, which its kernel ops, their fakes, sharding strategies and backward passes all take. A frozen
dataclass names them once: `FromArguments.of` makes it of a function's arguments, and a `CallOp` is a kernel op that
takes its fields and gives the dataclass to what computes it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import UnionType
from typing import Any, ClassVar, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, get_args

from torch import Tensor

from llmk.registry.gradient import differentiating
from llmk.registry.kernel_op import KernelOp

T = TypeVar("T")
C = TypeVar("C", bound="FromArguments")
P = ParamSpec("P")


class FromArguments:
    """A base of dataclasses that are made of arguments by name."""

    _parts: ClassVar[dict[str, Any]] = {}
    """The fields by their names, each with what makes it of the same arguments, or None."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = inspect.get_annotations(cls).items()
        cls._parts = cls._parts | {name: _maker(kind) if _is_value(kind) else None for name, kind in own}

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **more: Any) -> Self:
        """Return the dataclass of fields that are found by name in `more` or else in `arguments`.

        `Call.of(locals())` is the way where an operator's function begins. What is no field is left out, and a field
        that is not found has its default. A field that is a `FromArguments` or NamedTuple itself, and is not found, is
        made of the same arguments.

        Raises:
            TypeError: A field without a default is not found.
        """
        fields: dict[str, Any] = {}
        given = {**arguments, **more} if more else arguments
        for name, part in cls._parts.items():
            if name in given:
                fields[name] = given[name]
            elif part is not None:
                fields[name] = part(given)
        return cls(**fields)


def from_arguments(kind: type[T], arguments: Mapping[str, Any], **more: Any) -> T:
    """Return a NamedTuple of fields that are found by name, as `FromArguments.of` does."""
    given, fields = {**arguments, **more}, {}
    for name in kind.__annotations__:
        if name in given:
            fields[name] = given[name]
    return kind(**fields)


def _maker(kind: Any) -> Callable[[Mapping[str, Any]], Any]:
    return kind.of if issubclass(kind, FromArguments) else functools.partial(from_arguments, kind)


def with_arguments(fn: Callable[Concatenate[dict[str, Any], P], T]) -> Callable[P, T]:
    """Return `fn` without its first parameter, for which it gets all its arguments by their names.

    It is what `locals()` is to an operator, for functions that Dynamo traces: its releases before torch 2.12 do not
    know `locals()`, and later ones stop where a closure has a variable that has no value yet.
    """
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())[1:]
    positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        return fn(arguments, *args, **kwargs)  # which refuses those that it does not take

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _annotations(kind: Any) -> Mapping[str, Any]:
    """Return the types of the fields by their names."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.type for field in dataclasses.fields(kind)}
    return kind.__annotations__


def _is_value(annotation: Any) -> bool:
    """Return True for a `FromArguments` or NamedTuple."""
    return isinstance(annotation, type) and (issubclass(annotation, FromArguments) or hasattr(annotation, "_fields"))


def _value_or_none(annotation: Any) -> Any:
    """Return the NamedTuple of which a field has one or None, else None."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else ()
    return next((each for each in members if _is_value(each)), None)


def _leaves(kind: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and type of each field, and in place of one that is a value itself those of its fields."""
    for name, annotation in _annotations(kind).items():
        if _is_value(annotation):
            yield from _leaves(annotation, f"{path}{name}.")
        else:
            yield f"{path}{name}", annotation


class _Optional(NamedTuple):
    """A field that has a NamedTuple of a kind or None."""

    get: Callable[[Any], Any]
    kind: Any
    places: slice  # of its fields, among the arguments
    nothing: tuple[Any, ...]  # the arguments of an op that say None


class CallOp(Generic[C]):
    """A kernel op with the arguments of `run`, but for a call the fields of `call_type`.

    Tensors come first. A field that is a dataclass or NamedTuple itself is its own fields. Those of a NamedTuple of
    numbers and strings that may be None come last, and are all 0 or "" where it is None.

    Args:
        name: The op's name.
        call_type: The dataclass.
        run: `run(call, ...)` launches its kernels; its parameters are annotated, as for a schema. The call is the first
            of them, or has others before it.
        on_host: Computes the same in plain PyTorch; this and all others take the arguments of `run`.
        outputs: The number of tensors it returns.
        fake: Gives outputs like those of `run`; None for an op that `KernelOp.register_backward` gets.
        flops: Counts its floating-point operations.
    """

    def __init__(
        self,
        name: str,
        call_type: type[C],
        run: Callable[..., Any],
        *,
        on_host: Callable[..., Any],
        outputs: int,
        fake: Callable[..., Any] | None,
        flops: Callable[..., int],
    ) -> None:
        self.call_type, given = call_type, list(inspect.signature(run).parameters.values())
        self.start = [issubclass(call_type, each.annotation) for each in given].index(True)
        parameters = self._lay_out(list(_leaves(call_type)))

        launch = differentiating(run, self.unpack)
        launch.__module__ = call_type.__module__
        launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*given[: self.start], *parameters, *given[self.start + 1 :]],
            return_annotation=tuple[(Tensor,) * outputs],
        )
        # The number of launches depends on sizes: inlined, each would need a graph of its own.
        self.op = KernelOp(launch, name=name, opaque=True)
        self.op.register_kernel("cpu")(differentiating(on_host, self.unpack))
        if fake is not None:
            self.op.register_fake(lambda *args: fake(*self.unpack(args)))
        self.op.register_flop_formula(lambda *args, out_val=None: flops(*self.unpack(args)))

    def _lay_out(self, leaves: list[tuple[str, Any]]) -> list[inspect.Parameter]:
        """Note where in the call each argument is, and return the parameters that are its fields."""
        tensors, optional = (Tensor, Tensor | None), {path: _value_or_none(kind) for path, kind in leaves}
        own = sorted((leaf for leaf in leaves if optional[leaf[0]] is None), key=lambda leaf: leaf[1] not in tensors)
        types = {path.rpartition(".")[2]: kind for path, kind in own}
        self._own = attrgetter(*(path for path, _ in own))
        self._optional: dict[str, _Optional] = {}
        for path, kind in optional.items():
            if kind is not None:
                first, types = len(types), {**types, **_annotations(kind)}
                nothing = tuple(each() for each in _annotations(kind).values())
                places = slice(self.start + first, self.start + len(types))
                self._optional[path.rpartition(".")[2]] = _Optional(attrgetter(path), kind, places, nothing)
        self.names, self.fields = list(types), len(types)
        self.tensors = sum(kind in tensors for kind in types.values())
        return [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in types.items()
        ]

    def unpack(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of `run`."""
        end = self.start + self.fields
        fields = dict(zip(self.names, args[self.start : end], strict=True))
        for name, each in self._optional.items():
            value = args[each.places]
            fields[name] = each.kind(*value) if any(value) else None
        return *args[: self.start], self.call_type.of(fields), *args[end:]

    def __call__(self, *args: Any) -> Any:
        call = args[self.start]
        given = self._own(call)
        for each in self._optional.values():
            given += each.get(call) or each.nothing
        return self.op(*args[: self.start], *given, *args[self.start + 1 :])

    def save_call(self, ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
        """Save the call, with which the arguments begin, and some results, in a `setup_context`."""
        ctx.options = inputs[self.tensors : self.fields]
        ctx.save_for_backward(*inputs[: self.tensors], *results)

    def saved_call(self, ctx: Any) -> tuple[C, tuple[Tensor, ...]]:
        """Return the call and the results that `save_call` saved, in a backward formula."""
        saved = ctx.saved_tensors  # once: under a checkpoint they are computed again, and given only once
        call, *_ = self.unpack((*saved[: self.tensors], *ctx.options))
        return call, saved[self.tensors :]
