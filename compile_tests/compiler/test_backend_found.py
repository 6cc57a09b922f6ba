"""Programs that the fuzzer found the backend wrong on, by hand and small."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_compare import difference, eager, outcome, require_unchanged
from compile_tests.helpers.fault_programs import Program, randn, rms


def a_unit_of_one_activation(x: Tensor) -> Tensor:
    """The activation is multiplied with itself."""
    y = F.silu(x)
    return y * y


def a_unit_of_one_gelu(x: Tensor) -> Tensor:
    y = F.gelu(x, approximate="tanh")
    return y * y


def a_unit_times_what_its_gelu_computes(x: Tensor) -> Tensor:
    cube = x * x * x * 0.044715
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + cube))) * cube


def a_divergence_from_its_own_probabilities(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return (p * (x.log_softmax(-1) - p)).mean()


def a_divergence_from_its_own_exponential(x: Tensor) -> Tensor:
    logarithms = x.log_softmax(-1)
    p = logarithms.exp()
    return (p * (logarithms - p)).mean()


def a_divergence_from_its_own_logarithms(x: Tensor) -> Tensor:
    logarithms = x.log_softmax(-1)
    return (x.softmax(-1) * (logarithms - logarithms)).mean()


def two_rotations_in_two_spellings(x: Tensor, angles: Tensor, y: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate two tensors by angles of their own: they are no queries and keys."""
    first = turned(x, angles).flatten(-2)
    neighbours = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    return first, y * phases.cos() + neighbours * phases.sin()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.reshape(2, 2, 4, -1, 2)) * angles)


def a_rotation_that_leaves_twice(q: Tensor, angles: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    first, second = turned(q, angles).flatten(-2), turned(k, angles)
    return first, second.flatten(-2), second.flatten(-2)


def a_rotation_beside_one_that_nobody_reads(q: Tensor, angles: Tensor, k: Tensor) -> Tensor:
    turned(q, angles).flatten(-2)
    return turned(k, angles).flatten(-2)


def rotated_heads() -> list[Tensor]:
    angles = torch.polar(torch.ones(4, 4), randn(4, 4).detach())
    return [randn(2, 2, 4, 8), angles, randn(2, 2, 4, 8), randn(4, 8).detach()]


def a_norm_less_the_mean_of_its_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the bias is 0: of its sum over rows the roundings are left, which depend on its order."""
    y = F.layer_norm(x, (8,), weight, bias)
    return y - y.mean(0, keepdim=True)


FOUND: list[tuple[Callable[..., object], Callable[[], list[Tensor]]]] = [
    (a_unit_of_one_activation, lambda: [randn(6, 8)]),
    (a_unit_of_one_gelu, lambda: [randn(6, 8)]),
    (a_unit_times_what_its_gelu_computes, lambda: [randn(6, 8)]),
    (a_divergence_from_its_own_probabilities, lambda: [randn(6, 13)]),
    (a_divergence_from_its_own_exponential, lambda: [randn(6, 13)]),
    (a_divergence_from_its_own_logarithms, lambda: [randn(6, 13)]),
    (two_rotations_in_two_spellings, rotated_heads),
    (a_rotation_that_leaves_twice, lambda: rotated_heads()[:3]),
    (a_rotation_beside_one_that_nobody_reads, lambda: rotated_heads()[:3]),
    (a_norm_less_the_mean_of_its_rows, lambda: [randn(22, 8), randn(8), randn(8)]),
]


@pytest.mark.parametrize("program", [(fn, args()) for fn, args in FOUND], ids=[fn.__name__ for fn, _ in FOUND])
def test_nothing_changes(program: Program) -> None:
    require_unchanged(*program)


def test_a_rotation_is_found_although_its_first_result_is_read_before_its_second_is_computed() -> None:
    """Llama 4 normalizes what it rotated: the norm of the queries is replaced first, and stays where it stood."""

    def fn(q: Tensor, angles: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first = turned(q, angles[None]).flatten(-2)
        second = turned(k.neg(), angles[None]).flatten(-2)
        return rms(first), rms(second)

    report = require_unchanged(fn, rotated_heads()[:3])
    assert report.replaced == {"rms_norm": 2, "rope": 1}


def test_probabilities_that_were_rounded_are_not_taken_of_rounded_logarithms() -> None:
    """float16's logarithms of 13 classes hold their probabilities worse than float16's probabilities do."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x.softmax(-1) * (x.log_softmax(-1) - y)).mean()

    x, y = randn(6, 13).detach() + 1000, randn(6, 13).detach() + 100
    report = require_unchanged(fn, [x.half().requires_grad_(), y.half()])
    assert not report.replaced
    report = require_unchanged(fn, [x.requires_grad_(), y])
    assert report.replaced == {"kl_div": 1}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_slope_of_a_saturated_cap_is_judged_by_what_it_is(smoothing: float) -> None:
    """At tanh(20) the operator gives 4 exp(-40), and 1 - tanh^2 is 0 in float64 too."""

    def fn(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x / 5.0) * 5.0, target, reduction="sum", label_smoothing=smoothing)

    report = require_unchanged(fn, [(randn(6, 13).detach() + 100).requires_grad_(), torch.randint(13, (6,))])
    assert report.replaced == {"cross_entropy": 1}


def test_keys_that_no_gradient_reaches_have_none() -> None:
    """Queries and keys are one operator's, and only the queries leave."""

    def fn(q: Tensor, angles: Tensor, k: Tensor) -> Tensor:
        first, second = turned(q, angles).flatten(-2), turned(k, angles).flatten(-2)
        with torch.no_grad():
            _ = second.sum()
        return first

    require_unchanged(fn, rotated_heads()[:3])


def test_what_is_left_of_terms_that_cancel_is_roundings_of_float32() -> None:
    """The baseline is the composition's error near the incoming gradients too, and what is ten times that is wrong."""
    args = [randn(22, 8), randn(8), randn(8)]
    got = outcome(eager, a_norm_less_the_mean_of_its_rows, args)
    got.values["gradient of input 2"] += 2**-16
    assert (difference(got, a_norm_less_the_mean_of_its_rows, args) or "").startswith("gradient of input 2: ")
