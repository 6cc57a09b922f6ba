"""The promises about gradients; the form is that of promises.py."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmk.opcheck.calls import call, incoming_gradients, require_accurate
from llmk.opcheck.inputs import BrokenPromise, as_list, differentiable_inputs, prepare, same_bits, spread
from llmk.registry import Op, Sample


def second_backward(op: Op, samples: Sequence[Sample]) -> None:
    """1: with retain_graph the second backward gives the first one's bits."""
    for sample in samples:
        wanted = differentiable_inputs(op, sample)
        if not wanted:
            continue
        args, kwargs, tensors = prepare(op, sample, wanted)
        outputs = [output for output in as_list(op.overload(*args, **kwargs)) if output.requires_grad]
        inputs = [tensors[name] for name in wanted]
        grads = incoming_gradients(outputs)
        first, second = (torch.autograd.grad(outputs, inputs, grads, retain_graph=True) for _ in range(2))
        for name, a, b in zip(wanted, first, second, strict=True):
            if not same_bits(a, b):
                raise BrokenPromise(f"{sample}: the second backward gives another gradient of {name}")


def scaled_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient scaled by 2."""
    _with_gradients(op, samples, lambda outputs: [2 * grad for grad in incoming_gradients(outputs)])


def expanded_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient of stride 0, as `sum().backward()` makes it."""
    _with_gradients(
        op,
        samples,
        lambda outputs: [torch.full((), 0.7, dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs],
    )


def strided_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient whose elements are not neighbours in memory."""
    _with_gradients(op, samples, lambda outputs: [spread(grad) for grad in incoming_gradients(outputs)])


def _with_gradients(op: Op, samples: Sequence[Sample], grads: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
    for sample in samples:
        if differentiable_inputs(op, sample):
            require_accurate(op, sample, call(op, sample, grads=grads), grads)


def input_subsets(op: Op, samples: Sequence[Sample]) -> None:
    """1: any subset of the inputs wants gradients, none of them too."""
    for sample in samples:
        names = differentiable_inputs(op, sample)
        for size in range(len(names)):
            for wanted in itertools.combinations(names, size):
                require_accurate(op, sample, call(op, sample, wanted))
