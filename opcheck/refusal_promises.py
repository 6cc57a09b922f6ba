"""The promises about what is not supported; the form is that of promises.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from llmk.opcheck.inputs import BrokenPromise, as_list, copy_with_layout, differentiable_inputs, prepare
from llmk.registry import Op, Sample


def refuses_transforms(op: Op, samples: Sequence[Sample]) -> None:
    """6: forward-mode AD, double backward and torch.func give the right answer or an exception, never zeros."""
    sample = next((s for s in samples if differentiable_inputs(op, s)), None)
    if sample is None:
        return
    wanted = differentiable_inputs(op, sample)
    for name, attempt in (
        ("double backward", _double_backward),
        ("forward-mode AD", _forward_mode),
        ("torch.func.grad", _func_grad),
    ):
        try:
            actual = attempt(op.overload, op, sample, wanted)
        except Exception:  # refusing is keeping the promise, however it is worded
            continue
        expected = attempt(op.reference, op, sample, wanted)
        close = actual is not None and expected is not None and torch.allclose(actual, expected, rtol=0.1, atol=0.1)
        if not close:
            raise BrokenPromise(f"{sample}: {name} neither raises nor gives the right answer")


def _scalar(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return torch.stack([output.float().square().sum() for output in as_list(fn(*args, **kwargs))]).sum()


def _double_backward(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Tensor | None:
    args, kwargs, tensors = prepare(op, sample, wanted)
    inputs = [tensors[name] for name in wanted]
    first = torch.autograd.grad(_scalar(fn, args, kwargs), inputs, create_graph=True)
    return torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), inputs)[0]


def _forward_mode(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Tensor | None:
    with forward_ad.dual_level():

        def dual(tensor: Tensor) -> Tensor:
            copy = copy_with_layout(tensor)
            return forward_ad.make_dual(copy, torch.ones_like(copy)) if copy.is_floating_point() else copy

        args = [
            dual(arg) if name in wanted else arg for name, arg in zip(op.argument_names(), sample.args, strict=False)
        ]
        return forward_ad.unpack_dual(_scalar(fn, args, sample.kwargs)).tangent


def _func_grad(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Tensor:
    position = op.argument_names().index(wanted[0])
    args, kwargs, _ = prepare(op, sample, ())

    def loss(x: Tensor) -> Tensor:
        return _scalar(fn, [*args[:position], x, *args[position + 1 :]], kwargs)

    return torch.func.grad(loss)(args[position])
