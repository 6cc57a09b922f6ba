"""A layer that is applied to a part of the tokens at a time."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmk.registry import check_size


class TiledMLP(nn.Module):
    """A feed-forward layer on `tile_size` tokens at a time, for sequences whose intermediate values do not fit.

    In training each tile is computed again in the backward pass, so that only one tile's intermediate values exist at
    any time; the layer costs a third more. It is plain PyTorch around the layer, eager or compiled. The gradients of
    the layer's parameters are summed over the tiles in the parameters' dtype: take as few tiles as memory allows.

    Args:
        mlp: The layer: a module of one input `[..., H]` that treats every token by itself, such as
            `llmk.nn.SwiGLUMLP` or a model's own.
        tile_size: Tokens at a time, at least 1.
    """

    def __init__(self, mlp: nn.Module, tile_size: int) -> None:
        super().__init__()
        if not isinstance(mlp, nn.Module):
            raise TypeError(f"mlp: expected a module, got {type(mlp).__name__} {mlp!r}")
        check_size("tile_size", tile_size)
        self.mlp, self.tile_size = mlp, tile_size

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.reshape(-1, input.shape[-1])
        if tokens.shape[0] <= self.tile_size:
            return self.mlp(input)
        tiles = tokens.split(self.tile_size)
        if torch.is_grad_enabled():
            outputs = [checkpoint(self.mlp, tile, use_reentrant=False) for tile in tiles]
        else:
            outputs = [self.mlp(tile) for tile in tiles]
        return torch.cat(outputs).unflatten(0, input.shape[:-1])

    def extra_repr(self) -> str:
        return f"tile_size={self.tile_size}"
