"""Rotary position embedding."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry import LARGEST, check_dtype, check_number


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries and keys, `[B, H, S, D]`, with the angles of Hugging Face's Llama.

    The tables of cos and sin, `[max_position_embeddings, rotary_dim]` each, are float32 and not in the state dict.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_position_embeddings: int,
        base: float = 10_000.0,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rotary_dim: expected an even number from 2 to head_dim {head_dim}, got {rotary_dim}")
        if max_position_embeddings < 1:
            raise ValueError(f"max_position_embeddings: expected at least 1, got {max_position_embeddings}")
        check_number("base", base, 1.0, LARGEST, "a finite number of at least 1")
        self.head_dim, self.rotary_dim, self.base = head_dim, rotary_dim, base
        self.max_position_embeddings, self.interleaved = max_position_embeddings, interleaved
        for name in ("cos", "sin"):
            table = torch.empty((max_position_embeddings, rotary_dim), device=device, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables where they are."""
        device = self.cos.device
        positions = torch.arange(self.max_position_embeddings, device=device, dtype=torch.float32)
        features = torch.arange(0, self.rotary_dim, 2, device=device, dtype=torch.float32)
        angles = positions[:, None] * self.base ** (-features / self.rotary_dim)
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Compute the tables again where they were given other memory: `to_empty` leaves in it what was there."""
        before = self.cos
        super()._apply(fn, recurse)
        if self.cos is not before:
            self.reset_parameters()
        return self

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn q and k at positions 0 to S - 1, or at `position_ids [1 or B, S]`.

        Raises:
            TypeError: `position_ids` are no integers.
            ValueError: There are more tokens than positions in the tables, or a shape is another.
        """
        if position_ids is None and q.shape[-2] > self.max_position_embeddings:
            expected = f"at most {self.max_position_embeddings} tokens, max_position_embeddings"
            raise ValueError(f"q: expected {expected}, got {q.shape[-2]}")
        if position_ids is not None:
            check_dtype("position_ids", position_ids, (torch.int64, torch.int32))
            if position_ids.dim() != 2:
                raise ValueError(f"position_ids: expected shape [1 or B, S], got {tuple(position_ids.shape)}")
        if position_ids is None:
            cos, sin = self.cos[: q.shape[-2]].unsqueeze(0), self.sin[: q.shape[-2]].unsqueeze(0)
        else:
            cos, sin = self.cos[position_ids], self.sin[position_ids]
        return functional.rope(q, k, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return (
            f"{self.head_dim}, max_position_embeddings={self.max_position_embeddings}, base={self.base}, "
            f"rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"
        )
