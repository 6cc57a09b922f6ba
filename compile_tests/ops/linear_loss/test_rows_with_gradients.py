"""The same row, the same bits, whether gradients are wanted or not: blocks of rows do not depend on it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk import functional

CALLS: dict[str, Callable[..., Any]] = {
    "linear_logprobs": lambda x, w, t: functional.linear_logprobs(x, w, t),
    "linear_logprobs of 3": lambda x, w, t: functional.linear_logprobs(x, w, torch.stack([t, t // 2, t // 3], -1)),
    "linear_topk": lambda x, w, t: functional.linear_topk(x, w, 5)[0::2],
    "fused_linear_policy": lambda x, w, t: functional.fused_linear_policy(x, w, t, advantages=x[..., 0].detach())[1:],
    "fused_linear_policy of sequences": lambda x, w, t: functional.fused_linear_policy(
        x, w, t, advantages=x[..., 0].detach(), importance_sampling_level="sequence"
    )[1:],
    "fused_linear_preference": lambda x, w, t: functional.fused_linear_preference(x.unsqueeze(2), w, t.unsqueeze(2))[
        1:
    ],
    "fused_linear_ce none": lambda x, w, t: (functional.fused_linear_ce(x, w, t, reduction="none"),),
    "fused_linear_ce_metrics none": lambda x, w, t: functional.fused_linear_ce_metrics(x, w, t, reduction="none"),
}


@pytest.mark.parametrize("sizes", [(8, 16, 401), (60, 16, 1000), (130, 128, 37), (520, 128, 37)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_gradients(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int], device: torch.device
) -> None:
    """Few enough rows to keep all logits for a second pass, which float16 takes, some, all but a few, and none."""
    rows, H, V = sizes
    x, weight = (torch.randn(shape, device=device).to(dtype) for shape in ((rows // 2, 2, H), (V, H)))
    target = torch.randint(0, V, (rows // 2, 2), device=device)
    with torch.no_grad():
        alone = CALLS[name](x, weight, target)
    for wanted in itertools.product([False, True], repeat=2):
        inputs = [tensor.clone().requires_grad_(want) for tensor, want in zip((x, weight), wanted, strict=True)]
        for found, want in zip(CALLS[name](*inputs, target), alone, strict=True):
            assert torch.equal(found, want), f"{name}: off by {difference(found, want)} with gradients of {wanted}"


def difference(found: Tensor, want: Tensor) -> float:
    return float((found.detach() - want).abs().max())
