"""Attention weights that depend on several queries and keys at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry import check_floating, check_size


class MultiTokenAttention(nn.Module):
    r"""Attention weights of neighbouring queries and keys, and of heads, mixed by a convolution.

    Of scores `[B, C, S, S]`, with masks over the keys that come after a query,

        y = conv(softmax(scores, masked with -inf)), masked with 0
        y = softmax(conv(scores, masked with 0), masked with -inf)     with before_softmax

    The convolution adds to each query those just before it and no later one, and to each key those around it: with an
    even width one more before than after. It is PyTorch's softmax and convolution, with which a compiler fuses the
    masks.

    Call it with `scores`, floating; the result is `[B, out_channels, S, S]` in their dtype, weights for the values.

    Parameters: `weight [out_channels, in_channels / groups, *kernel_size]` and `bias [out_channels]`, those of
    `torch.nn.Conv2d`. At first each channel is that of the same place in its group, as it came.

    Args:
        in_channels: C, the heads.
        out_channels: Of the result.
        kernel_size: Queries and keys.
        groups: Of heads that are mixed with each other.
        bias: Whether the convolution has one; a softmax after it takes it away.
        sparse: `llmk.functional.sparsemax` in the place of softmax.
        before_softmax: The convolution comes first.
        causal: False for queries around each, later ones too: a kernel that is centred, as Liger's is.

    Source: Golovneva et al., 2025, https://arxiv.org/abs/2504.00927.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
        before_softmax: bool = False,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = kernel_size if isinstance(kernel_size, Sequence) else (kernel_size, kernel_size)
        if len(sizes) != 2:
            raise ValueError(f"kernel_size: expected an int or two, got {kernel_size!r}")
        for size in sizes:
            check_size("kernel_size", size)
        queries, keys = sizes
        check_size("groups", groups)
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            check_size(name, channels)
            if channels % groups:
                raise ValueError(f"{name}: expected a multiple of groups {groups}, got {channels}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.sparse = (queries, keys), sparse
        self.before_softmax, self.causal = before_softmax, causal
        self.padding = (queries - 1 if causal else queries // 2, keys // 2)
        shape = (out_channels, in_channels // groups, queries, keys)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty((out_channels,), device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """One at the place of a query and key themselves."""
        of_group = self.out_channels // self.groups, self.in_channels // self.groups
        own = torch.eye(*of_group, dtype=self.weight.dtype, device=self.weight.device)
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, :, self.padding[0], self.padding[1]] = own.repeat(self.groups, 1)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        if scores.dim() != 4 or scores.shape[1] != self.in_channels or scores.shape[2] != scores.shape[3]:
            raise ValueError(f"scores: expected shape [B, {self.in_channels}, S, S], got {tuple(scores.shape)}")
        check_floating("scores", scores)
        places = torch.arange(scores.shape[-1], dtype=torch.int64, device=scores.device)
        future = places > places.unsqueeze(-1)
        if self.before_softmax:
            return self._normalized(self._mixed(scores.masked_fill(future, 0.0)), future)
        return self._mixed(self._normalized(scores, future)).masked_fill(future, 0.0)

    def _normalized(self, scores: Tensor, future: Tensor) -> Tensor:
        scores = scores.masked_fill(future, float("-inf"))
        return functional.sparsemax(scores) if self.sparse else scores.softmax(-1)

    def _mixed(self, input: Tensor) -> Tensor:
        """Padded on both sides, for which there is no copy, and what is too much at the end cut off."""
        mixed = nn.functional.conv2d(input, self.weight, self.bias, padding=self.padding, groups=self.groups)
        return mixed[..., : input.shape[-2], : input.shape[-1]]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, groups={self.groups}, "
            f"bias={self.bias is not None}, sparse={self.sparse}, before_softmax={self.before_softmax}, "
            f"causal={self.causal}"
        )
