"""Modules around the operators, with the parameters of the torch or Hugging Face module that each replaces."""

import torch
from torch import Tensor, nn

from llmk import functional


class RMSNorm(nn.Module):
    """`torch.nn.RMSNorm` over the last axis; `offset=1.0` is Gemma's, whose weight starts at zero.

    Parameters: `weight [normalized_shape]`.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,)
        self.eps, self.offset = eps, offset
        self.weight: nn.Parameter | None = None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, input: Tensor) -> Tensor:
        return functional.rms_norm(input, self.weight, self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.normalized_shape[0]}, eps={self.eps}, elementwise_affine={affine}, offset={self.offset}"


class SwiGLUMLP(nn.Module):
    """Llama's feed-forward layer, `down_proj(silu(gate_proj(x)) * up_proj(x))`, as in Hugging Face's `LlamaMLP`.

    Parameters: `gate_proj.weight` and `up_proj.weight [intermediate_size, hidden_size]`,
    `down_proj.weight [hidden_size, intermediate_size]`, and their biases if asked for.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self.down_proj(functional.swiglu(self.gate_proj(input), self.up_proj(input)))


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
        self.head_dim, self.rotary_dim, self.base = head_dim, rotary_dim, base
        self.max_position_embeddings, self.interleaved = max_position_embeddings, interleaved
        positions = torch.arange(max_position_embeddings, device=device, dtype=torch.float32)
        features = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32)
        angles = positions[:, None] * base ** (-features / rotary_dim)
        angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn q and k at positions 0 to S - 1, or at `position_ids [1 or B, S]`."""
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


class CrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` over the last axis, with softcap and z-loss."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.softcap, self.z_loss = softcap, z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, softcap={self.softcap}, z_loss={self.z_loss}"
        )


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """The output projection and its loss in one, so that the logits never exist whole.

    Give it the projection's weight, which may be tied to an embedding: `loss(hidden, lm_head.weight, target)`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int = 0,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, label_smoothing, softcap=softcap, z_loss=z_loss)
        self.chunk_size = chunk_size

    def forward(  # type: ignore[override]
        self, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None
    ) -> Tensor:
        return functional.fused_linear_ce(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}"
