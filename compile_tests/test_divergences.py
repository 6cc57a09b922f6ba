"""The divergences of two tensors, at numbers that no log-probability has and at gradients that no sample gives."""

import pytest
import torch

ops = torch.ops.llmk


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.kernels
def test_a_negative_target_without_gradient_has_none(log_target: bool, device: torch.device) -> None:
    """Its logarithm is NaN; PyTorch's gradient is that of xlogy, which is 0 where the incoming one is."""
    input = torch.tensor([-1.0, -2.0, 0.0, -0.5, -3.0], device=device)
    target = torch.tensor([0.25, -1.0, 0.0, float("nan"), -1.0], device=device)
    grad = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0], device=device)
    results = []
    for loss in (ops.kl_div, torch.nn.functional.kl_div):
        tensors = [input.clone().requires_grad_(), target.clone().requires_grad_()]
        results.append(torch.autograd.grad(loss(*tensors, reduction="none", log_target=log_target), tensors, grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.kernels
def test_a_sum_without_gradient_has_none(device: torch.device) -> None:
    input = torch.tensor([-1.0, -2.0], device=device, requires_grad=True)
    target = torch.tensor([0.25, -1.0], device=device, requires_grad=True)
    loss = ops.kl_div(input, target, reduction="sum")
    gradients = torch.autograd.grad(loss, (input, target), torch.zeros_like(loss))
    assert all(bool((gradient == 0).all()) for gradient in gradients)
