"""Operators that have no record: samples made from the signature, and gradients as calls show them.

What shapes an operator takes stands in no signature, so plans of shapes are tried in turn: the first that the reference
and the operator both take is the one, and opcheck says which samples it made.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import copy_with_layout
from llmk.opcheck.availability import names_device
from llmk.opcheck.calls import first_line
from llmk.opcheck.foreign.adapters import Argument, Form, form_of, tensors_in
from llmk.opcheck.inputs import NothingToCheck, mapped, no_reference
from llmk.registry import Op, Sample
from llmk.registry.private.operators import is_overload, overload_of, schema_of

Shape = tuple[int, ...]

_INDEX = re.compile(r"(^|_)(index|indices|idx|ids|targets?|labels?)$")
_MASK = re.compile(r"(^|_)mask$")
_NO_FORMULA = re.compile(r"no autograd formula|not implemented|does not require grad|derivative", re.IGNORECASE)
_OUT = 7
"""The columns of a product."""
_SIZES = ((3, 37, "odd width"), (4, 16, "powers of two"), (0, 8, "no rows"))


@dataclass(frozen=True, kw_only=True)
class Unrecorded(Op):
    """An operator without a record, from a module that may be known."""

    origin: str = ""
    traced: bool = True
    """True where it claims that Dynamo traces it, which is then checked."""


def unmade(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Stands for samples that are to be made from the signature."""
    return []


def record_of(operator: Any, origin: str = "") -> Op:
    """Return an operator's record; of an operator or a function that has none, one that `completed` completes.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(operator, Op):
        return operator
    overload = overload_of(operator)
    if not callable(overload) or isinstance(overload, type):
        raise TypeError(f"op: expected an operator, a function or a llmk.registry.Op, got {operator!r}")
    name = (
        schema_of(overload).name.rpartition("::")[2]
        if is_overload(overload)
        else getattr(overload, "__name__", repr(overload))
    )
    return Unrecorded(
        name=name, overload=operator, reference=no_reference, samples=unmade, differentiable=(), origin=origin
    )


@dataclass(frozen=True)
class _Plan:
    """Shapes of tensors by their place among an operator's tensors, for so many rows and columns."""

    words: str
    shape: Callable[[int, int, int], Shape]


_PLANS = (
    _Plan("tensors of one shape", lambda place, rows, columns: (rows, columns)),
    _Plan(
        "rows, a weight of a row for each output, vectors",
        lambda place, rows, columns: ((rows, columns), (_OUT, columns), (_OUT,))[min(place, 2)],
    ),
    _Plan(
        "matrices to multiply, vectors",
        lambda place, rows, columns: ((rows, columns), (columns, _OUT), (_OUT,))[min(place, 2)],
    ),
    _Plan("rows, then vectors", lambda place, rows, columns: (rows, columns) if place == 0 else (columns,)),
    _Plan("vectors", lambda place, rows, columns: (columns,)),
    _Plan("tensors of three axes", lambda place, rows, columns: (2, rows, columns)),
    _Plan("tensors of four axes", lambda place, rows, columns: (2, 3, rows, columns)),
)


