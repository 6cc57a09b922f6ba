"""Losses over a vocabulary: what the samples of `linear_logprobs`, `jsd` and `fused_linear_jsd` do not reach."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.right_calls import require_call
from llmk.functional import (
    fused_linear_ce,
    fused_linear_jsd,
    jsd,
    linear_logprobs,
    tvd,
)
from llmk.nn import JSDLoss, LinearCrossEntropyLoss, LinearJSDLoss, LinearLogProbs, TVDLoss
from llmk.ops.loss.jsd import jsd_reference
from llmk.registry import OPS, Sample

RANDOM = torch.Generator().manual_seed(0)
X, W = torch.randn(5, 8, generator=RANDOM), torch.randn(11, 8, generator=RANDOM)
T = torch.tensor([3, -100, 0, 10, 7])


def student() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), W.clone().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [5, 8193])
@pytest.mark.kernels
def test_logits_whose_differences_overflow(V: int, dtype: torch.dtype, device: torch.device) -> None:
    """A class that is infinitely far below the largest has no probability, and adds 0 to the entropy, not NaN."""
    target = torch.tensor([0, 1], device=device)
    x = torch.tensor([[2.0**63], [-(2.0**63)]], dtype=dtype, device=device, requires_grad=True)
    w = torch.full((V, 1), -(2.0**64), dtype=dtype, device=device)
    w[0], w[1] = 2.0**64, -(2.0**63)
    logprobs, entropy = linear_logprobs(x, w, target)
    (gradient,) = torch.autograd.grad((logprobs.clamp(min=-1.0) + entropy).sum(), x)
    others = torch.tensor(V - 2.0).log()
    torch.testing.assert_close(entropy.cpu(), torch.stack((torch.tensor(0.0), others)))
    assert logprobs[0] == 0
    assert (gradient == 0).all()


def test_modules() -> None:
    x, w = student()
    torch.testing.assert_close(LinearLogProbs(0.5)(x, w, T), linear_logprobs(x, w, T, temperature=0.5))
    tail = linear_logprobs(x, w, T, add_tail=True)
    torch.testing.assert_close(LinearLogProbs(add_tail=True)(x, w, T), tail)
    row_weight = torch.rand(5)
    loss = LinearCrossEntropyLoss(skip_ignored=True)(x, w, T, row_weight=row_weight)
    torch.testing.assert_close(loss, fused_linear_ce(x, w, T, row_weight=row_weight, skip_ignored=True))
    logs = X.log_softmax(-1), X.flip(0).log_softmax(-1)
    torch.testing.assert_close(JSDLoss(0.1)(*logs, T), jsd(*logs, beta=0.1, labels=T))
    torch.testing.assert_close(TVDLoss("sum")(*(y.exp() for y in logs)), tvd(*(y.exp() for y in logs), reduction="sum"))
    both = (x, w, X.flip(0), W.flip(0))
    torch.testing.assert_close(
        LinearJSDLoss(0.0, 2.0)(*both, T), fused_linear_jsd(*both, labels=T, beta=0.0, temperature=2.0)
    )
    assert "skip_ignored=True" in repr(LinearCrossEntropyLoss(skip_ignored=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: linear_logprobs(X, W[:0], T), "linear_weight: expected at least one class"),
        (lambda: jsd(X, X, beta=1.5), "beta: expected a number from 0 to 1, got 1.5"),
    ],
)
def test_a_wrong_call_names_the_argument(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_teacher_gets_no_gradient() -> None:
    teacher = W.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="teacher_linear_weight"):
        fused_linear_jsd(X, W, X, teacher)


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [1e-8, 1e-4, 1 - 1e-8])
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_divergence_of_almost_one_side(beta: float, scale: float, dtype: torch.dtype, device: torch.device) -> None:
    """The smaller part is less than a rounding beside M's larger one, and all that there is of the divergence."""
    x, y = (
        (scale * torch.randn(4, 40, dtype=torch.float32, device=device)).log_softmax(-1).to(dtype) for _ in range(2)
    )
    y[0, :20] = float("-inf")
    exact = jsd_reference(x.double(), y.double(), beta=beta)
    torch.testing.assert_close(jsd(x, y, beta=beta).double(), exact, rtol=2e-6, atol=0.0)
    require_call(OPS["jsd"], Sample((x, y), {"beta": beta}))
