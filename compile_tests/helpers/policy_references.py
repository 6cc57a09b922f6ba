"""The policy losses of `llmk.losses` from whole logits, a sequence at a time, in plain PyTorch."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.loss_references import entropies_of, logps_of, mean, split

WAYS = {name: "sequence_mean" for name in ("grpo", "sapo", "gmpo")} | {"luspo": "sequence_sum", "dr_grpo": "constant"}
WAYS |= {"dapo": "token", "cispo": "token", "vespo": "token", "bnpo": "own tokens"}
WAYS |= {name: "token" for name in ("gpg", "dppo_tv", "dppo_kl", "kl_cov")}


def of_largest_covariance(logps: list[Tensor], advantages: list[Tensor], fraction: float) -> list[Tensor]:
    """The tokens of each sequence that are among the batch's with the largest (log pi - mean) (A - mean)."""
    lengths, x = [len(logp) for logp in logps], torch.cat(logps).detach()
    A = torch.cat([torch.as_tensor(A).expand(n) for A, n in zip(advantages, lengths, strict=True)])
    top = ((x - x.mean()) * (A - A.mean())).topk(min(max(int(fraction * len(x)), 1), len(x))).indices
    return list(torch.zeros_like(x, dtype=torch.bool).index_fill(0, top, True).split(lengths))


def dual_clip(loss: Tensor, A: Tensor, c: float) -> Tensor:
    """The objective is max(min(r A, clip(r) A), c A), of a negative advantage."""
    return torch.where(torch.as_tensor(A) < 0, torch.minimum(loss, -c * A), loss) if c < math.inf else loss


def reduced(
    losses: list[Tensor],
    way: str,
    S: int,
    *,
    num_items_in_batch: float | None = None,
    max_completion_length: int | None = None,
    num_sequences_in_batch: float | None = None,
    count_empty_sequences: bool = True,
    **_: Any,
) -> Tensor:
    """One number of the losses of the tokens of each sequence."""
    if way in ("token", "own tokens"):
        items = None if way == "own tokens" else num_items_in_batch
        return torch.cat(losses).sum() / (max(sum(map(len, losses)), 1) if items is None else items)
    count = max(sum(1 for each in losses if count_empty_sequences or len(each)), 1)
    count = count if num_sequences_in_batch is None else num_sequences_in_batch
    divisors = {"sequence_sum": 1, "constant": max_completion_length or S}
    sums = [each.sum() / divisors.get(way, max(len(each), 1)) for each in losses]
    return torch.stack(sums).sum() / count


