"""Norms over the last axes, and over groups of channels."""

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.common.activations import GATES
from llmk.registry import check_finite, check_not_negative, check_option, check_size


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


class RMSNormGated(nn.Module):
    """The norm at the end of a layer of linear attention, `rms_norm(input) * weight * activation(gate)`.

    As Qwen3-Next has it; with `norm_before_gate=False` as Mamba-2 has it, and then `group_size` is often given. The
    gate is the second argument of a call: `norm(input, gate)`.

    Parameters: `weight [hidden_size]`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int = 0,
    ) -> None:
        super().__init__()
        check_not_negative("eps", eps)
        check_option("activation", activation, GATES)
        check_size("hidden_size", hidden_size)
        check_size("group_size", group_size, 0)
        if group_size and hidden_size % group_size:
            raise ValueError(f"hidden_size: expected a multiple of group_size {group_size}, got {hidden_size}")
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.norm_before_gate, self.group_size = norm_before_gate, group_size
        self.weight = nn.Parameter(torch.empty((hidden_size,), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        return functional.rms_norm_gated(
            input,
            gate,
            self.weight,
            self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
        )

    def extra_repr(self) -> str:
        order, size = self.norm_before_gate, self.group_size
        return (
            f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}, norm_before_gate={order}, "
            f"group_size={size}"
        )


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
        check_size("num_groups", num_groups)
        check_size("num_channels", num_channels)
        if num_channels % num_groups:
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


class DyT(_Norm):
    """Dynamic tanh in the place of a norm, `weight * tanh(alpha * x) + bias`: the `DynamicTanh` of its paper.

    Parameters: `alpha [1]`, `weight [*normalized_shape]` and `bias [*normalized_shape]`.

    Source: Zhu et al., 2025, https://arxiv.org/abs/2503.10622.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        init_alpha: float = 0.5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine=True)
        check_finite("init_alpha", init_alpha)
        self.init_alpha = init_alpha
        self.alpha = nn.Parameter(torch.empty((1,), device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.bias = _parameter(bias, self.normalized_shape, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.flatten(), _flat_parameter(self.bias)
        return functional.dyt(self._flat(input), self.alpha, weight, bias).view(input.shape)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, init_alpha={self.init_alpha}, bias={self.bias is not None}"


class PolyNorm(nn.Module):
    """PolyNorm, an activation: the cube, the square and the value of its input, normalized and weighted.

    Parameters: `weight [3]`, of the cube, the square and the value, which start at a third, and `bias [1]`, which
    starts at 0 as in the authors' code.

    Source: Zhuo et al., 2024, https://arxiv.org/abs/2411.03884.
    """

    def __init__(
        self, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_not_negative("eps", eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty((3,), device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty((1,), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return functional.poly_norm(input, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
