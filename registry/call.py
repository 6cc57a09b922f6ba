"""A call's arguments as one value: taken by name from a public function, handed on whole, and an operator's schema.

A loss has many options, which its kernel ops, their fakes, sharding strategies and backward passes all take. A frozen
dataclass names them once: `from_arguments` makes it of a function's `locals()`, and a `CallOp` is a kernel op that
takes its fields and gives the dataclass to what computes it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import UnionType
from typing import Any, Generic, NamedTuple, Self, TypeVar, get_args

from torch import Tensor

from llmk.registry.gradient import differentiating
from llmk.registry.kernel_op import KernelOp

T = TypeVar("T")
C = TypeVar("C")


def from_arguments(kind: type[T], arguments: Mapping[str, Any], **more: Any) -> T:
    """Return a `kind`, a dataclass or NamedTuple, whose fields are found by name in `more` or else in `arguments`.

    What is no field is left out, and a field that is not found has its default. A field that is a dataclass or
    NamedTuple itself, and is not found, is made of the same arguments.

    Raises:
        TypeError: A field without a default is not found.
    """
    given, fields = {**arguments, **more}, {}
    for name, annotation in _annotations(kind).items():
        if name in given:
            fields[name] = given[name]
        elif _is_value(annotation):
            fields[name] = from_arguments(annotation, given)
    return kind(**fields)


class FromArguments:
    """A base of dataclasses that are made of arguments by name."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **more: Any) -> Self:
        """Return `from_arguments` of this class: `Call.of(locals())` where a public function begins."""
        return from_arguments(cls, arguments, **more)


def _annotations(kind: Any) -> dict[str, Any]:
    """Return the types of the fields by their names; Dynamo traces this, but not `dataclasses.fields` of a class."""
    if dataclasses.is_dataclass(kind):
        return {name: field.type for name, field in kind.__dataclass_fields__.items()}
    return kind.__annotations__


def _is_value(annotation: Any) -> bool:
    """Return True for a dataclass or NamedTuple."""
    return isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"))


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


def _name(path: str) -> str:
    return path.rpartition(".")[2]


class _Optional(NamedTuple):
    """A field that has a NamedTuple of this kind or None."""

    name: str
    get: Callable[[Any], Any]
    kind: Any

    @property
    def nothing(self) -> list[Any]:
        """The arguments of an op that say None."""
        return [kind() for kind in _annotations(self.kind).values()]


class CallOp(Generic[C]):
    """A kernel op whose first arguments are the fields of `call_type`; the others are those of `run` after the call.

    Tensors come first. A field that is a dataclass or NamedTuple itself is its own fields. Those of a NamedTuple of
    numbers and strings that may be None come last, and are all 0 or "" where it is None.

    Args:
        name: The op's name.
        call_type: The dataclass.
        run: `run(call, *rest)` launches its kernels; rest is annotated, as for a schema.
        on_host: `on_host(call, *rest)` computes the same in plain PyTorch.
        outputs: The number of tensors it returns.
        fake: `fake(call, *rest)` gives outputs like those of `run`.
        flops: `flops(call, *rest)` counts its floating-point operations.
    """

    def __init__(
        self,
        name: str,
        call_type: type[C],
        run: Callable[..., Any],
        *,
        on_host: Callable[..., Any],
        outputs: int,
        fake: Callable[..., Any],
        flops: Callable[..., int],
    ) -> None:
        self.call_type = call_type
        parameters = self._lay_out(list(_leaves(call_type)))

        @differentiating
        def launch(*args: Any) -> Any:
            return run(*self.unpack(args))

        launch.__module__ = call_type.__module__
        launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, *list(inspect.signature(run).parameters.values())[1:]],
            return_annotation=tuple[(Tensor,) * outputs],
        )
        # The number of launches depends on sizes: inlined, each would need a graph of its own.
        self.op = KernelOp(launch, name=name, opaque=True)
        self.op.register_kernel("cpu")(differentiating(lambda *args: on_host(*self.unpack(args))))
        self.op.register_fake(lambda *args: fake(*self.unpack(args)))
        self.op.register_flop_formula(lambda *args, out_val=None: flops(*self.unpack(args)))

    def _lay_out(self, leaves: list[tuple[str, Any]]) -> list[inspect.Parameter]:
        """Note where in the call each argument is, and return the parameters that are its fields."""
        tensors = (Tensor, Tensor | None)
        optional = {path: _value_or_none(kind) for path, kind in leaves if _value_or_none(kind) is not None}
        own = sorted((leaf for leaf in leaves if leaf[0] not in optional), key=lambda leaf: leaf[1] not in tensors)
        types = {_name(path): kind for path, kind in own}
        for kind in optional.values():
            types |= _annotations(kind)
        self._own = [attrgetter(path) for path, _ in own]
        self._optional = [_Optional(_name(path), attrgetter(path), kind) for path, kind in optional.items()]
        self.names, self.fields = list(types), len(types)
        self.tensors = sum(kind in tensors for kind in types.values())
        return [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in types.items()
        ]

    def unpack(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the call and the arguments after it."""
        given = dict(zip(self.names, args, strict=False))
        for each in self._optional:
            value = from_arguments(each.kind, given)
            given[each.name] = value if any(value) else None
        return from_arguments(self.call_type, given), *args[self.fields :]

    def __call__(self, call: C, *rest: Any) -> Any:
        optional = (part for each in self._optional for part in each.get(call) or each.nothing)
        return self.op(*(get(call) for get in self._own), *optional, *rest)

    def save_call(self, ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
        """In a `setup_context`: save the call, whose first fields are its tensors, and some results."""
        ctx.options = inputs[self.tensors : self.fields]
        ctx.save_for_backward(*inputs[: self.tensors], *results)

    def saved_call(self, ctx: Any) -> tuple[C, tuple[Tensor, ...]]:
        """In a backward formula: return the call and the results that `save_call` saved."""
        saved = ctx.saved_tensors  # once: under a checkpoint they are computed again, and given only once
        call, *_ = self.unpack((*saved[: self.tensors], *ctx.options))
        return call, saved[self.tensors :]