@dataclass(frozen=True)
class _Making:
    """Makes calls of a signature by a plan."""

    form: Form
    plan: _Plan

    def sample(
        self,
        rows: int,
        columns: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        why: str,
        full: bool = False,
        flipped: str = "",
    ) -> Sample:
        """A call; `full` gives the optional tensors too, and one argument that is true or false may be flipped."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_position, place, numbers = True, 0, 0
        for argument in self.form.arguments:
            is_tensor = _is_tensor(argument)
            if is_tensor and (full or not argument.has_default_value()):
                value = self._tensors(argument, place, rows, columns, device, dtype)
            elif argument.name == flipped:
                value = not (argument.default_value or False)
            elif argument.has_default_value():
                by_position, place = False, place + is_tensor
                continue
            else:
                numbers += argument.type == "int"
                value = _plain_value(argument, numbers)
            place += is_tensor
            if by_position and not argument.kwarg_only:
                args.append(value)
            else:
                kwargs[argument.name] = value
        return Sample(tuple(args), kwargs, why=why)

    def _tensors(
        self, argument: Argument, place: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype
    ) -> Any:
        shape = self.plan.shape(place, rows, columns)
        if _INDEX.search(argument.name):
            shape = self.plan.shape(0, rows, columns)[:-1] or (columns,)
            below = max(1, min(rows, columns, _OUT))
            return torch.randint(below, shape, device="cpu", dtype=torch.int64).to(device)
        if _MASK.search(argument.name):
            return torch.rand(self.plan.shape(0, rows, columns), device=device, dtype=torch.float32) < 0.5
        made = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
        return made if _is_list(argument) else made[0]


def _is_tensor(argument: Argument) -> bool:
    return "Tensor" in argument.type or (not argument.type and not argument.has_default_value())


def _is_list(argument: Argument) -> bool:
    return bool(re.search(r"(List|list|Sequence|tuple)\[.*Tensor", argument.type))


def _plain_value(argument: Argument, number: int) -> Any:
    """Return a value for an argument that is no tensor and has no default; the whole numbers of a call differ."""
    values: dict[str, Any] = {"float": 0.5, "number": 0.5, "bool": False}
    values |= {"int": -1 if argument.name in ("dim", "axis") else number}
    values |= dict.fromkeys(("ScalarType", "torch.dtype"), torch.float16)
    if argument.type not in values:
        raise NothingToCheck(
            f"no samples: of {argument.name} the signature has no default, and says {argument.type}; give samples"
        )
    return values[argument.type]


def completed(op: Op, device: torch.device, dtypes: Sequence[torch.dtype] | None) -> tuple[Op, list[str]]:
    """Return a record with samples and gradients where it had none, and lines that say what was made.

    Raises:
        NothingToCheck: No call can be made of the signature; the text says what to do.
    """
    if not isinstance(op, Unrecorded):
        return op, []
    said: list[str] = []
    if op.samples is unmade:
        op, words = _with_samples(op, device)
        said.append(words)
        if dtypes is None:
            op, words = _without_refused_dtypes(op, device)
            said += words
    op = dataclasses.replace(op, differentiable=_differentiable(op, device))
    said.append(f"gradients of {', '.join(op.differentiable)}" if op.differentiable else "no gradients")
    if op.reference is no_reference:
        said.append("no reference, so no result is compared: `--reference MODULE:NAME` says what is right")
    return op, said


def _with_samples(op: Op, device: torch.device) -> tuple[Op, str]:
    try:
        form, errors = form_of(overload_of(op.overload)), []
    except (TypeError, ValueError) as error:  # *args, or no signature at all
        raise NothingToCheck(f"no samples: {error}") from None
    takes = partial(_takes, op, form, device)
    for plan in _PLANS:
        making = _Making(form, plan)
        error = takes(making.sample(*_SIZES[0][:2], device, torch.float32, why=""))
        if error is None:
            break
        errors.append(error)
    else:
        raise NothingToCheck(
            f"no samples: it refuses those made from its signature, such as {_PLANS[0].words} "
            f"({first_line(errors[0])}); give samples"
        )
    recipes = [partial(making.sample, rows, columns, why=why) for rows, columns, why in _SIZES]
    recipes += [
        partial(making.sample, *_SIZES[0][:2], why=f"{argument.name} flipped", flipped=argument.name)
        for argument in form.arguments
        if argument.type == "bool"
    ]
    if any(_is_tensor(argument) and argument.has_default_value() for argument in form.arguments):
        full = [
            partial(_Making(form, plan).sample, *_SIZES[0][:2], why="every tensor given", full=True) for plan in _PLANS
        ]
        recipes += [recipe for recipe in full if takes(recipe(device, torch.float32)) is None][:1]
    recipes = recipes[:1] + [r for r in recipes[1:] if takes(r(device, torch.float32), of_reference=True) is None]
    shown = ", ".join(str(recipe(device, torch.float32)) for recipe in recipes)

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        return (recipe(device, dtype) for recipe in recipes)

    op = dataclasses.replace(op, samples=samples, resized=_resized(making, takes, device))
    return op, f"samples made from its signature, {making.plan.words}: {shown}"


def _resized(
    making: _Making, takes: Callable[..., Exception | None], device: torch.device
) -> Callable[[int, torch.device, torch.dtype], Sample] | None:
    def resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
        return making.sample(rows, 24, device, dtype, why="resized")

    possible = all(takes(resized(rows, device, torch.float32), of_reference=True) is None for rows in (0, 33))
    return resized if possible else None


def _takes(op: Op, form: Form, device: torch.device, sample: Sample, *, of_reference: bool = False) -> Exception | None:
    """Return what is raised by a call: by that of the reference, and of the operator unless the former decides.

    An operator that has no code for the device refuses every call, and none of them for its shapes.
    """
    has_reference = op.reference is not no_reference
    if has_reference:
        error = _error_of(form, op.reference, sample)
        if error is not None or of_reference:
            return error
    error = _error_of(form, overload_of(op.overload), sample)
    return None if error is not None and device.type == "cpu" and names_device(error) else error


def _error_of(form: Form, function: Callable[..., Any], sample: Sample) -> Exception | None:
    try:
        _results(form, function, sample)
    except Exception as error:
        return error
    return None


def _results(
    form: Form, function: Callable[..., Any], sample: Sample, wanted: Sequence[str] = ()
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """The results of a call on copies, and those of the copies that want a gradient, by argument."""
    leaves: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def fresh(name: str, tensor: Tensor) -> Tensor:
        copy = copy_with_layout(tensor)
        if name in wanted and copy.is_floating_point():
            leaves[name].append(copy.requires_grad_())
        return copy

    named = zip(form.arguments, sample.args, strict=False)
    args = [mapped(partial(fresh, argument.name), value) for argument, value in named]
    kwargs = {name: mapped(partial(fresh, name), value) for name, value in sample.kwargs.items()}
    return list(tensors_in(function(*args, **kwargs))), leaves


def _without_refused_dtypes(op: Op, device: torch.device) -> tuple[Op, list[str]]:
    form, refused = form_of(overload_of(op.overload)), {}
    for dtype in op.dtypes:
        error = _takes(op, form, device, next(iter(op.samples(device, dtype))))
        if error is not None:
            refused[dtype] = f"{str(dtype).removeprefix('torch.')}, which it refuses ({first_line(error)})"
    op = dataclasses.replace(op, dtypes=tuple(dtype for dtype in op.dtypes if dtype not in refused))
    return op, [f"not in {words}" for words in refused.values()]


def _differentiable(op: Op, device: torch.device) -> tuple[str, ...]:
    """The arguments that get a gradient: the reference's, if the operator has a formula, or else its own."""
    overload = overload_of(op.overload)
    form = form_of(overload)
    names = [a.name for a in form.arguments if _is_tensor(a) and a.name not in form.mutated]
    found: set[str] = set()
    for sample in op.samples(device, op.dtypes[0]):
        own = _with_gradient(form, overload, sample, names) if _has_formula(overload, sample) else set()
        if op.reference is no_reference or not own:
            found |= own
        else:
            found |= _with_gradient(form, op.reference, sample, names)
    return tuple(name for name in names if name in found)


