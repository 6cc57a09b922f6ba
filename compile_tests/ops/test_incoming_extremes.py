"""Incoming gradients of 0, infinity and NaN: what nothing depends on has a gradient of 0, whatever comes in.

A mean over no token comes in as 1 / 0. Autograd's formulas leave an ignored row out, where a saved gradient of 0 that
is multiplied would be NaN, in the weight too.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.loss_calls import LOSSES, given
from llmk.opcheck.calls import call, representatives
from llmk.opcheck.inputs import differentiable_inputs, rebound
from llmk.registry import OPS, Op, Sample

EXTREMES = (0.0, float("inf"), float("nan"))


def filled(value: float) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda outputs: [torch.full_like(output, value) for output in outputs]


def samples(op: Op, device: torch.device) -> Iterator[Sample]:
    """The record's, each choice of options once, and these with every token ignored."""
    for sample in representatives(op, list(op.samples(device, torch.float32))):
        if not differentiable_inputs(op, sample):
            continue
        yield sample
        bound = op.bind(sample)
        for name in ("target", "labels"):
            if isinstance(bound.get(name), Tensor) and "ignore_index" in op.argument_names():
                ignored = torch.full_like(bound[name], bound.get("ignore_index", -100))
                yield rebound(op, sample, bound | {name: ignored}, f"{sample.why}, every token ignored")


@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.differentiable))
def test_zero_is_zero_as_in_pytorch(name: str, device: torch.device) -> None:
    """0 where the reference's autograd gives 0, and not finite where that is not, unless the gradient is 0 itself."""
    op = OPS[name]
    for sample in samples(op, device):
        usual = call(op, sample, grads=filled(1.0)).gradients
        for value in EXTREMES:
            found = call(op, sample, grads=filled(value)).gradients
            right = call(op, sample, fn=op.reference, grads=filled(value)).gradients
            for of, gradient in found.items():
                want, one = right[of], usual[of]
                if gradient is None or want is None or one is None:
                    assert gradient is want, f"{sample}, {value} comes in: the gradient of {of} is {gradient}"
                    continue
                wrong = (want == 0) & (gradient != 0) | (want.isfinite() & ~gradient.isfinite())
                wrong |= ~want.isfinite() & gradient.isfinite() & (one != 0)
                assert not wrong.any(), f"{sample}, {value} comes in: {int(wrong.sum())} of the gradient of {of}"


@pytest.mark.kernels
@pytest.mark.parametrize("value", EXTREMES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused_linear_ce", "fused_linear_ce_metrics", "vocab_parallel_linear_ce"])
def test_a_token_that_is_sure_counts(name: str, dtype: torch.dtype, value: float, device: torch.device) -> None:
    """Its gradient is 0 where its class has probability 1 in float32: what comes in is multiplied with it all the same.

    A token that does not count has a gradient of 0 beside it, and all have one where none does.
    """
    weight = torch.zeros(33, 8, device=device, dtype=dtype)
    weight[3] = 100.0
    x = torch.ones(5, 8, device=device, dtype=dtype)
    target = torch.full((5,), 3, device=device)
    target[1::2] = -100
    for labels in (target, target.int(), torch.full_like(target, -100)):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_(), torch.zeros_like(weight[:, 0])
        inputs[2].requires_grad_()
        loss = getattr(torch.ops.llmk, name)(*inputs[:2], labels, linear_bias=inputs[2], reduction="sum")
        loss = loss if isinstance(loss, Tensor) else loss[0]
        assert not torch.autograd.grad(loss, inputs, retain_graph=True)[0].any()
        dx, *of_weights = torch.autograd.grad(loss, inputs, torch.full_like(loss, value))
        counts = labels != -100
        assert not dx[counts].isfinite().any()
        assert not dx[~counts].any()
        for gradient in of_weights:
            assert not gradient.isfinite().any() if counts.any() else not gradient.any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("lengths", [[3, 2, 4, 1], [0, 0, 0, 0]], ids=["some tokens", "no token"])
def test_losses(name: str, lengths: list[int], device: torch.device) -> None:
    (x, weight, target), others = given(name, lengths, device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss, _ = LOSSES[name][0](x, weight, target, **others)
    ignored = target == -100
    for value in EXTREMES:
        dx, dw = torch.autograd.grad(loss, (x, weight), torch.full_like(loss, value), retain_graph=True)
        assert not dx[ignored].any()
        assert value == 0.0 or ignored.all() or not dx[~ignored].isfinite().all()
        assert dw.any() != (ignored.all() or value == 0.0)


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "llmk"])
def test_a_mean_over_no_token_compiled(backend: str, device: torch.device) -> None:
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target, reduction="sum") / (target != -100).sum()

    def ours(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return torch.ops.llmk.fused_linear_ce(x, weight, target, reduction="sum") / (target != -100).sum()

    torch._dynamo.reset()
    x, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (6, 11))
    target = torch.full((6,), -100, device=device)
    fn = torch.compile(loss if backend == "llmk" else ours, backend=backend, fullgraph=True)
    result = fn(x, weight, target)
    assert result.isnan()
    for gradient in torch.autograd.grad(result, (x, weight)):
        assert not gradient.any()
