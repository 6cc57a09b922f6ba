"""Modules around the operators, with the parameters of the torch or Hugging Face module that each replaces."""

import numbers
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.linear_loss._call import check_chunk_size
from llmk.ops.loss.cross_entropy import check_loss_numbers
from llmk.ops.loss.giou_loss import check_giou_options
from llmk.ops.loss.kl_div import REDUCTIONS
from llmk.registry import LARGEST, check_finite, check_not_negative, check_number, check_option


class _Norm(nn.Module):
    """A norm over the last axes, `normalized_shape`; the operators take them as one."""

    def __init__(self, normalized_shape: int | Sequence[int], elementwise_affine: bool) -> None:
        super().__init__()
        sizes = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        if not sizes or not all(isinstance(size, numbers.Integral) and size > 0 for size in sizes):
            raise ValueError(f"normalized_shape: expected a positive integer or several, got {normalized_shape!r}")
        self.normalized_shape = tuple(int(size) for size in sizes)
        self.elementwise_affine = elementwise_affine

    def _flat(self, input: Tensor) -> Tensor:
        axes = len(self.normalized_shape)
        if tuple(input.shape[-axes:]) != self.normalized_shape:
            raise ValueError(
                f"input: expected shape [..., {', '.join(map(str, self.normalized_shape))}], got {tuple(input.shape)}"
            )
        return input if axes == 1 else input.flatten(-axes)


def _parameter(
    wanted: bool, shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None


def _flat_parameter(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()


class RMSNorm(_Norm):
    """`torch.nn.RMSNorm`; `offset=1.0` is Gemma's, whose weight starts at zero.

    As in torch, `eps=None` is the machine epsilon of float32, in which inputs of 16 bits are computed too. Hugging
    Face's norms have eps 1e-6, as has `llmk.functional.rms_norm`, unless their configuration says otherwise.

    Parameters: `weight [*normalized_shape]`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine)
        if eps is not None:
            check_not_negative("eps", eps)
        check_finite("offset", offset)
        self.eps, self.offset = eps, offset
        self.weight = _parameter(elementwise_affine, self.normalized_shape, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, input: Tensor) -> Tensor:
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        normed = functional.rms_norm(self._flat(input), _flat_parameter(self.weight), eps, offset=self.offset)
        return normed.view(input.shape)

    def extra_repr(self) -> str:
        affine = self.elementwise_affine
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}, offset={self.offset}"


class LayerNorm(_Norm):
    """`torch.nn.LayerNorm`.

    Parameters: `weight [*normalized_shape]` and `bias [*normalized_shape]`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine)
        check_not_negative("eps", eps)
        self.eps = eps
        self.weight = _parameter(elementwise_affine, self.normalized_shape, device, dtype)
        self.bias = _parameter(elementwise_affine and bias, self.normalized_shape, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = _flat_parameter(self.weight), _flat_parameter(self.bias)
        return functional.layer_norm(self._flat(input), weight, bias, self.eps).view(input.shape)

    def extra_repr(self) -> str:
        affine, bias = self.elementwise_affine, self.bias is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}, bias={bias}"


class GroupNorm(nn.Module):
    """`torch.nn.GroupNorm`.

    Parameters: `weight [num_channels]` and `bias [num_channels]`.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels < 1 or num_channels % num_groups:
            raise ValueError(f"num_channels: expected a multiple of num_groups {num_groups}, got {num_channels}")
        check_not_negative("eps", eps)
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.weight = _parameter(affine, (num_channels,), device, dtype)
        self.bias = _parameter(affine and bias, (num_channels,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class _GatedMLP(nn.Module):
    """The projections of a gated feed-forward layer."""

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


class SwiGLUMLP(_GatedMLP):
    """Llama's feed-forward layer, `down_proj(silu(gate_proj(x)) * up_proj(x))`, as in Hugging Face's `LlamaMLP`.

    Parameters: `gate_proj.weight` and `up_proj.weight [intermediate_size, hidden_size]`,
    `down_proj.weight [hidden_size, intermediate_size]`, and their biases if asked for.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self.down_proj(functional.swiglu(self.gate_proj(input), self.up_proj(input)))


class GeGLUMLP(_GatedMLP):
    """Gemma's feed-forward layer, `down_proj(gelu(gate_proj(x)) * up_proj(x))`, as in Hugging Face's `GemmaMLP`.

    `approximate` is that of `torch.nn.GELU`: "tanh", which is Gemma's, or "none". Parameters as in `SwiGLUMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        approximate: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_option("approximate", approximate, ("tanh", "none"))
        super().__init__(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        gate, up = self.gate_proj(input), self.up_proj(input)
        return self.down_proj(functional.geglu(gate, up, approximate=self.approximate))

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


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
        check_loss_numbers(reduction, label_smoothing, softcap, z_loss)
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
        check_chunk_size(chunk_size)
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


class KLDivLoss(nn.Module):
    """`torch.nn.KLDivLoss`: of log-probabilities `input` against probabilities `target`, or their logarithms."""

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__()
        check_option("reduction", reduction, REDUCTIONS)
        self.reduction, self.log_target = reduction, log_target

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.kl_div(input, target, reduction=self.reduction, log_target=self.log_target)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, log_target={self.log_target}"


class GIoULoss(nn.Module):
    """Generalized intersection over union of boxes `[..., 4]`, as in `torchvision.ops.generalized_box_iou_loss`.

    A target whose last coordinate is at most 0 is padding and does not count.
    """

    def __init__(self, reduction: str = "mean", eps: float = 1e-5) -> None:
        super().__init__()
        check_giou_options(reduction, eps)
        self.reduction, self.eps = reduction, eps

    def forward(self, boxes: Tensor, targets: Tensor) -> Tensor:
        return functional.giou_loss(boxes, targets, reduction=self.reduction, eps=self.eps)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, eps={self.eps}"
