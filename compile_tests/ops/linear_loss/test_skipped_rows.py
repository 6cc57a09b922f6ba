"""The hidden states of ignored tokens reach nothing where these are skipped, whatever they hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.registry import OPS

G, S, H, V = 12, 25, 64, 1100
"""Sequences by twos, their tokens, features, and more classes than the kernels of short rows take."""
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Hidden states `[G, S, H]`, a projection, targets, and a teacher's hidden states and projection."""
ops = torch.ops.llmk


def policy(x: Tensor, w: Tensor, t: Tensor, y: Tensor, u: Tensor, **options: Any) -> Tensor:
    advantages = torch.ones(G, S, device=x.device)
    return ops.fused_linear_policy(x, w, t, advantages=advantages, **options)[0]


CALLS: dict[str, Callable[..., Any]] = {
    "fused_linear_ce": lambda x, w, t, y, u, **options: ops.fused_linear_ce(x, w, t, **options),
    "fused_linear_ce_metrics": lambda x, w, t, y, u, **options: ops.fused_linear_ce_metrics(x, w, t, **options),
    "vocab_parallel_linear_ce": lambda x, w, t, y, u, **options: ops.vocab_parallel_linear_ce(x, w, t, **options),
    "fused_linear_jsd": lambda x, w, t, y, u, **options: ops.fused_linear_jsd(x, w, y, u, labels=t, **options),
    "fused_linear_jsd_ce": lambda x, w, t, y, u, **options: ops.fused_linear_jsd_ce(
        x, w, y, u, t, ce_weight=0.3, **options
    )[0],
    "fused_linear_distill": lambda x, w, t, y, u, **options: ops.fused_linear_distill(
        x, w, [y], [u], [], [], [], [], labels=t, **options
    )[0],
    "linear_logprobs": lambda x, w, t, y, u, **options: [
        each.sum() for each in ops.linear_logprobs(x, w, t, **options)
    ],
    "fused_linear_policy": policy,
    "fused_linear_preference": lambda x, w, t, y, u, **options: ops.fused_linear_preference(
        x.unflatten(0, (-1, 2)), w, t.unflatten(0, (-1, 2)), **options
    )[0],
}


def results(name: str, batch: Batch, bias: Tensor | None) -> list[Tensor]:
    """Outputs, and the gradients of the hidden states, the projection and the bias."""
    x, w, *others = batch
    student = [tensor.detach().requires_grad_() for tensor in (x, w, bias) if tensor is not None]
    options = {"skip_ignored": True, "linear_bias": None if bias is None else student[-1]}
    outputs = CALLS[name](*student[:2], *others, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total = torch.stack([each for each in outputs if each.requires_grad]).sum()
    return [*(output.detach() for output in outputs), *torch.autograd.grad(total, student)]


def test_every_operator_that_skips_is_here() -> None:
    assert set(CALLS) == {name for name, op in OPS.items() if "skip_ignored" in op.argument_names()}


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_an_ignored_row_is_left_out(name: str, dtype: torch.dtype, has_bias: bool, device: torch.device) -> None:
    x, y = (torch.randn(G, S, H, device=device, dtype=dtype) for _ in range(2))
    w, u = (torch.randn(V, H, device=device, dtype=dtype) / 8 for _ in range(2))
    bias = torch.randn(V, device=device, dtype=dtype) if has_bias else None
    target = torch.randint(0, V, (G, S), device=device)
    ignored = torch.rand(G, S, device=device) < 0.4
    target[ignored] = -100
    want = results(name, (x, w, target, y, u), bias)
    assert all(each.isfinite().all() for each in want)
    assert not want[-3 if has_bias else -2][ignored].any()
    for value in ("nan", "inf", "-inf"):
        bad_x, bad_y = (each.masked_fill(ignored.unsqueeze(-1), float(value)) for each in (x, y))
        found = results(name, (bad_x, w, target, bad_y, u), bias)
        for place, (got, right) in enumerate(zip(found, want, strict=True)):
            assert torch.equal(got, right), f"{value}: result {place}, {int((~got.isfinite()).sum())} not finite"
