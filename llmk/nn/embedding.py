"""Tables of rows."""

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry import check_size


class Embedding(nn.Module):
    """`torch.nn.Embedding`, whose gradient is the same bits each time, compiled too, and summed in float32.

    Parameters: `weight [num_embeddings, embedding_dim]`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("num_embeddings", num_embeddings, 0)
        check_size("embedding_dim", embedding_dim)
        if padding_idx is not None:
            check_size("padding_idx", padding_idx, -num_embeddings, num_embeddings - 1)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = nn.Parameter(torch.empty((num_embeddings, embedding_dim), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0)

    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
