"""Several residual streams around a layer, mixed by what each token says."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmk.registry import check_floating, check_not_negative, check_size


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Matrices `[..., N, N]` whose rows and columns sum to 1, as far as so many turns go: columns are the last."""
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class HyperConnection(nn.Module):
    r"""Manifold-constrained hyper-connections (mHC): N residual streams around a layer, as DeepSeek-V4 has them.

    With x the streams `[N, H]` of a token, n = x / rms(x) over all of them as one row, and f the layer,

        p, q, C = n @ fn.T                               [N], [N], [N, N]
        p = sigmoid(scale_0 * p + base_p) + eps          what of each stream the layer reads
        q = 2 * sigmoid(scale_1 * q + base_q)            what each stream gets of its output
        C = sinkhorn(scale_2 * C + base_C)               what stream j gets of stream i: rows and columns sum to 1
        y_j = q_j * f(sum_i p_i * x_i) + sum_i C_ij * x_i

    where sinkhorn divides the softmax of each row by the sums of columns and of rows in turn. All is float32, and what
    the layer reads and the streams are rounded to the dtype of x. It is plain PyTorch around the layer: compile it, for
    eager mode launches a hundred small kernels.

    Call it with the streams, floating `[..., N, H]`, and the layer, a function of `[..., H]` in their dtype that keeps
    the shape; the new streams have the shape and dtype of the old.

    Parameters: `fn [N * N + 2 * N, N * H]`, `base [N * N + 2 * N]` and `scale [3]`, those of Hugging Face's
    `DeepseekV4HyperConnection`.

    Args:
        hidden_size: H.
        streams: N.
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
        for name, size in (("hidden_size", hidden_size), ("streams", streams), ("iterations", iterations)):
            check_size(name, size)
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
        check_floating("input", input)
        read, write, mix = self._weights(input)
        streams = input.float()
        output = layer((read.unsqueeze(-1) * streams).sum(-2).to(input.dtype))
        if output.shape != input.shape[:-2] + input.shape[-1:]:
            raise ValueError(f"layer: expected a result in the shape of its input, got {tuple(output.shape)}")
        result = write.unsqueeze(-1) * output.float().unsqueeze(-2)
        for i in range(self.streams):
            result = result + mix[..., i, :].unsqueeze(-1) * streams[..., i, None, :]
        return result.to(input.dtype)

    def _weights(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return p `[..., N]`, q `[..., N]` and C `[..., N, N]` for each token."""
        n, row = self.streams, input.flatten(-2).float()
        rstd = torch.rsqrt(row.square().mean(-1, keepdim=True) + self.norm_eps)
        logits = nn.functional.linear(row, self.fn.float()) * rstd
        sizes = (n, n, n * n)
        parts = zip(logits.split(sizes, -1), self.base.float().split(sizes), self.scale.float().unbind(), strict=True)
        read, write, mix = (part * scale + base for part, base, scale in parts)
        mixed = sinkhorn(mix.unflatten(-1, (n, n)), self.iterations, self.eps)
        return torch.sigmoid(read) + self.eps, 2 * torch.sigmoid(write), mixed

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, streams={self.streams}, iterations={self.iterations}, eps={self.eps}, "
            f"norm_eps={self.norm_eps}"
        )
