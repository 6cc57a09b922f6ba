"""Gated feed-forward layers."""

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry import check_option, check_size


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
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            check_size(name, size, 0)
        self.hidden_size = hidden_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)

    def gate_and_up(self, input: Tensor) -> tuple[Tensor, Tensor]:
        if input.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"input: expected shape [..., {self.hidden_size}], got {tuple(input.shape)}")
        return self.gate_proj(input), self.up_proj(input)


class SwiGLUMLP(_GatedMLP):
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
        super().__init__(hidden_size, intermediate_size, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self.down_proj(functional.swiglu(*self.gate_and_up(input)))


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
        gate, up = self.gate_and_up(input)
        return self.down_proj(functional.geglu(gate, up, approximate=self.approximate))

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
