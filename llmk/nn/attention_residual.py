"""Attention over depth in the place of residual connections."""

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry import check_not_negative, check_size


class AttentionResidual(nn.Module):
    r"""The input of a layer without a residual stream: an attention of each token over the layers before it.

    With v_i the outputs of the N layers or blocks before it, the embedding among them, and a query q that is learned,

        a = softmax over i of sum(q * weight * v_i / rms(v_i))
        y = sum over i of a_i * v_i

    by `llmk.functional.attention_residual`.

    Call it with `blocks [N, ..., H]`, or a sequence of N such tensors `[..., H]`, which are stacked; the result is
    `[..., H]` in their dtype.

    Parameters: `query [H]`, which starts at 0, where all blocks weigh the same, and `weight [H]`, the norm's.

    Args:
        hidden_size: The size of the last axis.
        eps: Added to the mean square, at least 0.

    Source: the Kimi team, "Attention Residuals", 2026, https://arxiv.org/abs/2603.15031.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("hidden_size", hidden_size)
        check_not_negative("eps", eps)
        self.hidden_size, self.eps = hidden_size, eps
        self.query = nn.Parameter(torch.empty((hidden_size,), device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty((hidden_size,), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def forward(self, blocks: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        if not isinstance(blocks, Tensor) and len({block.shape for block in blocks}) != 1:
            shapes = [tuple(block.shape) for block in blocks]
            raise ValueError(f"blocks: expected at least one tensor, and all of one shape, got {shapes}")
        stacked = blocks if isinstance(blocks, Tensor) else torch.stack(tuple(blocks))
        if stacked.dim() < 2 or stacked.shape[0] == 0 or stacked.shape[-1] != self.hidden_size:
            raise ValueError(
                f"blocks: expected shape [N, ..., {self.hidden_size}] with N at least 1, got {tuple(stacked.shape)}"
            )
        return functional.attention_residual(stacked, self.query, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"
