"""Several residual streams around a layer, mixed by what each token says."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry import check_dtype, check_not_negative, check_size

MAX_STREAMS = 7
"""More have more weights than `rms_linear` has outputs."""


def stream_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p `[..., N]`, q `[..., N]` and C `[..., N, N]` of `HyperConnection` for each token, in float32."""
    n = streams.shape[-2]
    logits = functional.rms_linear(streams.flatten(-2), fn, norm_eps)
    sizes = (n, n, n * n)
    parts = zip(logits.split(sizes, -1), base.float().split(sizes), scale.float().unbind(), strict=True)
    read, write, mix = (part * factor + start for part, start, factor in parts)
    mixed = functional.sinkhorn(mix.unflatten(-1, (n, n)), iterations, eps)
    return torch.sigmoid(read) + eps, 2 * torch.sigmoid(write), mixed


class HyperConnection(nn.Module):
    r"""Manifold-constrained hyper-connections (mHC): N residual streams around a layer, as DeepSeek-V4 has them.

    With x the streams `[N, H]` of a token, n = x / rms(x) over all of them as one row, and f the layer,

        p, q, C = n @ fn.T                               [N], [N], [N, N]
        p = sigmoid(scale_0 * p + base_p) + eps          what of each stream the layer reads
        q = 2 * sigmoid(scale_1 * q + base_q)            what each stream gets of its output
        C = sinkhorn(scale_2 * C + base_C)               what stream j gets of stream i: rows and columns sum to 1
        y_j = q_j * f(sum_i p_i * x_i) + sum_i C_ij * x_i

    where sinkhorn divides the softmax of each row by the sums of columns and of rows in turn. All is float32, and what
    the layer reads and the streams are rounded to the dtype of x. `llmk.functional` has n @ fn.T as
    `rms_linear`, `sinkhorn`, the sum that the layer reads as `read_streams`, and the last line as `write_streams`.

    Call it with the streams, `[..., N, H]` in float32, float16 or bfloat16, and the layer, a function of `[..., H]` in
    their dtype that keeps the shape; the new streams have the shape and dtype of the old.

    Parameters: `fn [N * N + 2 * N, N * H]`, `base [N * N + 2 * N]` and `scale [3]`, those of Hugging Face's
    `DeepseekV4HyperConnection`.

    Args:
        hidden_size: H.
        streams: N, at most 7.
        iterations: Of Sinkhorn and Knopp's algorithm, each a division by the sums of rows and one by those of columns.
        eps: Added to p, to the softmax and to the sums that are divided by, at least 0.
        norm_eps: Added to the mean square, at least 0.

    Source: Xie et al., 2025, https://arxiv.org/abs/2512.24880.
    """

    def __init__(
        self,
        hidden_size: int,
        streams: int = 4,
        iterations: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("iterations", iterations)):
            check_size(name, size)
        check_size("streams", streams, most=MAX_STREAMS)
        check_not_negative("eps", eps)
        check_not_negative("norm_eps", norm_eps)
        self.hidden_size, self.streams, self.iterations = hidden_size, streams, iterations
        self.eps, self.norm_eps = eps, norm_eps
        numbers = streams * streams + 2 * streams
        self.fn = nn.Parameter(torch.empty((numbers, streams * hidden_size), device=device, dtype=dtype))
        self.base = nn.Parameter(torch.empty((numbers,), device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty((3,), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=0.02)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, input: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if input.dim() < 2 or tuple(input.shape[-2:]) != (self.streams, self.hidden_size):
            raise ValueError(
                f"input: expected shape [..., {self.streams}, {self.hidden_size}], got {tuple(input.shape)}"
            )
        check_dtype("input", input)
        options = {"iterations": self.iterations, "eps": self.eps, "norm_eps": self.norm_eps}
        read, write, mix = stream_weights(input, self.fn, self.base, self.scale, **options)
        output = layer(functional.read_streams(input, read))
        if output.shape != input.shape[:-2] + input.shape[-1:]:
            raise ValueError(f"layer: expected a result in the shape of its input, got {tuple(output.shape)}")
        return functional.write_streams(input, output, write, mix)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, streams={self.streams}, iterations={self.iterations}, eps={self.eps}, "
            f"norm_eps={self.norm_eps}"
        )
