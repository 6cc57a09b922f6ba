"""Logits that nothing rounds, of the losses that are fused with a projection."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.right_calls import require_call
from llmk.registry import OPS, Sample
from llmk.registry.private.operators import schema_of

N, H, V = 24, 64, 512


def head(seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((N, H), (V, H)))
    return x.bfloat16(), (scale * weight / H**0.5).bfloat16(), torch.randint(0, V, (N,), generator=generator)


def sample_of(name: str, logits_dtype: torch.dtype | None = None) -> Sample:
    x, weight, target = head()
    kwargs: dict[str, Any] = {"logits_dtype": logits_dtype, "chunk_size": 10}
    if name == "fused_linear_preference":
        return Sample((x.view(3, 2, 4, H), weight, target.view(3, 2, 4)), kwargs, why="pairs")
    if name == "fused_linear_distill":
        inputs, weights = zip(head(1)[:2], head(2)[:2], strict=True)
        return Sample((x, weight, list(inputs), list(weights), [], [], [], []), kwargs, why="two other models")
    if name.startswith("fused_linear_jsd"):
        labels = (target,) if name == "fused_linear_jsd_ce" else ()
        return Sample((x, weight, *head(1)[:2], *labels), kwargs, why="another model")
    return Sample((x, weight, target), kwargs, why="tokens")


FUSED = sorted(name for name, op in OPS.items() if "logits_dtype" in str(schema_of(op.overload)))


def test_every_loss_fused_with_a_projection_has_them() -> None:
    assert FUSED == [
        "fused_linear_ce", "fused_linear_ce_metrics", "fused_linear_distill", "fused_linear_jsd",
        "fused_linear_jsd_ce", "fused_linear_policy", "fused_linear_preference", "linear_logprobs",
        "vocab_parallel_linear_ce",
    ]  # fmt: skip


def test_a_bias_is_added_to_products_that_nothing_rounded() -> None:
    """The mean of 4096 tokens in float16 is off by 3e-7; by 3e-6 if logits are rounded, by 7e-6 if products are too."""
    x, weight, bias = (torch.randn(shape).half() for shape in ((4096, H), (128, H), (128,)))
    sample = Sample((x, weight / H**0.5, torch.randint(0, 128, (4096,))), {"linear_bias": bias})
    op = OPS["fused_linear_ce"]
    require_call(op, sample)


def test_log_probabilities_of_large_logits() -> None:
    x, weight, target = head(scale=6.0)
    exact = (x.double() @ weight.double().t()).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    logprobs, _ = torch.ops.llmk.linear_logprobs(x, weight, target)
    error = (logprobs - exact).abs()
    assert error.mean() <= 3e-5 / 4  # what a GPU may have at 2048 features
    assert error.max() <= 1e-4 / 4


@pytest.mark.parametrize("distance", [1e-1, 1e-2])
def test_the_gradient_near_the_teacher(distance: float) -> None:
    """It is a difference of probabilities that are alike: 46% and 350% of it were rounding errors of the logits."""
    x, weight, _ = head()
    teacher = (weight.float() * (1 + distance * torch.randn(weight.shape))).bfloat16()
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        student = x.to(dtype, copy=True).requires_grad_()
        args = student, weight.to(dtype), x.to(dtype), teacher.to(dtype)
        op = OPS["fused_linear_jsd"]
        (op.overload if dtype == torch.bfloat16 else op.reference)(*args).backward()
        assert student.grad is not None
        grads.append(student.grad.double())
    assert (grads[0] - grads[1]).norm() <= 3e-3 * grads[1].norm()


@pytest.mark.parametrize("name", FUSED)
def test_another_dtype_is_refused(name: str) -> None:
    sample = sample_of(name, torch.float16)
    message = "logits_dtype: expected None, torch.float32 or torch.bfloat16 as input, got torch.float16"
    with pytest.raises(TypeError, match=message):
        OPS[name].overload(*sample.args, **sample.kwargs)


def test_under_autocast_the_products_are_rounded_and_the_logits_not() -> None:
    x, weight, target = head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.ops.llmk.linear_logprobs(x.float(), weight.float(), target)[0]
    torch.testing.assert_close(found, torch.ops.llmk.linear_logprobs(x, weight, target)[0], rtol=0, atol=0)
