"""Mixtures of experts: what is refused, what is chosen, and the losses of a router."""

from typing import Any

import pytest
import torch

import llmk
from llmk.functional import grouped_linear, moe_experts, moe_permute, moe_unpermute, router_topk

X, GATE_UP, DOWN = torch.randn(4, 8), torch.randn(3, 12, 8), torch.randn(3, 8, 6)
INDICES, WEIGHTS = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]]), torch.rand(4, 2)


def experts(**changed: Any) -> torch.Tensor:
    named = {"input": X, "gate_up": GATE_UP, "down": DOWN, "indices": INDICES, "weights": WEIGHTS}
    return moe_experts(**(named | changed))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: router_topk(X, 3, num_groups=4), ValueError, "top_k: expected 1 to 2"),
        (lambda: router_topk(X, 1, num_groups=3), ValueError, "num_groups: expected a number that divides the 8"),
        (lambda: experts(alpha=0.0), ValueError, "alpha: expected"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    _, indices = router_topk(torch.zeros(2, 6), 3)
    assert indices.tolist() == [[0, 1, 2]] * 2


def test_the_bias_decides_and_is_not_in_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([-10.0, 0.0, 0.5])
    weights, indices = router_topk(logits, 2, bias=bias, scoring="sigmoid", normalize=False)
    assert indices.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [2, 1]])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_routers_gradients_beside_a_large_first_one(scoring: str) -> None:
    """The bias puts an expert of next to no weight first: its gradient is large, and must not round the others."""
    generator = torch.Generator().manual_seed(0)
    logits, incoming = torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)
    logits[:, 0], incoming[:, 0] = -15.0, 1e5
    bias = torch.zeros(32)
    bias[0] = 10.0
    logits.requires_grad_()
    weights, indices = router_topk(logits, 8, bias=bias, scoring=scoring)
    (equal,) = torch.autograd.grad(weights, logits, torch.full_like(incoming, 0.1), retain_graph=True)
    assert float(equal.abs().max()) < 1e-20  # the weights' sum is 1 whatever the logits, but for the 1e-20 below it
    (got,) = torch.autograd.grad(weights, logits, incoming)
    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1) if scoring == "softmax" else exact.sigmoid()
    chosen = scores.gather(-1, indices)
    (right,) = torch.autograd.grad(chosen / chosen.sum(-1, keepdim=True), exact, incoming.double())
    assert bool((indices[:, 0] == 0).all())
    torch.testing.assert_close(got.double(), right, rtol=2**-20, atol=2**-20)  # 8 units, of a number and of 1


def test_the_gradient_of_an_expert_that_is_nearly_all_is_no_difference_of_large_numbers() -> None:
    logits = torch.tensor([[0.0, 15.0, -0.1, 0.1, 0.2]], requires_grad=True)
    incoming = torch.tensor([[677.0, 273.0, 63.0, -462.0, 1.0]])
    weights, indices = router_topk(logits, 5)
    (got,) = torch.autograd.grad(weights, logits, incoming)
    exact = logits.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(exact.softmax(-1).gather(-1, indices), exact, incoming.double())
    lost = 2.0**-24 * 15 * (677 + 273) / (677 - 273)  # a weight's rounded exponent, in a difference of two gradients
    torch.testing.assert_close(got.double(), right, rtol=4 * lost, atol=0.0)


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    logits = torch.tensor([[5.0, -5.0, 3.0, 2.9, 1.0, 1.0]])  # the largest is in the group with the smallest sum of two
    _, indices = router_topk(logits, 2, scoring="sigmoid", num_groups=3, topk_groups=1)
    assert indices.tolist() == [[2, 3]]


