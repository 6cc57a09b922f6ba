"""The references of the linear recurrences, and inputs for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmk.ops.recurrence.gated_delta_rule import recurrence_reference

Results = tuple[Tensor, Tensor]
REFERENCES: dict[str, Callable[..., Results]] = dict.fromkeys(
    ("gated_delta_rule", "gated_linear_attention"), recurrence_reference
)

per_channel_or_head = pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])


def inputs(
    B: int,
    T: int,
    HK: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    per_channel: bool = False,
) -> list[Tensor]:
    """q, k, v, decays of four strengths, and beta."""
    generator = torch.Generator().manual_seed(T)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    strengths = torch.tensor([0.0, 0.01, 1.0, 30.0], dtype=torch.float64, device="cpu")
    sizes, strengths = ((H, K), strengths.repeat(K)[:K]) if per_channel else ((H,), strengths[-H:])
    g, beta = -randn(B, T, *sizes).abs() * strengths, randn(B, T, H).sigmoid()
    found = [randn(B, T, HK, K), randn(B, T, HK, K) / K**0.5, randn(B, T, H, V), g, beta]
    return [x.to(device, dtype) for x in found]