def grpo_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    loss_agg: str | None = None,
    importance_sampling_level: str = "token",
    importance_sampling_ratio: Tensor | None = None,
    entropy_coef: float = 0.0,
    use_bias_correction_kl: bool = True,
    kl_estimator: str = "k3",
    off_policy_mask_threshold: float | None = None,
    sampling_per_token_logps: Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    top_entropy_quantile: float = 1.0,
    max_log_ratio: float | None = None,
    clip_ratio_c: float = math.inf,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 1.0,
    **kw: Any,
) -> Tensor:
    most = math.inf if max_log_ratio is None else max_log_ratio
    logps = logps_of(input, linear_weight, target, **kw)
    entropies = entropies_of(input, linear_weight, target, **kw)
    least = torch.cat(entropies).detach().quantile(1 - top_entropy_quantile) if top_entropy_quantile < 1 else 0.0
    high_entropy = [(of >= least).detach() for of in entropies]

    def of(values: Tensor | None) -> list[Any]:
        if values is None:
            return [None] * len(logps)
        return split(values, target, **kw) if values.dim() == 2 and values.shape == target.shape else list(values)

    high = epsilon if epsilon_high is None else epsilon_high
    losses = []
    covaries = of_largest_covariance(logps, of(advantages), kl_cov_ratio)
    for logp, covary, acts, A, old, ref, correct, sampled in zip(
        logps,
        covaries,
        high_entropy,
        of(advantages),
        of(old_per_token_logps),
        of(ref_per_token_logps),
        of(importance_sampling_ratio),
        of(sampling_per_token_logps),
        strict=True,
    ):
        n = max(len(logp), 1)
        old = logp.detach() if old is None else old
        log_ratio = logp - old
        level = log_ratio if importance_sampling_level == "token" else (log_ratio.sum() / n).expand(log_ratio.shape)
        if loss_type == "gmpo":
            level = (log_ratio.sum() / n).expand(log_ratio.shape)
        ratio = level.clamp(-most, most).exp()
        if loss_type == "cispo":
            terms = -ratio.detach().clamp(max=high) * A * logp
        elif loss_type == "sapo":
            tau = torch.where(torch.as_tensor(A) > 0, sapo_temperature_pos, sapo_temperature_neg)
            terms = -4 / tau * F.sigmoid(tau * (ratio - 1)) * A
        elif loss_type == "vespo":
            log_w = log_ratio.clamp(-min(20, most), min(20, most)).sum()
            if correct is not None:
                log_w = log_w + correct.log().clamp(math.log(1e-8), 20).sum()
            log_w = log_w.clamp(math.log(1e-8), 20).detach()
            k, lam = (torch.where(torch.as_tensor(A) >= 0, x, y) for x, y in ((2.0, 3.0), (3.0, 2.0)))
            terms = -(lam.exp() * log_w.exp() ** k * torch.exp(-lam * log_w.exp())) * A * logp
        elif loss_type == "gmpo":  # the least of both, which A's sign decides
            sign = torch.sign(torch.as_tensor(A)).expand(log_ratio.shape)
            clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-epsilon, high))
            terms = -A * (clipped.sum() / n).clamp(-most, most).exp().expand(clipped.shape)
        elif loss_type in ("dppo_tv", "dppo_kl"):
            p, q, up = logp.detach().exp(), old.exp(), torch.as_tensor(A) > 0
            kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
            far = torch.where(up, high, epsilon) < ((p - q).abs() if loss_type == "dppo_tv" else kl)
            masked = far & torch.where(up, p > q, p < q)
            terms = torch.where(masked, 0.0, -ratio.detach().clamp(max=delta or math.inf) * A * logp)
        elif loss_type == "kl_cov":
            terms = -ratio * A + torch.where(covary, ppo_kl_coef * log_ratio.clamp(-most, most).abs(), 0.0)
        elif loss_type == "gpg":
            terms = -A * logp
        else:
            first = ratio if delta is None else ratio.clamp(max=delta)
            terms = dual_clip(-torch.minimum(first * A, ratio.clamp(1 - epsilon, 1 + high) * A), A, clip_ratio_c)
        if off_policy_mask_threshold is not None:
            drift = ((old if sampled is None else sampled) - logp.detach()).sum() / n
            terms = terms * ((torch.as_tensor(A) >= 0) | (drift <= off_policy_mask_threshold))
        terms = terms * acts
        if correct is not None and loss_type != "vespo":
            terms = terms * correct
        if beta:
            r = (ref - logp).clamp(-most, most)
            k2, k3 = r**2 / 2, r.exp() - r - 1
            kl = {"k1": -r, "k2": k2, "k3": k3, "k3+": k2 - k2.detach() + k3.detach()}[kl_estimator]
            terms = terms + beta * (kl * ratio if use_bias_correction_kl else kl)
        losses.append(terms)
    loss = reduced(losses, WAYS[loss_type] if loss_agg is None else loss_agg, target.shape[1], **kw)
    if entropy_coef:
        loss = loss - entropy_coef * torch.cat(entropies)[torch.cat(high_entropy)].sum() / sum(map(sum, high_entropy))
    return loss


def reinforce_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    loss_agg: str = "token",
    **kw: Any,
) -> Tensor:
    logps = logps_of(input, linear_weight, target, **kw)
    of = split(advantages, target, **kw) if advantages.dim() == 2 else list(advantages)
    return reduced([-A * logp for logp, A in zip(logps, of, strict=True)], loss_agg, target.shape[1], **kw)


def rloo_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    max_log_ratio: float | None = None,
    num_items_in_batch: float | None = None,
    **kw: Any,
) -> Tensor:
    most = math.inf if max_log_ratio is None else max_log_ratio
    high, losses = epsilon if epsilon_high is None else epsilon_high, []
    for logp, A, old in zip(logps_of(input, linear_weight, target, **kw), advantages, old_logps, strict=True):
        ratio = (logp.sum() - old).clamp(-most, most).exp()
        losses.append(-torch.minimum(ratio * A, ratio.clamp(1 - epsilon, 1 + high) * A))
    return mean(torch.stack(losses), num_items_in_batch)


def ppo_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old_per_token_logps: Tensor,
    cliprange: float = 0.2,
    max_log_ratio: float | None = None,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    cliprange_value: float = 0.2,
    vf_coef: float = 0.1,
    loss_agg: str = "token",
    clip_ratio_c: float = math.inf,
    **kw: Any,
) -> Tensor:
    most = math.inf if max_log_ratio is None else max_log_ratio
    policy, value = [], []
    for logp, A, old, v, v_old, R in zip(
        logps_of(input, linear_weight, target, **kw),
        *(split(x, target, **kw) for x in (advantages, old_per_token_logps, values, old_values, returns)),
        strict=True,
    ):
        ratio = (logp - old).clamp(-most, most).exp()
        clipped = -torch.minimum(ratio * A, ratio.clamp(1 - cliprange, 1 + cliprange) * A)
        policy.append(dual_clip(clipped, A, clip_ratio_c))
        held = torch.minimum(torch.maximum(v, v_old - cliprange_value), v_old + cliprange_value)
        value.append(torch.maximum((v - R) ** 2, (held - R) ** 2))
    policy_loss, value_loss = (reduced(each, loss_agg, target.shape[1], **kw) for each in (policy, value))
    return policy_loss + vf_coef / 2 * value_loss
