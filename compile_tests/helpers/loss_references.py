"""The losses of `llmk.losses` from whole logits, a sequence at a time, in plain PyTorch: what the tests compare with.

Each is written from its paper, with the signature of the loss, and gives the loss alone. It is right in float64;
in the dtype of the inputs it is the composition whose error is the baseline.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.registry import Op, Sample


class LossOp(Op):
    """A function of `llmk.losses` as a record that the rule of accuracy can be asked of."""

    def argument_names(self) -> list[str]:
        return list(inspect.signature(self.overload).parameters)


def loss_op(loss: Callable[..., Any], reference: Callable[..., Tensor], differentiable: tuple[str, ...] = ()) -> Op:
    def value(*args: Any, **kwargs: Any) -> Tensor:
        return loss(*args, **kwargs)[0]

    value.__signature__ = inspect.signature(loss)  # type: ignore[attr-defined]
    return LossOp(
        name=loss.__name__,
        overload=value,
        reference=reference,
        samples=lambda device, dtype: iter(()),
        differentiable=("input", "linear_weight", "linear_bias", *differentiable),
    )


def token_scores(
    input: Tensor,
    linear_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    support: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Log-probabilities of all classes `[B, S, V]`, -inf outside of a token's support."""
    logits = F.linear(input, linear_weight, linear_bias)
    logits = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if support is not None:
        logits = logits.masked_fill(~members(support, logits.shape[-1]), float("-inf"))
    return (logits / temperature).log_softmax(-1)


def members(support: Tensor, V: int) -> Tensor:
    """The mask of the classes `[B, S, V]` that are in a token's support, all where it has no id."""
    classes = torch.arange(V, device=support.device)
    return (support.unsqueeze(-1) == classes).any(-2) | (support < 0).all(-1, keepdim=True)


def split(
    values: Tensor,
    target: Tensor,
    *,
    sequence_ids: Tensor | None = None,
    count: int | None = None,
    ignore_index: int = -100,
    support: Tensor | None = None,
    **_: Any,
) -> list[Tensor]:
    """The values of the tokens that count, for each sequence; a target outside of its support does not."""
    counts = target != ignore_index
    if support is not None:
        own = members(support, 1 + int(max(target.max(), support.max())))
        counts &= own.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if sequence_ids is None:
        return [row[kept] for row, kept in zip(values, counts, strict=True)]
    count = int(sequence_ids.max()) + 1 if count is None else count
    return [values[(sequence_ids == i) & counts] for i in range(count)]


def logps_of(input: Tensor, linear_weight: Tensor, target: Tensor, **kw: Any) -> list[Tensor]:
    """The log-probabilities of the tokens that count, for each sequence."""
    scores = token_scores(input, linear_weight, **kw)
    chosen = scores.gather(-1, target.long().clamp(0, scores.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return split(chosen, target, **kw)


def entropies_of(input: Tensor, linear_weight: Tensor, target: Tensor, **kw: Any) -> list[Tensor]:
    scores = token_scores(input, linear_weight, **kw)
    return split(-(scores.exp() * scores.masked_fill(scores == float("-inf"), 0.0)).sum(-1), target, **kw)


def pairs_of(sequences: list[Any], pair_order: str | None = None, **_: Any) -> list[tuple[Any, Any]]:
    half, by_turns = len(sequences) // 2, pair_order == "interleaved"
    chosen, rejected = (sequences[0::2], sequences[1::2]) if by_turns else (sequences[:half], sequences[half:])
    return list(zip(chosen, rejected, strict=True))


def average(x: Tensor) -> Tensor:
    return x.sum() / max(len(x), 1)


def mean(x: Tensor, num_items: float | None) -> Tensor:
    """The mean, or the sum over a number of items."""
    return x.mean() if num_items is None else x.sum() / num_items


def nll_of(tokens: list[tuple[Tensor, Tensor]], num_tokens: float | None) -> Tensor:
    """The negative log-likelihood of the chosen tokens."""
    total = -torch.cat([chosen for chosen, _ in tokens]).sum()
    return total / (max(sum(len(chosen) for chosen, _ in tokens), 1) if num_tokens is None else num_tokens)


def weighted_sum(x: Tensor, other: Tensor, ld_alpha: float | None) -> Tensor:
    """Sum with the tokens beyond the other's length weighted."""
    shared = min(len(x), len(other))
    return x[:shared].sum() + (1.0 if ld_alpha is None else ld_alpha) * x[shared:].sum()


def _exo_pair(c: Tensor, r: Tensor, beta: float, e: float, tau: float) -> Tensor:
    x = beta * (c - r)
    chosen = F.sigmoid(x) * (-F.softplus(-x) - math.log(1 - e))
    return chosen + F.sigmoid(-x) * (-F.softplus(x) - math.log(e))


def _discopop(c: Tensor, r: Tensor, beta: float, e: float, tau: float) -> Tensor:
    x = beta * (c - r)
    return F.softplus(-x) * (1 - F.sigmoid(x / tau)) + torch.exp(-x) * F.sigmoid(x / tau)


def _robust(c: Tensor, r: Tensor, beta: float, e: float, tau: float) -> Tensor:
    x = beta * (c - r)
    return ((1 - e) * F.softplus(-x) - e * F.softplus(x)) / (1 - 2 * e)


OF_A_MARGIN: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda c, r, beta, e, tau: F.softplus(-beta * (c - r)),
    "sigmoid_norm": lambda c, r, beta, e, tau: F.softplus(-beta * (c - r)),
    "hinge": lambda c, r, beta, e, tau: F.relu(1 - beta * (c - r)),
    "ipo": lambda c, r, beta, e, tau: (c - r - 0.5 / beta).square(),
    "exo_pair": _exo_pair,
    "robust": _robust,
    "discopop": _discopop,
}
"""The losses of two rewards, beta, a label smoothing and tau; those of log-ratios come behind them."""
OF_A_PAIR: dict[str, Callable[..., Tensor]] = OF_A_MARGIN | {
    "nca_pair": lambda c, r, beta, e, tau: F.softplus(-beta * c) + (F.softplus(beta * c) + F.softplus(beta * r)) / 2,
    "bco_pair": lambda c, r, beta, e, tau: F.softplus(-beta * c) + F.softplus(beta * r),
    "sppo_hard": lambda c, r, beta, e, tau: (c - 0.5 / beta).square() + (r + 0.5 / beta).square(),
    "apo_zero": lambda c, r, beta, e, tau: 1 - F.sigmoid(beta * c) + F.sigmoid(beta * r),
    "apo_down": lambda c, r, beta, e, tau: F.sigmoid(beta * c) + 1 - F.sigmoid(beta * (c - r)),
}
F_PRIMES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda t, a: t,
    "forward_kl": lambda t, a: 1 - torch.exp(-t),
    "js_divergence": lambda t, a: torch.log(2 * t.exp() / (1 + t.exp())),
    "alpha_divergence": lambda t, a: (t.exp() ** (a - 1) - 1) / (a - 1),
}
"""f'(u) of t = log(u), u = policy / reference, and of the alpha divergence's coefficient."""


