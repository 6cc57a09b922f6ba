"""Programs that look like an operator but must not be replaced: they are left to the bit, and the report says why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_same, results, rewritten
from compile_tests.helpers.fault_programs import randn
from llmk.compiler import Report

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {}
"""The function, its arguments and words of the reason, by name."""

TARGET = torch.tensor([1, 0, 4, 3])


def case(reason: str, *args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = fn, args, reason
        return fn

    return add


@case("rsqrt: what is computed around it is no norm", randn(3, 16))
def eps_outside(x: Tensor) -> Tensor:
    return x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6)


@case("rsqrt: what is computed around it is no norm", randn(3, 16))
def sum_for_mean(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


@case("rsqrt: what is computed around it is no norm", randn(3, 16), randn(3, 16))
def norm_of_another(x: Tensor, y: Tensor) -> Tensor:
    return y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@case("it is over axes [0] of 2", randn(16, 16))
def another_axis(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)


@case("it is over 2 axes", randn(3, 4, 4))
def two_axes(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4, 4))


@case("float64", randn(3, 16, dtype=torch.float64))
def in_float64(x: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), None, 1e-6)


@case("float64", randn(3, 16))
def float64_inside(x: Tensor) -> Tensor:
    y = x.double()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).float()


@case("rsqrt: what is computed around it is no norm", randn(3, 16))
def rounded_on_purpose(x: Tensor) -> Tensor:
    rounded = x.bfloat16().float()
    return x * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + 1e-6)


@case("F.rms_norm(x, x.shape[-1:], weight, eps) is found", randn(3, 16), randn(16))
def divided_by_lengths(x: Tensor, w: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * 4 * w


@case("rsqrt on the way is returned too", randn(3, 16))
def scale_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale, scale


@case("rsqrt on the way is read elsewhere too", randn(3, 16))
def scale_read(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale, scale.sum().exp()


@case("something that it reads is written in place", randn(3, 16).detach())
def written_in_place(x: Tensor) -> Tensor:
    y = 2 * x
    normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    y.add_(1)
    return normed * y


@case("up:", randn(3, 16), randn(3, 1))
def one_number_for_a_row(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


@case("silu on the way is returned too", randn(3, 16), randn(3, 16))
def gate_returned(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    activated = F.silu(g)
    return activated * u, activated


@case("classes are on the second axis", randn(1, 5, 4))
def classes_second(x: Tensor) -> Tensor:
    return F.cross_entropy(x, TARGET.view(1, 4))


@case("its softmax is over axis 0", randn(4, 5))
def softmax_over_tokens(x: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x, 0), TARGET)


@case("its softmax is over axis 0", randn(4, 3), randn(5, 3))
def softmax_of_a_projection_over_tokens(x: Tensor, w: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(F.linear(x, w), 0), TARGET)


@case("its softmax is float64", randn(4, 5))
def softmax_in_float64(x: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x, -1, dtype=torch.float64), TARGET)


@case("its input is no log_softmax", randn(4, 5))
def losses_of_scores(x: Tensor) -> Tensor:
    return F.nll_loss(torch.tanh(x), TARGET)


@case("its logits are not those of a linear layer", randn(4, 5))
def chosen_log_probabilities(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, TARGET[:, None])


@case("its target is probabilities", randn(4, 5), randn(4, 5))
def target_of_probabilities(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y.softmax(-1))


@case("is not over the last axis", randn(4, 4), randn(4, 4))
def chosen_tokens(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).log_softmax(-1).gather(0, TARGET[None] % 4)


@case("target: ", randn(4, 8), randn(5, 8))
def classes_of_some_tokens(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).log_softmax(-1).gather(-1, TARGET[:2, None])


@case("log_softmax on the way is read elsewhere too", randn(4, 8), randn(5, 8))
def entropy_besides(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = F.linear(x, w).log_softmax(-1)
    return logprobs.gather(-1, TARGET[:, None]), (logprobs.exp() * logprobs).sum(-1)


@case("", randn(4, 8), randn(5, 8))
def less_another_logsumexp(x: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(x, w)
    return logits.gather(-1, TARGET[:, None]) - torch.logsumexp(2 * logits, -1, keepdim=True)


@case("the axis of chosen classes is squeezed", randn(4, 8), randn(5, 8))
def as_many_candidates_as_tokens(x: Tensor, w: Tensor) -> Tensor:
    """The squeeze does nothing, so that each column, and not each row, has its `logsumexp` taken off."""
    logits = F.linear(x, w)
    return logits.gather(-1, TARGET.expand(4, 4)).squeeze(-1) - logits.logsumexp(-1)


@case("it is summed over axis 0", randn(4, 5), randn(4, 5))
def divergence_of_columns(x: Tensor, y: Tensor) -> Tensor:
    return (y.softmax(-1) * (y.log_softmax(-1) - x)).sum(0).mean()


@case("", randn(4, 5), randn(4, 5))
def divergence_from_another(x: Tensor, y: Tensor) -> Tensor:
    return (y.softmax(-1) * ((2 * y).log_softmax(-1) - x)).sum()


@case("", randn(1, 3, 2, 8), randn(1, 3, 2, 8), torch.ones(3, 2, 8))
def angles_that_change_between(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        cos, sin = (table[:, None].repeat_interleave(2, 1) for table in (angles[:, 0], angles[:, 1]))
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin

    first = turned(q)
    angles.mul_(2)
    return first, turned(k)


@case("cos wants a gradient", randn(1, 3, 2, 8), randn(1, 3, 2, 8), randn(2, 8))
def learned_angles(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    def halves(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)

    cos, sin = angles.cos(), angles.sin()
    return tuple(x * cos + halves(x) * sin for x in (q, k))


@case("q and k", randn(1, 3, 2, 8), torch.ones(2, 8), torch.zeros(2, 8))
def turned_alone(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos + torch.cat((-q[..., 4:], q[..., :4]), dim=-1) * sin


@case("no change of autocast", randn(1, 3, 2, 8), randn(1, 3, 2, 8), torch.ones(2, 8), torch.zeros(2, 8))
def turned_without_autocast_each(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x * cos + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin

    return turned(q), turned(k)


@pytest.mark.parametrize("name", CASES)
def test_left_as_it_was(name: str) -> None:
    fn, args, reason = CASES[name]
    report = Report()
    got = results(rewritten(fn, report), args)
    assert report.replaced == {}, str(report)
    assert any(reason in note.reason for note in report.left) or not reason, str(report)
    for x, y in zip(got, results(fn, args), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def no_gate(x: Tensor) -> Tensor:
    return F.silu(x) + F.gelu(x) / 2


def test_an_activation_without_a_gate_gives_no_line() -> None:
    report = Report()
    rewritten(no_gate, report)(randn(3, 16))
    assert not report.notes, str(report)


def projection(x: Tensor, w: Tensor, returned: bool) -> Any:
    logits = F.linear(x, w)
    loss = F.cross_entropy(logits, TARGET)
    return (loss, logits) if returned else loss


def test_logits_that_are_returned() -> None:
    """Their projection stays; the loss of them is replaced."""
    args = randn(4, 8), randn(5, 8)
    report = Report()
    rewritten(projection, report)(*args, returned=True)
    assert report.replaced == {"cross_entropy": 1}
    assert "linear on the way is returned too" in str(report)
    report.clear()
    rewritten(projection, report)(*args, returned=False)
    assert report.replaced == {"fused_linear_ce": 1}


def bias_of_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w) + b, TARGET)


def test_a_bias_of_each_row() -> None:
    report = Report()
    args = randn(4, 8), randn(5, 8), randn(4, 5)
    require_same(rewritten(bias_of_rows, report), bias_of_rows, args)
    assert report.replaced == {"cross_entropy": 1}
    assert any("not the same for all rows" in note.reason for note in report.left)


def test_operators_left_out() -> None:
    args = randn(4, 8), randn(5, 8)
    report = Report()
    rewritten(projection, report, without=["fused_linear_ce"])(*args, returned=False)
    assert report.replaced == {"cross_entropy": 1}


def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w).float() / 2
    return F.cross_entropy(logits.view(-1, 5), TARGET), logits


def test_logits_that_may_be_dropped() -> None:
    """While gradients are wanted: then they have no classes."""
    args, report = (randn(2, 2, 8), randn(5, 8)), Report()
    run = rewritten(both, report, drop_logits=True)
    assert run(*args)[1].shape == (2, 2, 0)
    assert report.replaced == {"fused_linear_ce": 1}
    require_same(lambda *args: run(*args)[0], lambda *args: both(*args)[0], args)
    with torch.no_grad():
        require_same(run, both, args)


def read_and_returned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, w)
    return F.cross_entropy(logits, TARGET), logits, logits.argmax(-1)


def test_logits_that_are_read_are_never_dropped() -> None:
    args, report = (randn(4, 8), randn(5, 8)), Report()
    require_same(rewritten(read_and_returned, report, drop_logits=True), read_and_returned, args)
    assert report.replaced == {"cross_entropy": 1}


def logprobs_and_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w)
    return logits.log_softmax(-1).gather(-1, TARGET[:, None]).sum(), logits


def test_logits_that_may_be_dropped_beside_log_probabilities() -> None:
    args, report = (randn(4, 8), randn(5, 8)), Report()
    run = rewritten(logprobs_and_logits, report, drop_logits=True)
    assert run(*args)[1].shape == (4, 0)
    assert report.replaced == {"linear_logprobs": 1}
    require_same(lambda *args: run(*args)[0], lambda *args: logprobs_and_logits(*args)[0], args)
