"""Gradients made in the forward pass are scaled where they are only where nobody can see that."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.functional import fused_linear_ce
from llmk.ops.common import scaling
from llmk.ops.common.scaling import SavedGradients
from llmk.registry import num_programs
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.kernels

X, W = torch.randn(6, 8), torch.randn(11, 8)
T = torch.tensor([3, -100, 0, 10, 7, 1])


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record where what is scaled in place lies."""
    seen: list[int] = []
    times = SavedGradients.times

    def noted(self: SavedGradients, index: int, *args: Any, **options: Any) -> Tensor:
        found = times(self, index, *args, **options)
        if found.data_ptr() == self.gradients[index].data_ptr():
            seen.append(found.data_ptr())
        return found

    monkeypatch.setattr(SavedGradients, "times", noted)
    return seen


def loss_of(reduction: str = "mean") -> tuple[Tensor, Tensor, Tensor]:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return fused_linear_ce(x, w, T, reduction=reduction), x, w


def right(factor: float, reduction: str) -> tuple[Tensor, Tensor]:
    x, w = X.double().requires_grad_(), W.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ w.t(), T, reduction=reduction)
    dx, dw = torch.autograd.grad(factor * loss, (x, w))
    return dx.float(), dw.float()


@pytest.mark.parametrize("factor", [1.0, -0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_last_backward_scales_in_place(factor: float, reduction: str, places: list[int]) -> None:
    loss, x, w = loss_of(reduction)
    found = torch.autograd.grad(factor * loss, (x, w))
    assert [gradient.data_ptr() for gradient in found] == places
    torch.testing.assert_close(found, right(factor, reduction))


def test_a_gradient_that_is_handed_out_is_nobody_elses(places: list[int]) -> None:
    """Not that of the backward pass before, whose graph was kept."""
    loss, x, w = loss_of()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    assert not places
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(3.0 * loss, (x, w))
    assert places
    torch.testing.assert_close(list(first), kept, rtol=0, atol=0)
    torch.testing.assert_close(second, right(3.0, "mean"))


def test_what_a_hook_has_seen_stays_as_it_is(places: list[int]) -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, x, w = loss_of()
    before = [tensor.clone() for tensor in seen]
    found = torch.autograd.grad(3.0 * loss, (x, w))
    assert not places
    torch.testing.assert_close(seen, before, rtol=0, atol=0)
    torch.testing.assert_close(found, right(3.0, "mean"))


def test_a_graph_of_the_backward_pass_keeps_what_was_saved(places: list[int]) -> None:
    loss, x, w = loss_of()
    torch.autograd.grad(loss, (x, w), create_graph=True)
    assert not places


def test_a_gradient_is_no_part_of_the_graph(places: list[int]) -> None:
    """A gradient in the graph would keep it for as long as the gradient itself is kept."""
    loss, x, w = loss_of()
    found = torch.autograd.grad(loss, (x, w))
    assert places
    assert [(gradient.requires_grad, gradient.grad_fn) for gradient in found] == [(False, None)] * 2


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_zero_stays_zero(value: float) -> None:
    """The kernel too keeps it zero, to memory of its own and where the gradient is."""
    loss, x, w = loss_of("sum")
    for retain_graph in (True, False):
        dx, dw = torch.autograd.grad(loss, (x, w), torch.tensor(value), retain_graph=retain_graph)
        assert not dx[1].any()
        assert not dx[torch.arange(6) != 1].isfinite().any()
        assert not dw.isfinite().any()


@pytest.mark.skipif(not INTERPRET, reason="plain PyTorch has no programs")
def test_programs_share_what_is_larger_than_all_of_them() -> None:
    blocks = num_programs(torch.device("cpu"), scaling.PROGRAMS) * 2 + 1
    x = torch.randn(4096 * blocks - 100, dtype=torch.float32).bfloat16()
    want = (2.0 * x.double()).bfloat16()
    scaling._launch(x, torch.tensor(2.0), None, 0, False, x, in_place=True)
    torch.testing.assert_close(x, want, rtol=0, atol=0)