def smoothed(x: Tensor, e: float) -> Tensor:
    return (1 - e) * F.softplus(-x) + e * F.softplus(x)


def orpo_of(c: Tensor, r: Tensor) -> Tensor:
    """-log sigmoid of the log-odds' difference, of averages of log-probabilities."""
    return F.softplus(-(c - torch.log(-torch.expm1(c)) - r + torch.log(-torch.expm1(r))))


def dpo_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    ref_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_linear_weight: Tensor | None = None,
    beta: float = 0.1,
    loss_type: str | list[str] = "sigmoid",
    loss_weights: list[float] | None = None,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    num_items_in_batch: float | None = None,
    num_chosen_tokens_in_batch: float | None = None,
    **kw: Any,
) -> Tensor:
    tokens = pairs_of(logps_of(input, linear_weight, target, **kw), **kw)
    if ref_logps is None:
        assert ref_input is not None
        assert ref_linear_weight is not None
        of_ref = {**kw, "linear_bias": None}
        ref_tokens = pairs_of(logps_of(ref_input.detach(), ref_linear_weight.detach(), target, **of_ref), **kw)
        ref = [(weighted_sum(c, r, ld_alpha), weighted_sum(r, c, ld_alpha)) for c, r in ref_tokens]
    else:
        ref = pairs_of(list(ref_logps), **kw)
    policy = [(weighted_sum(c, r, ld_alpha), weighted_sum(r, c, ld_alpha)) for c, r in tokens]
    e, tau = label_smoothing, discopop_tau
    t = torch.stack([torch.stack([torch.stack(p) - torch.stack(q)]) for p, q in zip(policy, ref, strict=True)])
    logratio_c, logratio_r = t[:, 0, 0], t[:, 0, 1]  # log(policy / reference)
    lengths = torch.tensor([[max(len(c), 1), max(len(r), 1)] for c, r in tokens], device=input.device).to(t.dtype)

    score_c, score_r = (F_PRIMES[f_divergence_type](t, f_alpha_divergence_coef) for t in (logratio_c, logratio_r))
    margins = torch.stack([c - r for c, r in policy])
    ref_margins = torch.stack([c - r for c, r in ref])
    nll = nll_of(tokens, num_chosen_tokens_in_batch)
    losses: dict[str, Callable[[], Tensor]] = {
        "aot": lambda: smoothed(beta * (margins.sort().values - ref_margins.sort().values), e),
        "aot_unpaired": lambda: smoothed(beta * (logratio_c.sort().values - logratio_r.sort().values), e),
        "sft": lambda: nll,
    }
    for name in OF_A_PAIR:
        c, r = (score_c, score_r) if name in OF_A_MARGIN else (logratio_c, logratio_r)
        if name in ("ipo", "sigmoid_norm"):
            c, r = c / lengths[:, 0], r / lengths[:, 1]
        losses[name] = functools.partial(OF_A_PAIR[name], c, r, beta, e, tau)
    types = [loss_type] if isinstance(loss_type, str) else loss_type
    weights = [1.0] * len(types) if loss_weights is None else loss_weights
    pair_weights: Tensor | float = 1.0
    if use_weighting:
        squares = split((2 * token_scores(input, linear_weight, **kw)).exp().sum(-1).log(), target, **kw)
        each = [
            average(c - a).exp() * average(r - b).exp()
            for (c, r), (a, b) in zip(tokens, pairs_of(squares, **kw), strict=True)
        ]
        pair_weights = torch.stack(each).detach()
    total = torch.zeros_like(nll)
    for w, name in zip(weights, types, strict=True):
        value = pair_weights * losses[name]()
        total = total + w * (value.mean() if name == "sft" else mean(value, num_items_in_batch))
    return total


