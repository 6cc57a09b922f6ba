"""Short causal convolutions in plain PyTorch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.spellings.registry import SPELLINGS, Spelling, named

B, D, T, K = 2, 24, 9, 4
"""Sequences, channels, tokens and taps."""

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes `x [B, D, T]`, a weight `[D, 1, K]` and a bias."""


def padded(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.conv1d(F.pad(x, (w.shape[-1] - 1, 0)), w, b, groups=x.shape[1])


def cut(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]


def with_cast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Compute transformers' `causal_conv1d_fn`, in the weight's dtype."""
    y = F.conv1d(x.to(w.dtype), w.squeeze(1).unsqueeze(1), bias=b, padding=K - 1, groups=D)[:, :, : x.shape[-1]]
    return F.silu(y).to(x.dtype)


def in_float32(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(padded(x.float(), w.float(), b.float())).to(x.dtype)


def as_mamba(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The activation after the axes are exchanged, as in transformers' Mamba-2."""
    return F.silu(cut(x, w, b).transpose(1, 2))


FORMS: dict[str, Form] = {
    "padded": padded,
    "padded, silu": lambda x, w, b: F.silu(padded(x, w, b)),
    "zeros given": lambda x, w, b: F.conv1d(F.pad(x, (K - 1, 0), "constant", 0.0), w, b, groups=D),
    "constant_pad_nd": lambda x, w, b: F.conv1d(torch.constant_pad_nd(x, [K - 1, 0]), w, b, groups=D),
    "a pad of all axes": lambda x, w, b: F.conv1d(F.pad(x, (K - 1, 0, 0, 0)), w, b, groups=D, padding="valid"),
    "no bias": lambda x, w, b: F.silu(padded(x, w, None)) + b.sum(),
    "cut": cut,
    "cut, silu": lambda x, w, b: F.silu(cut(x, w, b)),
    "cut from the end": lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=K - 1, groups=D)[:, :, : 1 - K]),
    "silu, cut": lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=K - 1, groups=D))[..., :T],
    "silu written out": lambda x, w, b: (y := cut(x, w, b)) * torch.sigmoid(y),
    "casts": with_cast,
    "float32 inside": in_float32,
    "exchanged": as_mamba,
    "another activation": lambda x, w, b: F.gelu(cut(x, w, b)),
    "some channels": lambda x, w, b: cut(x, w, b)[:, : D // 2],
    "permuted": lambda x, w, b: F.silu(cut(x, w, b).permute(0, 2, 1)),
}
"""Ways to convolve, by name."""

SPELLINGS.update(
    (f"convolution, {name}", Spelling("causal_conv1d", form, named([(B, D, T), (D, 1, K), (D,)])))
    for name, form in FORMS.items()
)
