"""Brings whatever PyTorch can call to the one form that the promises check: tensors by name in, fresh tensors out.

- An operator that mutates arguments is called on clones of them, and their new values are results after its own, as
  PyTorch's functionalization has it.
- A list of tensors becomes an argument for each of them, `xs_0` and so on, None where a sample's list is shorter.
- Of what it returns the tensors count, in order, those in lists and dictionaries too, and numbers as tensors of one.
- An `OpOverloadPacket`, what `torch.library.custom_op` and `triton_op` return, and a plain function have no schema: the
  first two stand for an overload, and a function's arguments are those of its signature.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.inputs import no_reference
from llmk.registry import Op, Sample
from llmk.registry.private.operators import is_overload, overload_of, schema_of


@dataclass(frozen=True)
class Argument:
    """An argument of a call, as `torch.FunctionSchema` describes it."""

    name: str
    kwarg_only: bool = False
    default: tuple[Any, ...] = ()
    type: str = ""
    """The type as it is written in a schema or an annotation; empty where there is none."""

    @property
    def default_value(self) -> Any:
        return self.default[0] if self.default else None

    def has_default_value(self) -> bool:
        return bool(self.default)


@dataclass(frozen=True)
class CallSchema:
    """The arguments of a call, and its results."""

    name: str
    arguments: Sequence[Argument]
    returns: Sequence[str]


@dataclass(frozen=True)
class Form:
    """The arguments of an operator: which it mutates, and the most tensors in each that is a list."""

    name: str
    arguments: Sequence[Argument]
    mutated: frozenset[str] = frozenset()
    lists: Mapping[str, int] = field(default_factory=dict)

    def parts(self, name: str) -> list[str]:
        return [f"{name}_{i}" for i in range(self.lists[name])] if name in self.lists else [name]

    def flat_arguments(self) -> list[Argument]:
        """An argument for each tensor of a list; none of the positional ones before it has a default then."""
        last = max((i for i, argument in enumerate(self.arguments) if argument.name in self.lists), default=-1)
        flat: list[Argument] = []
        for i, argument in enumerate(self.arguments):
            default = () if i <= last and not argument.kwarg_only else argument.default
            flat += [Argument(name, argument.kwarg_only, default) for name in self.parts(argument.name)]
        return flat

    def flat_sample(self, sample: Sample) -> Sample:
        if not self.lists:
            return sample
        given = dict(zip((argument.name for argument in self.arguments), sample.args, strict=False)) | sample.kwargs
        args, kwargs = [], {}
        for argument in self.arguments:
            if argument.name not in given and not argument.has_default_value():
                continue
            value = given.get(argument.name, argument.default_value)
            for place, name in enumerate(self.parts(argument.name)):
                part = value
                if argument.name in self.lists:
                    part = value[place] if place < len(value) else None
                if argument.kwarg_only:
                    kwargs[name] = part
                else:
                    args.append(part)
        return Sample(tuple(args), kwargs, why=sample.why)

    def call(self, fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., list[Tensor]]:
        """The function with flat arguments of these names, which are the form's own in their order."""

        def call(*args: Any, **kwargs: Any) -> list[Tensor]:
            positional, named = self.own_arguments(dict(zip(names, args, strict=False)) | kwargs)
            outputs = list(results_in(fn(*positional, **named)))
            given = named | dict(zip((argument.name for argument in self.arguments), positional, strict=False))
            mutated = [tensor for name in self.mutated_in_order() for tensor in tensors_in(given.get(name))]
            return outputs + [tensor for tensor in mutated if all(tensor is not output for output in outputs)]

        return call

    def mutated_in_order(self) -> list[str]:
        return [argument.name for argument in self.arguments if argument.name in self.mutated]

    def own_arguments(self, flat: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The operator's own arguments, clones of those that it mutates."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_position = True
        for argument in self.arguments:
            parts = self.parts(argument.name)
            if parts and parts[0] not in flat:
                by_position = False  # what follows is given by its name
                continue
            value = [flat[part] for part in parts]
            if argument.name in self.lists:
                value = [part for part in value if part is not None]
            if argument.name in self.mutated:
                value = [part.clone() if isinstance(part, Tensor) else part for part in value]
            given = value if argument.name in self.lists else value[0]
            if by_position and not argument.kwarg_only:
                args.append(given)
            else:
                kwargs[argument.name] = given
        return args, kwargs


class Adapted:
    """An operator behind a call of the one form."""

    def __init__(self, operator: Any, form: Form, returns: Sequence[str]) -> None:
        self.operator = operator
        self.__wrapped__ = operator  # where the kernels are found that its code names
        self.form = form
        flat = form.flat_arguments()
        self._schema = CallSchema(form.name, flat, returns)
        self._call = form.call(operator, [argument.name for argument in flat])

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return self._call(*args, **kwargs)

    def own_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The operator's own arguments, of those of a call."""
        names = [argument.name for argument in self._schema.arguments]
        return self.form.own_arguments(dict(zip(names, args, strict=False)) | dict(kwargs))


def adapted(op: Op, device: torch.device, dtypes: Sequence[torch.dtype]) -> Op:
    """Return the record of an operator in the one form; itself if it has that form already."""
    if isinstance(op.overload, Adapted):
        return op
    operator = overload_of(op.overload)
    registered = is_overload(operator)
    form = form_of(operator)
    samples = [sample for dtype in dtypes for sample in op.samples(device, dtype)]
    form = dataclasses.replace(form, lists=_list_lengths(form, samples))
    plain = registered and not form.mutated and not form.lists and _returns_tensors(operator)
    if plain:
        return op if operator is op.overload else dataclasses.replace(op, overload=operator)
    names = [argument.name for argument in form.flat_arguments()]
    reference = form.call(op.reference, names)
    returns = []
    if samples and op.reference is not no_reference:
        first = form.flat_sample(samples[0])
        with torch.no_grad():
            returns = [f"output {i}" for i, _ in enumerate(reference(*first.args, **first.kwargs))]

    def flat_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        return (form.flat_sample(sample) for sample in op.samples(device, dtype))

    def flat_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
        assert op.resized is not None
        return form.flat_sample(op.resized(rows, device, dtype))

    return dataclasses.replace(
        op,
        overload=Adapted(operator, form, returns),
        reference=reference,
        samples=flat_samples,
        resized=flat_resized if op.resized is not None else None,
        differentiable=tuple(part for name in op.differentiable for part in form.parts(name)),
    )


def registered(op: Op) -> Any:
    """Return the operator itself, whose schema says all; None of a plain function."""
    operator = overload_of(op.overload.operator if isinstance(op.overload, Adapted) else op.overload)
    return operator if is_overload(operator) else None


def declared_aliases(op: Op, outputs: int) -> dict[str, frozenset[str]]:
    """Return the alias sets that the schema gives inputs and outputs, as opcheck names them, of so many outputs.

    An argument that is mutated is an output as well, after those that are returned.
    """
    if registered(op) is None:
        return {}
    schema = schema_of(registered(op))
    named = [(f"input {argument.name}", argument.alias_info) for argument in schema.arguments]
    named += [(f"output {i}", result.alias_info) for i, result in enumerate(schema.returns)]
    mutated = [a.alias_info for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    named += [(f"output {outputs - len(mutated) + i}", alias) for i, alias in enumerate(mutated)]
    return {name: frozenset(alias.before_set) for name, alias in named if alias is not None}


def returns_alias(op: Op) -> bool:
    """Return True if the schema declares an output as an alias of an argument, which no compiled graph takes."""
    return registered(op) is not None and any(result.alias_info for result in schema_of(registered(op)).returns)


def form_of(operator: Any) -> Form:
    """The arguments of an overload or of a plain function."""
    return _form_of_schema(operator) if is_overload(operator) else _form_of_function(operator)


def _form_of_schema(operator: Any) -> Form:
    schema = schema_of(operator)
    arguments = [
        Argument(
            argument.name,
            argument.kwarg_only,
            (argument.default_value,) * argument.has_default_value(),
            str(argument.real_type).replace("SymInt", "int"),  # `type` calls a dtype or a layout an integer
        )
        for argument in schema.arguments
    ]
    mutated = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return Form(schema.name, arguments, frozenset(mutated))


def _form_of_function(function: Callable[..., Any]) -> Form:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        raise TypeError(f"overload: {function} takes *args or **kwargs, and opcheck calls arguments by their names")
    arguments = [
        Argument(
            parameter.name,
            parameter.kind is parameter.KEYWORD_ONLY,
            () if parameter.default is parameter.empty else (parameter.default,),
            _written(parameter.annotation),
        )
        for parameter in parameters
    ]
    mutated = frozenset(argument.name for argument in arguments if argument.name == "out")  # as PyTorch calls it
    return Form(getattr(function, "__qualname__", repr(function)), arguments, mutated)


def _written(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _list_lengths(form: Form, samples: Sequence[Sample]) -> dict[str, int]:
    """The most tensors in each argument that is a list of tensors in a sample."""
    names = [argument.name for argument in form.arguments]
    lengths: dict[str, int] = {}
    for sample in samples:
        for name, value in (dict(zip(names, sample.args, strict=False)) | sample.kwargs).items():
            if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
                lengths[name] = max(lengths.get(name, 0), len(value))
    return lengths


def _returns_tensors(operator: Any) -> bool:
    returns = schema_of(operator).returns
    return bool(returns) and all(str(result.type) == "Tensor" for result in returns)


def results_in(value: Any) -> Iterator[Tensor]:
    """The results of a call as tensors, numbers too: float32, as sums that end in one differ by their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from results_in(item)
    elif type(value) in _NUMBERS:
        yield torch.full((), value, dtype=_NUMBERS[type(value)], device="cpu")
    elif value is not None and not isinstance(value, str):
        raise TypeError(f"results: expected tensors and numbers, in lists or dictionaries, got {type(value).__name__}")


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float32}
_NUMBERS |= {torch.SymBool: torch.bool, torch.SymInt: torch.int64, torch.SymFloat: torch.float32}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