def cpo_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
    num_items_in_batch: float | None = None,
    num_chosen_tokens_in_batch: float | None = None,
    **kw: Any,
) -> Tensor:
    tokens = pairs_of(logps_of(input, linear_weight, target, **kw), **kw)
    of = average if loss_type in ("ipo", "simpo") else torch.sum
    losses = []
    for chosen, rejected in tokens:
        c, r = of(chosen), of(rejected)
        if alpha:
            c, r = ((1 - p.exp() ** -alpha) / alpha for p in (c, r))
        x = beta * (c - r) - (simpo_gamma if loss_type == "simpo" else 0.0)
        if loss_type == "hinge":
            losses.append((1 - x).clamp(min=0))
        elif loss_type == "ipo":
            losses.append((c - r - 0.5 / beta).square())
        else:
            losses.append(smoothed(x, label_smoothing))
    nll = nll_of(tokens, num_chosen_tokens_in_batch)
    return mean(torch.stack(losses), num_items_in_batch) + cpo_alpha * nll


def simpo_reference(*args: Any, beta: float = 2.0, **kw: Any) -> Tensor:
    return cpo_reference(*args, beta=beta, cpo_alpha=0.0, loss_type="simpo", **kw)


def orpo_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    num_items_in_batch: float | None = None,
    num_chosen_tokens_in_batch: float | None = None,
    **kw: Any,
) -> Tensor:
    tokens = pairs_of(logps_of(input, linear_weight, target, **kw), **kw)
    ratios = []
    for chosen, rejected in tokens:
        ratios.append(orpo_of(average(chosen), average(rejected)))
    nll = nll_of(tokens, num_chosen_tokens_in_batch)
    return nll + beta * mean(torch.stack(ratios), num_items_in_batch)


def kto_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    label: Tensor,
    *,
    ref_logps: Tensor,
    kl: Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
    num_items_in_batch: float | None = None,
    **kw: Any,
) -> Tensor:
    losses = []
    z = 0.0 if kl is None or loss_type == "apo_zero_unpaired" else kl.detach()
    for logps, ref, good in zip(logps_of(input, linear_weight, target, **kw), ref_logps, label, strict=True):
        r = logps.sum() - ref
        value = F.sigmoid(beta * (r - z)) if good else F.sigmoid(beta * (z - r))
        losses.append((desirable_weight if good else undesirable_weight) * (1 - value))
    return mean(torch.stack(losses), num_items_in_batch)


def batch(
    lengths: list[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    H: int = 12,
    V: int = 37,
    ignore_index: int = -100,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, projection and targets of sequences of so many tokens that count, with others between them."""
    generator = torch.Generator("cpu").manual_seed(seed)
    B, S = len(lengths), max([2, *lengths]) + 2
    x, weight = (torch.randn(*shape, generator=generator, device="cpu") for shape in ((B, S, H), (V, H)))
    target = torch.randint(0, V, (B, S), generator=generator, device="cpu")
    for row, length in zip(target, lengths, strict=True):
        row[torch.randperm(S, generator=generator, device="cpu")[: S - length]] = ignore_index
    return x.to(device, dtype), weight.to(device, dtype), target.to(device)


def packed(sample: Sample, target: Tensor, names: tuple[str, ...], order: list[int] | None = None) -> Sample:
    """The same batch as `[1, T]`, rows in an order of one's own, without half of the tokens that do not count."""
    B, S = target.shape
    order = list(range(B)) if order is None else order
    keep = (target != -100) | (torch.arange(S, device=target.device) % 2 == 0)
    flat: Callable[[Tensor], Tensor] = lambda x: torch.cat([x[i][keep[i]] for i in order]).unsqueeze(0)  # noqa: E731
    args = [flat(a) if isinstance(a, Tensor) and a.shape[:2] == target.shape else a for a in sample.args]
    kwargs = {name: flat(v) if name in names else v for name, v in sample.kwargs.items()}
    ids = flat(torch.tensor(order).argsort().unsqueeze(1).expand(B, S).to(target.device))
    return Sample(tuple(args), {**kwargs, "sequence_ids": ids}, why=f"packed {sample.why}")
