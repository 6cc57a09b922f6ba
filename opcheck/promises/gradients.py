"""The promises about gradients; the form is that of results.py."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.calls import (
    call,
    every_kind,
    incoming_gradients,
    representatives,
    require_accurate,
    traced_kinds,
)
from llmk.opcheck.inputs import (
    BrokenPromise,
    Outcome,
    all_finite,
    as_list,
    differentiable_inputs,
    largest,
    prepare,
    rebound,
    same_bits,
    spread,
)
from llmk.opcheck.reference import Reference, reference_for
from llmk.registry import Op, Sample, set_short_path_enabled

HARSH = (2.0**6, 2.0**12, 2.0**-12, 0.0)
"""Factors of the inputs: ratios past float32's exponent, weights that are all on one class, rows of zeros."""


def finite_gradients(op: Op, samples: Sequence[Sample]) -> None:
    """Where outputs and all exact gradients are finite, gradients are: with inputs far larger and smaller too."""
    for sample in representatives(op, samples):
        for harsh in (sample, *_harsh(op, sample)):
            if differentiable_inputs(op, sample):
                require_finite(op, harsh, call(op, harsh), incoming_gradients)


def _harsh(op: Op, sample: Sample) -> Iterator[Sample]:
    """The sample with one of its floating tensors multiplied, each in turn."""
    for name, value in op.bind(sample).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            for factor in HARSH:
                scaled = (value.double() * factor).nan_to_num(0.0, posinf=float("inf"), neginf=float("-inf"))
                why = f"{sample.why}, {name} times {factor:g}"
                yield rebound(op, sample, op.bind(sample) | {name: scaled.to(value.dtype)}, why)


