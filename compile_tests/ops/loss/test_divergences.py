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
        x, t = input.clone().requires_grad_(), target.clone().requires_grad_()
        results.append(torch.autograd.grad(loss(x, t, reduction="none", log_target=log_target), (x, t), grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.kernels
def test_a_sum_without_gradient_has_none(device: torch.device) -> None:
    input = torch.tensor([-1.0, -2.0], device=device, requires_grad=True)
    target = torch.tensor([0.25, -1.0], device=device, requires_grad=True)
    loss = ops.kl_div(input, target, reduction="sum")
    gradients = torch.autograd.grad(loss, (input, target), torch.zeros_like(loss))
    assert all(bool((gradient == 0).all()) for gradient in gradients)


@pytest.mark.kernels
def test_a_loss_scale_in_float16(device: torch.device) -> None:
    """Gradients that float16 has few digits of, or none, before they are scaled."""
    x, y = (torch.full((2, 8), log, device=device, dtype=torch.float16, requires_grad=True) for log in (-14.0, -16.0))
    loss = ops.jsd(x, y.detach())
    (gradient,) = torch.autograd.grad(loss, x, torch.full_like(loss, 65536.0))
    q, p = x.detach().double().exp(), y.detach().double().exp()
    exact = 65536.0 / 2 * q / 2 * (x.detach().double() - (q / 2 + p / 2).log())
    torch.testing.assert_close(gradient, exact.half(), rtol=2**-10, atol=0.0)


@pytest.mark.kernels
def test_a_sum_that_float16_cannot_hold_undivided(device: torch.device) -> None:
    """A class whose gradient is in range only once it is divided by the number of tokens."""
    x = torch.full((64, 4), 13.0, device=device, dtype=torch.float16, requires_grad=True)
    ops.jsd(x, torch.zeros_like(x)).backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.kernels
def test_no_divergence_from_oneself(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4, 40, device=device, dtype=torch.float32).log_softmax(-1).to(dtype).requires_grad_()
    loss = ops.jsd(x, x.detach().clone(), beta=0.5)
    (gradient,) = torch.autograd.grad(loss, x)
    assert float(loss) == 0.0
    assert not gradient.any()
