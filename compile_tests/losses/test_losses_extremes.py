"""Losses as plain functions, and what autograd makes of them: values and gradients of arguments of any size.

What is right is float64's, which is asked to agree with the papers' formulas where these are finite. The baseline is
the papers' formulas in float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_references import F_PRIMES, OF_A_PAIR, orpo_of, smoothed
from llmk.accuracy.neighbours import FAR, NEIGHBOURS, nudged, to_float64
from llmk.accuracy.rule import ROUNDINGS, unit_in_last_place
from llmk.ops.linear_loss.objectives.policy import ESTIMATORS, PolicyOptions, PolicyTerms
from llmk.ops.linear_loss.objectives.policy import LOSSES as POLICY_LOSSES
from llmk.ops.linear_loss.objectives.preference import F_DIVERGENCES, LOSSES, LossOptions
from llmk.registry import gradient_of

SIZES = torch.tensor([1e-3, 0.03, 0.7, 1.0, 3.0, 10.0, 17.0, 40.0, 88.0, 100.0, 1e3, 1e4])
ANY = torch.cat([-SIZES.flip(0), torch.zeros(1), SIZES])
LOG_PROBABILITIES = -torch.cat([torch.tensor([1e-6, 1e-4]), SIZES])
NOTHING = 128 * torch.finfo(torch.float32).tiny
"""The most that a loss has of a probability which is subnormal, and may be 0 as well."""
Function = Callable[..., Tensor]


def every(*values: Tensor) -> list[Tensor]:
    """All combinations, an argument of the function each."""
    return list(torch.cartesian_prod(*values).view(-1, len(values)).T.contiguous())


def results(fn: Function, inputs: list[Tensor], wanted: int) -> list[Tensor]:
    """The values of each element, and the derivatives by the first arguments."""

    def total(*given: Tensor) -> Tensor:
        return fn(*given, *inputs[wanted:]).sum()

    _, gradients = gradient_of(total, *inputs[:wanted])
    return [fn(*inputs), *(torch.zeros_like(inputs[0]) if grad is None else grad for grad in gradients)]


def require(fn: Function, formula: Function, inputs: list[Tensor], wanted: int) -> None:
    """The rule of accuracy for each element by itself, with the formula's largest error on inputs that are near."""

    def moved(fn: Function, seed: int, dtype: torch.dtype | None, by: float | None = None) -> list[Tensor]:
        change = nudged(seed, dtype, by)
        return [x.double() for x in results(fn, [change(x.expand(NEIGHBOURS, -1).clone()) for x in inputs], wanted)]

    in_float64 = [to_float64(x) for x in inputs]
    exact, by_formula = results(fn, in_float64, wanted), results(formula, in_float64, wanted)
    bounds = [(x - right).square().mean(0).sqrt() for x, right in zip(moved(fn, 0, torch.float64), exact, strict=True)]
    baselines = [torch.zeros_like(right) for right in exact]
    for seed in range(NEIGHBOURS):
        by = FAR * (1 + seed / 4)  # no two of which round alike
        near = moved(formula, seed, None, by), moved(fn, seed, torch.float64, by)
        for baseline, plain, right in zip(baselines, *near, strict=True):
            errors = (plain - right).abs().nan_to_num(0.0, posinf=0.0)
            torch.maximum(baseline, errors.amax(0), out=baseline)
    for ours, right, same, bound, baseline in zip(
        results(fn, inputs, wanted), exact, by_formula, bounds, baselines, strict=True
    ):
        both = right.isfinite() & same.isfinite()
        torch.testing.assert_close(right[both], same[both])
        unit = bound + unit_in_last_place(right, torch.float32) + NOTHING
        allowed = 1.5 * torch.maximum(baseline, ROUNDINGS * unit) + unit
        held = right.abs() < torch.finfo(torch.float32).max
        wrong = held & ~((ours.double() - right).abs() <= allowed)
        worst = [(ours[i].item(), right[i].item(), [x[i].item() for x in inputs]) for i in wrong.nonzero().flatten()]
        assert not worst, f"of {len(worst)}: {worst[:3]}"


OPTIONS = [LossOptions(0.25, 0.125, 0.5, 0.5), LossOptions(1.0, 2**-10, 0.0, 0.0625)]  # float32 has these numbers


def paper(name: str, options: LossOptions) -> Function:
    """The loss of rewards as its paper has it."""
    beta, e, gamma, tau = options
    if name in ("cpo", "simpo"):
        return lambda c, r: smoothed(beta * (c - r) - gamma, e)
    if name == "kto":
        return lambda gain: 1 - torch.sigmoid(beta * gain)
    return orpo_of if name == "orpo" else lambda c, r: OF_A_PAIR[name](c, r, beta, e, tau)