def require_finite(op: Op, sample: Sample, outcome: Outcome, grads: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
    """No gradient is NaN or infinite where the exact one is finite, if all outputs are.

    A call one of whose exact gradients is too large (`gradient_overflows`) is left alone: its optimizer step is lost
    whatever the others are, which is how a gradient scaler of float16 notices.
    """
    gradients = outcome.gradients.values()
    if all_finite(gradients) or not all_finite(outcome.outputs):
        return
    reference = reference_for(op, sample, outcome, grads)
    if gradient_overflows(reference, outcome):
        return
    for name, gradient in outcome.gradients.items():
        exact = reference.exact[reference.index_of(name)]
        if gradient is None or exact is None:
            continue
        wrong = ~gradient.isfinite() & exact.isfinite()
        if bool(wrong.any()):
            index = int(wrong.flatten().nonzero()[0])
            raise BrokenPromise(
                f"{sample}: element {index} of the gradient of {name} is {gradient.flatten()[index]:g} where outputs "
                f"are finite and {exact.flatten()[index]:.6g} is right",
                wrong=f"gradient of {name}",
            )


def gradient_overflows(reference: Reference, outcome: Outcome) -> bool:
    """Return True if an exact gradient is too large for its dtype: the step is lost whatever the others are.

    Backward passes multiply gradients by inputs, in float32. A gradient whose product with the largest input leaves
    float32's range is too large for them, in whatever order they multiply.
    """
    factor = max([1.0, *map(largest, outcome.inputs.values())])
    for name, gradient in outcome.gradients.items():
        exact = reference.exact[reference.index_of(name)]
        if exact is None or gradient is None:
            continue
        size = largest(exact)
        if size >= torch.finfo(gradient.dtype).max or factor * size >= torch.finfo(torch.float32).max:
            return True
    return False


def second_backward(op: Op, samples: Sequence[Sample]) -> None:
    """1: the second backward, and the last one without retain_graph, give the bits of the first; none has a graph."""
    for sample in samples:
        wanted = differentiable_inputs(op, sample)
        if not wanted:
            continue
        args, kwargs, tensors = prepare(op, sample, wanted)
        outputs = [output for output in as_list(op.overload(*args, **kwargs)) if output.requires_grad]
        inputs = [tensors[name] for name in wanted]
        grads = incoming_gradients(outputs)
        first, *others = (
            torch.autograd.grad(outputs, inputs, grads, retain_graph=kept) for kept in (True, True, False)
        )
        for which, gradients in zip(("second", "last"), others, strict=True):
            for name, a, b in zip(wanted, first, gradients, strict=True):
                if not same_bits(a, b):
                    words = f"{sample}: the {which} backward gives another gradient of {name}"
                    raise BrokenPromise(words, f"gradient of {name}")
                if b.requires_grad:
                    raise BrokenPromise(
                        f"{sample}: the gradient of {name} is part of a graph, which it keeps in memory"
                    )


def scaled_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient scaled by 2 gives gradients of which the half is right for the gradient itself."""
    for sample in samples:
        if differentiable_inputs(op, sample):
            outcome = call(op, sample, grads=lambda outputs: [2 * grad for grad in incoming_gradients(outputs)])
            reference = reference_for(op, sample, outcome, incoming_gradients)
            halves = {n: _half(grad, reference.exact[reference.index_of(n)]) for n, grad in outcome.gradients.items()}
            require_accurate(op, sample, replace(outcome, gradients=halves))


def _half(gradient: Tensor | None, exact: Tensor | None) -> Tensor | None:
    """Return the half of a gradient, and what is right where twice that is infinite in its dtype."""
    if gradient is None or exact is None or gradient.shape != exact.shape or gradient.is_complex():
        return gradient if gradient is None else gradient / 2
    return torch.where((2 * exact).to(gradient.dtype) == gradient, exact.to(gradient.dtype), gradient / 2)


def expanded_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient of stride 0, as `sum().backward()` makes it, by a sample of each kind, layout and width.

    Each output has another: with equal ones the composition's roundings can cancel, as those of a log-probability and
    of an entropy that both are nearly 0 do.
    """

    def expanded(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.full((), 0.7 + 0.2 * place, dtype=output.dtype, device=output.device).expand(output.shape)
            for place, output in enumerate(outputs)
        ]

    _with_gradients(op, samples, expanded)


def strided_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient whose elements are not neighbours in memory, by the same samples."""
    _with_gradients(op, samples, lambda outputs: [spread(grad) for grad in incoming_gradients(outputs)])


def _with_gradients(op: Op, samples: Sequence[Sample], grads: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
    for sample in every_kind(op, samples):
        if differentiable_inputs(op, sample):
            require_accurate(op, sample, call(op, sample, grads=grads), grads)


def input_subsets(op: Op, samples: Sequence[Sample]) -> None:
    """1: any subset of the inputs wants gradients, none of them too, of many inputs each one alone; by a sample of each
    kind, layout and width, or in 16 bits of each choice.
    """
    for sample in traced_kinds(op, samples, layouts=True):
        names = differentiable_inputs(op, sample)
        for size in range(len(names) if len(names) <= MOST_IN_SUBSETS else 2):
            for wanted in itertools.combinations(names, size):
                require_accurate(op, sample, call(op, sample, wanted))


MOST_IN_SUBSETS = 6
"""Inputs whose subsets are all tried; a module may have a hundred parameters."""


class _Undefined(torch.autograd.Function):
    """The same tensor, whose gradient is undefined on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def undefined_gradients(op: Op, samples: Sequence[Sample]) -> None:
    """6: an incoming gradient that is undefined is zero: of all outputs, and of all but each one in turn."""
    for path in paths_of(op):
        with path:
            _undefined_gradients(op, samples)


def paths_of(op: Op) -> Iterator[AbstractContextManager[Any]]:
    """Set the fast path of plain eager mode and, for llmk's operators, then that of the dispatcher.

    A path takes effect as it is made: ask for the next one when the last has been left.
    """
    for is_short in (True, False) if op.is_own else (True,):
        yield set_short_path_enabled(is_short)


def _undefined_gradients(op: Op, samples: Sequence[Sample]) -> None:
    for sample in representatives(op, samples):
        wanted = differentiable_inputs(op, sample)
        for defined in range(-1, _differentiable_outputs(op, sample, wanted)):
            args, kwargs, tensors = prepare(op, sample, wanted)
            outputs = as_list(op.overload(*args, **kwargs))
            wanting = [output for output in outputs if output.requires_grad]
            roots = [o if i == defined else _Undefined.apply(o) for i, o in enumerate(wanting)]
            torch.autograd.backward(roots, incoming_gradients(wanting))  # type: ignore[arg-type]
            gradients: dict[str, Tensor | None] = {name: _or_zeros(tensors[name]) for name in wanted}
            if defined < 0:
                _require_zeros(sample, gradients)
            elif len(wanting) > 1:

                def grads(outputs: Sequence[Tensor], defined: int = defined) -> list[Any]:
                    return [g if i == defined else None for i, g in enumerate(incoming_gradients(outputs))]

                outcome = Outcome(tensors, outputs, gradients)
                reference = reference_for(op, sample, outcome, grads)
                unused = [name for name in wanted if reference.composition[reference.index_of(name)] is None]
                _require_zeros(sample, {name: outcome.gradients.pop(name) for name in unused})
                require_accurate(op, sample, outcome, grads)


def _differentiable_outputs(op: Op, sample: Sample, wanted: Sequence[str]) -> int:
    if not wanted:
        return -1
    args, kwargs, _ = prepare(op, sample, wanted)
    return sum(output.requires_grad for output in as_list(op.overload(*args, **kwargs)))


def _or_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _require_zeros(sample: Sample, gradients: dict[str, Any]) -> None:
    for name, gradient in gradients.items():
        if bool((gradient.nan_to_num(0.0) != 0).any()):
            words = f"{sample}: undefined incoming gradients give a gradient of {name} that is not zero"
            raise BrokenPromise(words, f"gradient of {name}")
