"""Functions that kernels call, of `llmk.ops.common.math`, against float64 in units of float32's last place."""

from collections.abc import Callable

import pytest
import torch
import triton.language as tl
from torch import Tensor

from llmk.accuracy.rule import unit_in_last_place
from llmk.opcheck import path_taken
from llmk.ops.common.math import exp, exp_of_decay, expm1, log1p, softplus, tanh
from llmk.registry import jit
from llmk.registry.devices import INTERPRET

SPECIAL = [0.0, -0.0, 1.0, -1.0, -1.5, float("inf"), -float("inf"), float("nan"), 1e-30, -1e-30, 88.0, -88.0, 3e38]


@jit
def function_kernel(x_ptr, y_ptr, N, FUNCTION: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    if FUNCTION == "exp":
        y = exp(x)
    elif FUNCTION == "exp_of_decay":
        y = exp_of_decay(x)
    elif FUNCTION == "expm1":
        y = expm1(x)
    elif FUNCTION == "log1p":
        y = log1p(x)
    elif FUNCTION == "softplus":
        y = softplus(x)
    else:
        tl.static_assert(FUNCTION == "tanh")
        y = tanh(x)
    tl.store(y_ptr + cols, y, mask=cols < N)


@pytest.mark.parametrize(
    ("function", "units"),
    [(torch.exp, 2), (torch.expm1, 4), (torch.log1p, 2), (torch.nn.functional.softplus, 3), (torch.tanh, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.kernels
def test_a_function_is_good_to_its_last_places(
    function: Callable[[Tensor], Tensor], units: int, device: torch.device
) -> None:
    if path_taken(device) == "reference":
        pytest.skip("no kernel runs on a CPU, but in the interpreter")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(20_000, generator=generator) * 37 - 30)
    x = torch.cat([sizes, -sizes, torch.tensor(SPECIAL)]).to(device)
    y = torch.empty_like(x)
    function_kernel[(-(-x.numel() // 1024),)](x, y, x.numel(), FUNCTION=function.__name__, BLOCK_N=1024)
    x64 = x.double().requires_grad_()
    exact = exact_value(function, x64)
    (slope,) = torch.autograd.grad(exact.sum(), x64)
    exact, eps = exact.detach(), torch.finfo(torch.float32).eps
    allowed = units * eps * exact.abs().clamp(min=torch.finfo(torch.float32).tiny)
    if INTERPRET:  # its fma rounds the product, so that an exponential loses what its argument's rounding does
        allowed += eps * (x64.detach() * slope).abs().nan_to_num()
    else:  # a GPU's exp2 has 0 for a subnormal number
        allowed = allowed.clamp(min=torch.finfo(torch.float32).tiny)
    same = (y == exact.float()) | (y.isnan() & exact.isnan())
    wrong = ~(same | ((y - exact).abs() <= allowed))
    assert not wrong.any(), (x[wrong][:5].tolist(), y[wrong][:5].tolist(), exact[wrong][:5].tolist())


def exact_value(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute in float64; PyTorch's softplus is x itself from 20 on and cancels nowhere else."""
    return torch.logaddexp(x, torch.zeros_like(x)) if function is torch.nn.functional.softplus else function(x)


@pytest.mark.kernels
def test_a_decay_is_neither_too_large_nor_too_small_on_average(device: torch.device) -> None:
    if path_taken(device) == "reference":
        pytest.skip("no kernel runs on a CPU, but in the interpreter")
    generator = torch.Generator().manual_seed(0)
    x = -torch.exp2(torch.rand(20_000, generator=generator) * 20 - 14)
    x = torch.cat([x, torch.tensor([0.0, -float("inf"), -200.0, float("nan")])]).to(device)
    y = torch.empty_like(x)
    function_kernel[(-(-x.numel() // 1024),)](x, y, x.numel(), FUNCTION="exp_of_decay", BLOCK_N=1024)
    *_, one, infinite, far, nan = y.tolist()
    assert (one, infinite, far) == (1.0, 0.0, 0.0)
    assert nan != nan
    exact = x[:-4].double().exp()
    units = (y[:-4] - exact) / unit_in_last_place(exact, torch.float32)
    assert units.abs().max() <= 1.2
    for strength in ((x[:-4] > -0.01), (x[:-4] <= -0.01) & (x[:-4] > -1), x[:-4] <= -1):
        assert units[strength].mean().abs() < 0.05
