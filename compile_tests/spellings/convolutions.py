"""Short causal convolutions in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.spellings.registry import spelling

CHANNELS, TAPS = 8, 4
SHAPES = (2, CHANNELS, 7), (CHANNELS, 1, TAPS), (CHANNELS,)


@spelling("causal_conv1d", *SHAPES)
def padded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (TAPS - 1, 0)), w, b, groups=CHANNELS)


@spelling("causal_conv1d", *SHAPES)
def cut_and_activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.conv1d(x.to(w.dtype), w.squeeze(1).unsqueeze(1), b, padding=TAPS - 1, groups=CHANNELS)
    return F.silu(y[:, :, : x.shape[-1]])


@spelling("causal_conv1d", *SHAPES)
def activated_and_cut(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv1d(x, w, b, padding=TAPS - 1, groups=CHANNELS))[..., : 1 - TAPS]


@spelling("causal_conv1d", *SHAPES[:2])
def activated_with_channels_last(x: Tensor, w: Tensor) -> Tensor:
    """Mamba-2's, with zeros given."""
    y = F.conv1d(torch.constant_pad_nd(x, [TAPS - 1, 0]), w, groups=CHANNELS).transpose(1, 2)
    return y * torch.sigmoid(y)
