"""Mixtures of experts in plain PyTorch, by grouped products."""

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  its grouped product takes every dtype
from torch import Tensor

from compile_tests.helpers.fuzz_program import Input
from compile_tests.spellings.registry import spelling

T, E, K, H, WIDTH = 5, 3, 2, 8, 8
SHAPES = (T, H), (E, 2 * WIDTH, H), (E, H, WIDTH), (T, K)
CHOSEN = Input("", (T, K), torch.int64, "classes", high=E, grad=False)


def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight.transpose(-2, -1), ends)


@spelling("moe_experts", *(Input("", shape, scale=0.5) for shape in SHAPES), CHOSEN)
def sorted_by_expert(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As transformers has them."""
    ids, perm = torch.sort(chosen.reshape(-1))
    ends = torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)
    gate, up = product(x[perm // K], gate_up, ends).chunk(2, dim=-1)
    rows = product(F.silu(gate) * up, down, ends) * weights.reshape(-1)[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return rows[inverse].view(T, K, H).sum(dim=1)