def _has_formula(operator: Any, sample: Sample) -> bool:
    """Return False where autograd only records what an operator's code for the device calls, as PyTorch warns."""
    if not is_overload(operator):
        return True
    utility = "test_autograd_registration"
    args, kwargs = mapped(_wanting, sample.args), mapped(_wanting, sample.kwargs)
    result = torch.library.opcheck(operator, args, kwargs, test_utils=utility, raise_exception=False)[utility]
    return not isinstance(result, AssertionError)


def _wanting(tensor: Tensor) -> Tensor:
    """Return a copy that wants a gradient where it can."""
    return copy_with_layout(tensor).requires_grad_(tensor.is_floating_point())


def _with_gradient(form: Form, function: Callable[..., Any], sample: Sample, names: Sequence[str]) -> set[str]:
    """The arguments that a call gives a gradient; none without a formula, all where a backward pass fails otherwise."""
    try:
        outputs, leaves = _results(form, function, sample, names)
        wanting = [output for output in outputs if output.requires_grad]
        if wanting:
            torch.autograd.backward(wanting, [torch.ones_like(output) for output in wanting])
    except Exception as error:
        return set() if _NO_FORMULA.search(str(error)) or names_device(error) else set(names)
    return {name for name, tensors in leaves.items() if any(tensor.grad is not None for tensor in tensors)}