@pytest.mark.parametrize("options", OPTIONS, ids=["smooth", "steep"])
@pytest.mark.parametrize("name", LOSSES)
def test_preferences(name: str, options: LossOptions) -> None:
    """A reward is the difference from the reference's log-probability, -8, and as exact as these; not that of ORPO."""
    loss, ref = LOSSES[name], 0.0 if name == "orpo" else -8.0

    def rewarded(fn: Function) -> Function:
        return lambda *logps: fn(*(logp - ref for logp in logps))

    logps = every(*[LOG_PROBABILITIES if name == "orpo" else ANY + ref] * loss.sequences)
    own, papers = functools.partial(loss.value, options), paper(name, options)
    require(rewarded(own), rewarded(papers), logps, wanted=loss.sequences)


@pytest.mark.parametrize("coef", [0.5, 2.0, -1.0])
@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_f_divergences(name: str, coef: float) -> None:
    """The exponents have a bound, past which the derivative is 0."""
    rewards = ANY[(coef - 1) * ANY < 80] if name == "alpha_divergence" else ANY[ANY > -80]
    require(lambda t: F_DIVERGENCES[name](t, coef), lambda t: F_PRIMES[name](t, coef), [rewards], wanted=1)
    slope = gradient_of(lambda t: F_DIVERGENCES[name](t, coef).sum(), ANY)[1][0]
    assert slope is not None
    assert slope.isfinite().all()


LOG_RATIOS = torch.cat([-SIZES[:9].flip(0), torch.zeros(1), SIZES[:6]])


def of_policy(options: PolicyOptions) -> Function:
    """The loss of each token of log-probabilities, those of the old policy and the reference, and weights."""

    def each(logps: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, weight: Tensor) -> Tensor:
        terms = PolicyTerms(
            advantages=advantages, token_weight=weight, old_logps=old, ref_logps=ref, kl_weight=weight, options=options,
            level=lambda values: values,
        )  # fmt: skip
        return terms.token_losses(logps, torch.zeros_like(logps))

    return each


def policy_paper(options: PolicyOptions) -> Function:
    """The same from the formulas of the papers."""
    low, high, most = 1 - options.epsilon, 1 + options.epsilon_high, options.max_log_ratio or math.inf
    delta, dual = options.delta or math.inf, options.clip_ratio_c or math.inf

    def kl(x: Tensor) -> Tensor:
        k2, k3 = x.square() / 2, torch.exp(-x) - 1 + x
        return {"k1": x, "k2": k2, "k3": k3, "k3+": k2 - k2.detach() + k3.detach()}[options.kl_estimator]

    def each(logps: Tensor, old: Tensor, ref: Tensor, A: Tensor, weight: Tensor) -> Tensor:
        log_ratio = (logps - old).clamp(-most, most)
        ratio, tau = log_ratio.exp(), torch.where(A > 0, 0.5, 1.5)
        clipped = -torch.minimum(ratio.clamp(max=delta) * A, ratio.clamp(low, high) * A)
        log_clipped = A.sign() * torch.minimum(A.sign() * (logps - old), A.sign() * (logps - old).clamp(-0.2, 0.2))
        own = {
            "clipped": torch.where(A < 0, torch.minimum(clipped, -dual * A), clipped),
            "sapo": -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A,
            "cispo": -ratio.detach().clamp(max=options.epsilon_high) * A * logps,
            "reinforce": -A * logps,
            "dft": -A * logps.exp().detach() * logps,
            "surrogate": -ratio * A,
            "gmpo": -log_clipped.clamp(-most, most).exp() * A,
        }
        own["dppo_tv"] = own["dppo_kl"] = -ratio.detach().clamp(max=delta) * A * logps
        divergence = kl((logps - ref).clamp(-most, most))
        return weight * (
            own[options.loss_type] + (divergence * ratio if options.use_bias_correction_kl else divergence)
        )

    return each


OF_POLICIES: list[dict[str, Any]] = [{}, {"delta": 1.3}, {"clip_ratio_c": 1.1}, {"max_log_ratio": 0.3}]


def require_policy(**options: Any) -> None:
    """The loss of every token and its gradient; DPPO's bounds are infinite, so that every token has one."""
    chosen = PolicyOptions(sapo_temperature_pos=0.5, sapo_temperature_neg=1.5, **options)
    if POLICY_LOSSES[chosen.loss_type].keeps is not None:
        chosen = chosen._replace(epsilon=math.inf, epsilon_high=math.inf)
    log_ratio, logps, to_ref, advantages, weight = every(
        LOG_RATIOS,
        -torch.tensor([1e-6, 0.01, 1.0, 20.0, 1000.0]),
        torch.tensor([-5.0, -0.01, 0.5]),
        torch.tensor([1.0, 0.0, -1.5]),
        torch.tensor([0.5, 0.0]),
    )
    given = [logps, logps - log_ratio, logps - to_ref, advantages, weight]
    require(of_policy(chosen), policy_paper(chosen), given, wanted=1)


@pytest.mark.parametrize("options", OF_POLICIES, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policies(name: str, options: dict[str, Any]) -> None:
    require_policy(loss_type=name, **options)


@pytest.mark.parametrize("bound", [None, 0.3])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators(estimator: str, corrected: bool, bound: float | None) -> None:
    require_policy(kl_estimator=estimator, use_bias_correction_kl=corrected, max_log_ratio=bound)
