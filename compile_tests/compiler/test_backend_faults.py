"""Programs that the backend once got wrong in silence, or did not compile where Inductor does.

Each program is compared with eager mode and AOTAutograd: values and gradients by the accuracy rule, what shares memory,
inputs and buffers after the call, the random state.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor

from compile_tests.helpers.backend_compare import outcome, require_unchanged, rewriting, through, with_backend
from compile_tests.helpers.fault_programs import CASES, Program, case, fixed, randn, rms, rotated
from llmk.compiler import Report

# 58: it does not compile.


@case
def _gate_written_in_another_segment() -> Program:
    def fn(w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = g.clone()
        z = F.silu(y) * w
        with torch.no_grad():
            y.add_(1)
        return z, y

    return fn, [randn(2, 4), fixed(2, 4)]


@case
def _sum_of_add_rms_norm_written_in_another_segment() -> Program:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        z = rms(total) * w
        with torch.no_grad():
            total.mul_(0.5)
        return z, total

    return fn, [fixed(2, 4), fixed(2, 4), randn(4)]


class LearnedAngles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.tensor([1.0, 0.5, 0.2, 0.1]))

    def angles(self) -> Tensor:
        angles = torch.empty(5, 8)
        angles[:, :4] = torch.arange(5.0)[:, None] * self.frequencies
        angles[:, 4:] = angles[:, :4]
        return angles

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles()
        cos, sin = angles.cos(), angles.sin()
        return rotated(q, cos, sin), rotated(k, cos, sin)


class AnglesWrittenThroughAView(LearnedAngles):
    def angles(self) -> Tensor:
        angles = torch.zeros(5, 8)
        angles.view(5, 2, 4).add_((torch.arange(5.0)[:, None] * self.frequencies)[:, None])
        return angles


@case
def _learned_angles_written_by_halves() -> Program:
    return LearnedAngles(), [fixed(2, 3, 5, 8), fixed(2, 2, 5, 8)]


@case
def _learned_angles_written_through_a_view() -> Program:
    return AnglesWrittenThroughAView(), [fixed(2, 3, 5, 8), fixed(2, 2, 5, 8)]


@case
def _logits_divided_by_zero() -> Program:
    return lambda x, w: F.cross_entropy(F.linear(x, w) / 0.0, torch.arange(6)), [randn(6, 8), randn(11, 8)]


@case
def _logits_in_a_view_of_a_dtype() -> Program:
    fn = lambda x, w: F.cross_entropy(F.linear(x, w).view(torch.float32), torch.arange(6))  # noqa: E731
    return fn, [fixed(6, 8), fixed(11, 8)]


@torch.library.custom_op("llmk_faults::detach_view_copy", mutates_args=())
def detach_view_copy(x: Tensor) -> Tensor:
    return x.clone()


detach_view_copy.register_fake(torch.empty_like)
detach_view_copy.register_autograd(lambda ctx, grad: grad)


@case
def _operator_of_the_user_named_detach() -> Program:
    def fn(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        angles = detach_view_copy(torch.cat([angles, angles], -1))
        return rotated(q, angles.cos(), angles.sin()), rotated(k, angles.cos(), angles.sin())

    return fn, [fixed(2, 3, 5, 8), fixed(2, 2, 5, 8), randn(5, 4)]


@case
def _logits_all_masked_by_the_lowest_number() -> Program:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        mask = torch.arange(6)[:, None] < 2
        logits = F.linear(x, w).masked_fill(mask, torch.finfo(x.dtype).min)
        return F.cross_entropy(logits, torch.arange(6))

    return fn, [randn(6, 8), randn(11, 8)]


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes(name: str) -> None:
    require_unchanged(*CASES[name]())


# 60: constants that are symbolic, and Inductor's freezing.


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cap, self.temperature = nn.Linear(8, 11), 30.0, 0.7

    def forward(self, x: Tensor) -> Tensor:
        logits = self.linear(x)
        logits = self.cap * torch.tanh(logits / self.cap)
        return F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.long))


class Tempered(Capped):
    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.linear.weight) / self.temperature
        return F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.long))


@pytest.mark.parametrize(
    ("model", "operator"), [(Norm, "rms_norm"), (Capped, "fused_linear_ce"), (Tempered, "fused_linear_ce")]
)
def test_found_where_attributes_are_symbolic(model: Callable[[], nn.Module], operator: str) -> None:
    """`dynamic=True` makes floats that a module holds symbolic."""
    report = Report()

    def dynamic(fn: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(fn, backend=rewriting(report), dynamic=True)

    require_unchanged(model(), [randn(4, 8)], dynamic)
    assert report.replaced == {operator: 1}, str(report)


def test_with_freezing() -> None:
    """Inductor then runs its passes for inference on the operators themselves."""
    with torch.no_grad(), inductor.patch(freezing=True):
        require_unchanged(nn.RMSNorm(8).eval(), [fixed(4, 8)], through("llmk"))


def test_errors_of_a_program_are_its_own() -> None:
    """A comparison must be able to fail: what raises in one way only is a difference."""
    got = outcome(with_backend(), lambda x: F.silu(x) * x.view(3), [fixed(2, 4)])
    assert got.error