def test_parts_make_the_whole() -> None:
    rows, positions, offsets = moe_permute(X, INDICES, 3)
    hidden = llmk.functional.swiglu(grouped_linear(rows, GATE_UP, offsets))
    y = moe_unpermute(grouped_linear(hidden, DOWN, offsets), positions, WEIGHTS)
    torch.testing.assert_close(y, experts())


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_bias_is_added_before_the_result_is_rounded(compiled: bool, device: torch.device) -> None:
    """It takes off nearly all of the product: what that lost by a rounding of its own would be half a unit of it."""
    x, weight = (torch.rand(n, 8, device=device) + 10 for n in (6, 2 * 16))
    x, weight = x.half(), weight.half().view(2, 16, 8)
    offsets = torch.tensor([2, 5], device=device, dtype=torch.int32)
    inputs = [t.requires_grad_() for t in (x, weight, torch.full_like(weight[..., 0], -850.0))]
    fn = torch.compile(grouped_linear, fullgraph=True) if compiled else grouped_linear
    y = fn(inputs[0], inputs[1], offsets, inputs[2])
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.cat([exact[0][b:e] @ exact[1][i].t() + exact[2][i] for i, (b, e) in enumerate([(0, 2), (2, 5)])])
    for ours, right in [
        (y[:5], expected),
        *zip(
            *(torch.autograd.grad(out, of, torch.ones_like(out)) for out, of in ((y, inputs), (expected, exact))),
            strict=True,
        ),
    ]:
        torch.testing.assert_close(ours.double(), right, rtol=2.0**-10, atol=1e-4)
    assert not bool(y[5].any())


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_limit_cuts_has_no_gradient_even_of_an_infinite_one(compiled: bool, device: torch.device) -> None:
    """The gradient of the gated unit leaves float32, which does not matter where the unit is at its limit."""
    x = torch.ones(3, 4, device=device, requires_grad=True)
    gate_up, down = (
        torch.full((2, 8, 4), 2.0, device=device, requires_grad=True),
        torch.full((2, 4, 4), 2e38, device=device),
    )
    indices = torch.tensor([[0], [1], [0]], device=device, dtype=torch.int64)
    fn = torch.compile(moe_experts, fullgraph=True) if compiled else moe_experts
    y = fn(x, gate_up, down, indices, torch.full((3, 1), 1e-3, device=device), limit=1.0)
    assert bool(y.isfinite().all())
    for gradient in torch.autograd.grad(y, (x, gate_up), torch.full_like(y, 1e3)):
        assert not bool(gradient.any()), gradient


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True])
def test_ups_that_the_limit_cut_have_no_gradient_beside_an_infinite_gate(compiled: bool, device: torch.device) -> None:
    """SiLU of a gate of -inf is -inf times 0; what the limit cut has gradient 0 all the same."""
    x = torch.ones(2, 4, device=device)
    gate_up = torch.full((1, 8, 4), 2.0, device=device)
    gate_up[0, 0] = -torch.inf
    gate_up.requires_grad_()
    down = torch.full((1, 4, 4), 0.5, device=device)
    indices = torch.zeros((2, 1), device=device, dtype=torch.int64)
    fn = torch.compile(moe_experts, fullgraph=True) if compiled else moe_experts
    y = fn(x, gate_up, down, indices, torch.ones((2, 1), device=device), limit=1.0)
    y.sum().backward()
    assert gate_up.grad is not None
    assert not bool(gate_up.grad[0, 4:].any())


def test_load_balance_loss_is_mixtrals() -> None:
    modeling = "transformers.models.mixtral.modeling_mixtral"
    mixtral = pytest.importorskip(modeling, exc_type=ImportError)
    logits = torch.randn(10, 6, requires_grad=True)
    other = logits.detach().clone().requires_grad_()
    _, indices = router_topk(logits, 2)
    loss = llmk.nn.load_balance_loss(logits, indices)
    expected = mixtral.load_balancing_loss_func((other,), 6, 2)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_router_z_loss_is_the_squared_log_of_the_denominator() -> None:
    logits = torch.randn(10, 6)
    expected = logits.double().exp().sum(-1).log().square().mean()
    torch.testing.assert_close(llmk.nn.router_z_loss(logits).double(), expected, rtol=1e-6, atol=0)
