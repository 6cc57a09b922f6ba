"""`llmk.nn.TiledMLP`: the layer's own values and gradients, and one tile's intermediate values at a time."""

import copy

import pytest
import torch
from torch import Tensor

import llmk
from llmk.opcheck import accuracy_violation

H, F = 12, 40


def training(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


@pytest.mark.parametrize(("tile_size", "compiled"), [(1, False), (7, False), (24, False), (100, False), (7, True)])
def test_values_and_gradients_are_the_layers(tile_size: int, compiled: bool) -> None:
    torch.manual_seed(0)
    mlp = llmk.nn.SwiGLUMLP(H, F, bias=True)
    x, grad = torch.randn(2, 3, 4, H), torch.randn(2, 3, 4, H)
    tiled = llmk.nn.TiledMLP(copy.deepcopy(mlp), tile_size)
    if compiled:
        tiled.compile(backend="aot_eager", fullgraph=True)
    got = training(tiled, x, grad)
    exact = training(_Float64(mlp), x.double(), grad.double())
    for ours, own, right in zip(got, training(mlp, x, grad), exact, strict=True):
        assert ours.shape == own.shape
        assert (violation := accuracy_violation(ours, own, right)) is None, str(violation)


class _Float64(torch.nn.Module):
    """The layer in float64, where llmk has no operators."""

    def __init__(self, mlp: llmk.nn.SwiGLUMLP) -> None:
        super().__init__()
        self.mlp = copy.deepcopy(mlp).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.down_proj(torch.nn.functional.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x))


def test_no_intermediate_value_is_kept() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1] if tensor.dim() == 2 and tensor.shape[0] == 4 else 0)
        return tensor

    layers = llmk.nn.SwiGLUMLP(H, F), llmk.nn.TiledMLP(llmk.nn.SwiGLUMLP(H, F), 4)
    for layer, expected in zip(layers, (True, False), strict=True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.randn(4 if expected else 16, H, requires_grad=True))
        assert (F in kept) is expected


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="tile_size: expected at least 1, got 0"):
        llmk.nn.TiledMLP(torch.nn.Identity(), 0)
