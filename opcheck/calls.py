"""Running an operator on a sample: fresh inputs, the chosen ones wanting gradients, and what came out."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.accuracy import accuracy_violation, has_few
from llmk.registry import RULE, Op, Sample, Tolerance
from llmk.registry.launch import INTERPRET


class BrokenPromise(AssertionError):
    """A check found that the operator does not keep what it promises."""


@dataclass
class Outcome:
    """What a call gave."""

    inputs: dict[str, Tensor]
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


_watchers: list[Callable[[Sample], None]] = []


@contextlib.contextmanager
def watched_by(watcher: Callable[[Sample], None]) -> Iterator[None]:
    """Tell of the sample of every call that is prepared inside, in whatever thread."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def copy_with_layout(tensor: Tensor) -> Tensor:
    """A copy with its own memory and the same strides and offset, gaps and overlaps included."""
    storage = tensor.untyped_storage().clone()
    return tensor.detach().new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def differentiable_inputs(op: Op, sample: Sample) -> list[str]:
    """The sample's tensors that can get a gradient."""
    bound = op.bind(sample)
    return [name for name in op.differentiable if isinstance(bound.get(name), Tensor)]


def prepare(
    op: Op, sample: Sample, wanted: Sequence[str], change: Callable[[Tensor], Tensor] = copy_with_layout
) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
    """Positional and keyword arguments with every tensor changed (copied), and the tensors by name."""
    for watcher in _watchers:
        watcher(sample)
    tensors: dict[str, Tensor] = {}

    def fresh(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors[name] = change(value).requires_grad_(name in wanted)
        return tensors[name]

    args = [fresh(name, value) for name, value in zip(op.argument_names(), sample.args, strict=False)]
    kwargs = {name: fresh(name, value) for name, value in sample.kwargs.items()}
    return args, kwargs, tensors


def as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def incoming_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The same normal numbers every time, contiguous."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device, output.dtype)
        for output in outputs
    ]


def call(
    op: Op,
    sample: Sample,
    wanted: Sequence[str] | None = None,
    *,
    fn: Callable[..., Any] | None = None,
    grads: Callable[[Sequence[Tensor]], list[Tensor]] = incoming_gradients,
    change: Callable[[Tensor], Tensor] = copy_with_layout,
) -> Outcome:
    """Call the operator (or `fn` with its signature), and backward if any input wants a gradient."""
    wanted = differentiable_inputs(op, sample) if wanted is None else wanted
    args, kwargs, tensors = prepare(op, sample, wanted, change)
    outputs = as_list((fn or op.overload)(*args, **kwargs))
    gradients: dict[str, Tensor | None] = {}
    if wanted:
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            raise BrokenPromise(f"no output requires a gradient although {', '.join(wanted)} want one")
        torch.autograd.backward(differentiable, [grad.detach() for grad in grads(differentiable)])
        gradients = {name: tensors[name].grad for name in wanted}
    return Outcome(tensors, outputs, gradients)


def to_float64(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()


def float_dtype(op: Op, sample: Sample) -> torch.dtype:
    return next(v.dtype for v in op.bind(sample).values() if isinstance(v, Tensor) and v.is_floating_point())


def resized(op: Op, samples: Sequence[Sample], rows: Sequence[int]) -> Iterator[Sample]:
    if op.resized is None:
        return
    tensor = next(value for value in op.bind(samples[0]).values() if isinstance(value, Tensor))
    for count in rows:
        yield op.resized(count, tensor.device, float_dtype(op, samples[0]))


def first_line(error: Any) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


INTERPRETED = Tolerance(
    4.0, "Triton's interpreter cuts float32 to bfloat16 where a GPU rounds, and adds up columns one after the other"
)


def _tolerance(op: Op, dtype: torch.dtype) -> Tolerance:
    if INTERPRET:
        return INTERPRETED
    return op.tolerances.get(dtype, RULE)


def require_accurate(
    op: Op,
    sample: Sample,
    actual: Outcome,
    grads: Callable[[Sequence[Tensor]], list[Tensor]] = incoming_gradients,
) -> None:
    """The accuracy rule for every output and gradient of a call."""
    wanted = list(actual.gradients)

    def same_numbers(outputs: Sequence[Tensor]) -> list[Tensor]:
        given = grads([output for output in actual.outputs if output.requires_grad or not wanted])
        return [grad.to(output.dtype) for grad, output in zip(given, outputs, strict=True)]

    def reference(change: Callable[[Tensor], Tensor] = copy_with_layout) -> list[Tensor | None]:
        outcome = call(op, sample, wanted, fn=op.reference, grads=same_numbers, change=change)
        return [*outcome.outputs, *(outcome.gradients[name] for name in wanted)]

    dtype = next(t.dtype for t in actual.inputs.values() if t.is_floating_point())
    factor = _tolerance(op, dtype).factor
    names = [f"output {i}" for i in range(len(actual.outputs))] + [f"gradient of {name}" for name in wanted]
    ours = [*actual.outputs, *(actual.gradients[name] for name in wanted)]
    composition, exact = reference(), reference(to_float64)
    near: list[tuple[list[Tensor | None], list[Tensor | None]]] = []
    for i, name in enumerate(names):
        a, b, c = ours[i], composition[i], exact[i]
        if a is None or b is None or c is None:
            raise BrokenPromise(f"{sample}: {name} is missing")
        if not a.is_floating_point():
            continue
        violation = accuracy_violation(a, b, c, factor)
        if violation is not None and has_few(a, a.dtype):
            near = near or [(reference(_nudged(seed)), reference(_nudged(seed, torch.float64))) for seed in range(4)]
            pairs = [(x[i], y[i]) for x, y in near]
            violation = accuracy_violation(a, b, c, factor, pairs)  # type: ignore[arg-type]
        if violation is not None:
            raise BrokenPromise(f"{sample}: {name}: {violation}")


def _nudged(seed: int, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """Changes every element by one unit in its last place, up or down, the same way for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        copy = copy_with_layout(tensor)
        if not copy.is_floating_point():
            return copy
        memory = copy.new_empty(0).set_(copy.untyped_storage())
        signs = 2 * torch.randint(0, 2, memory.shape, generator=generator).to(memory.device) - 1
        memory.copy_(memory.double() * (1 + signs * torch.finfo(copy.dtype).eps))
        return copy if dtype is None else copy.to(dtype)

    return change
