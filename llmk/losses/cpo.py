"""Losses of pairs without a reference model: CPO, SimPO and ORPO."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._batch import Batch, Sequences, VocabGroup, check_between
from llmk.losses._pairs import PairItems, chosen_nll, chosen_nll_weight, pair_weights, reward_metrics
from llmk.ops.linear_loss.objectives.preference import LOSSES, LossOptions, log_odds
from llmk.registry import check_finite, check_option, check_positive, from_arguments, with_arguments


@with_arguments
def cpo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    beta: float = 0.1, cpo_alpha: float = 1.0, label_smoothing: float = 0.0, loss_type: str = "sigmoid",
    num_items_in_batch: Tensor | float | None = None, num_chosen_tokens_in_batch: Tensor | float | None = None,
    simpo_gamma: float = 0.5, alpha: float = 0.0, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = True,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None, num_sequences: int | None = None,
    pair_order: str | None = None, group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Contrastive preference optimization: DPO without a reference, and the likelihood of the chosen completions.

        mean over pairs of -log sigmoid(beta * (log pi(chosen) - log pi(rejected))) + cpo_alpha * nll

    `nll` is the mean negative log-likelihood over the chosen tokens, 0 over none.

    Args:
        input, linear_weight, target: As in `dpo`.
        beta: The scale of the margin; positive.
        cpo_alpha: Coefficient of the negative log-likelihood.
        label_smoothing: Assumed fraction of pairs with flipped labels, used by "sigmoid" and "simpo"; 0 to 1.
        loss_type: "sigmoid"; "hinge", max(0, 1 - beta * margin); "ipo", (margin - 1 / (2 beta))**2; or "simpo", which
            subtracts `simpo_gamma` from the margin. "ipo" and "simpo" take means over a completion's tokens, not sums.
        simpo_gamma: Target reward margin of "simpo", after the scale by beta.
        alpha: Parameter of AlphaPO: the reward of log-probability p is (1 - exp(-alpha * p)) / alpha; 0 is p itself.
        num_items_in_batch: As in `dpo`.
        num_chosen_tokens_in_batch: The denominator of `nll`, as in `dpo`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        logits_dtype, sequence_ids, num_sequences, pair_order, group, context_group, vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, and metrics under TRL's names.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products or four, as `dpo`; four with `alpha`.

    Sources: Xu et al., 2024, https://arxiv.org/abs/2401.08417; SimPO: Meng et al., 2024,
    https://arxiv.org/abs/2405.14734; AlphaPO: Gupta et al., 2025, https://arxiv.org/abs/2501.03884. Reference
    implementation: `trl.experimental.cpo.CPOTrainer`.
    """
    check_positive("beta", beta)
    check_finite("cpo_alpha", cpo_alpha)
    check_finite("simpo_gamma", simpo_gamma)
    check_finite("alpha", alpha)
    check_between("label_smoothing", label_smoothing, 0.0, 1.0)
    check_option("loss_type", loss_type, _TYPES)
    items = PairItems.of(arguments)
    batch = Batch.of(arguments)
    options = from_arguments(LossOptions, arguments, simpo_gamma=simpo_gamma if loss_type == "simpo" else 0.0)
    name, sequences = "cpo" if loss_type == "sigmoid" else loss_type, batch.sequences

    def reward(logps: Tensor) -> Tensor:
        return logps if alpha == 0.0 else -torch.expm1(-alpha * logps) / alpha

    loss, token_logps = _pairs_and_nll(batch, name, options, items, (1.0, cpo_alpha), reward if alpha != 0.0 else None)
    logps = _sequence_logps(token_logps, sequences, name)
    chosen, rejected = sequences.halves(reward(logps))
    nll = chosen_nll(token_logps, sequences, items)
    return loss, {**reward_metrics(beta * chosen, beta * rejected, logps, sequences), "nll_loss": nll.detach()}


_TYPES = ("sigmoid", "hinge", "ipo", "simpo")


def _pairs_and_nll(
    batch: Batch, name: str, options: LossOptions, items: PairItems, coefs: tuple[float, float],
    reward: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean over pairs and the NLL, times their coefficients, and the tokens' log-probabilities.

    A reward is a function of a sequence's log-probability, which is the reward itself if it is None.
    """
    sequences, (coef, nll_coef) = batch.sequences, coefs
    if reward is None and batch.supports_groups:
        loss, token_logps, _ = batch.preference(
            nll_weight=chosen_nll_weight(sequences, nll_coef, items),
            group_weight=pair_weights(sequences, [coef], items)[0],
            loss_type=name,
            **options._asdict(),
        )
        return loss, token_logps
    token_logps, _ = batch.logprobs()
    rewards = _sequence_logps(token_logps, sequences, name)
    losses = LOSSES[name].value(options, *sequences.halves(rewards if reward is None else reward(rewards)))
    mean = sequences.mean(losses, items.num_items_in_batch)
    return sequences.checked(coef * mean + nll_coef * chosen_nll(token_logps, sequences, items)), token_logps


def _sequence_logps(token_logps: Tensor, sequences: Sequences, name: str) -> Tensor:
    return sequences.token_means(token_logps) if LOSSES[name].length_normalized else sequences.sum(token_logps)


@with_arguments
def simpo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    num_items_in_batch: Tensor | float | None = None,
    beta: float = 2.0, simpo_gamma: float = 0.5, label_smoothing: float = 0.0, linear_bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = True, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None,
    num_sequences: int | None = None, pair_order: str | None = None, group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Simple preference optimization, with means over a completion's tokens and a margin:

        mean over pairs of -log sigmoid(beta * (mean log pi(chosen) - mean log pi(rejected)) - simpo_gamma)

    Args:
        input, linear_weight, target: As in `dpo`.
        beta: The scale of the margin; positive.
        simpo_gamma: Target reward margin.
        label_smoothing: Assumed fraction of pairs with flipped labels; 0 to 1.
        num_items_in_batch: As in `dpo`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        logits_dtype, sequence_ids, num_sequences, pair_order, group, context_group, vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, and the metrics of `cpo`. The mean over an empty completion is 0.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products or four, as `dpo`.

    Sources: Meng et al., 2024, https://arxiv.org/abs/2405.14734, equation 6. Reference implementation:
    `trl.experimental.cpo.CPOTrainer` with `loss_type="simpo"` and `cpo_alpha=0`.
    """
    return cpo(**arguments, cpo_alpha=0.0, loss_type="simpo")


@with_arguments
def orpo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    num_items_in_batch: Tensor | float | None = None, num_chosen_tokens_in_batch: Tensor | float | None = None,
    beta: float = 0.1, linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0,
    softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = True, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
    sequence_ids: Tensor | None = None, num_sequences: int | None = None, pair_order: str | None = None,
    group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Odds ratio preference optimization: supervised training on the chosen, and odds against the rejected.

        nll - beta * mean over pairs of log sigmoid(log odds(chosen) / odds(rejected)),  odds = p / (1 - p)

    with log p the mean log-probability over a completion's tokens and `nll` the mean over the chosen tokens.

    Args:
        input, linear_weight, target: As in `dpo`. TRL's `nll` has the prompt in it; here it has what `target` has.
        beta: Weight of the odds ratio loss; positive.
        num_items_in_batch: As in `dpo`.
        num_chosen_tokens_in_batch: The denominator of `nll`, as in `dpo`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        logits_dtype, sequence_ids, num_sequences, pair_order, group, context_group, vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, and metrics under TRL's names. A completion of probability 1, an empty one among
        them, is taken to fall short of it by a unit of float32, and has no gradient through its odds.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products or four, as `dpo`.

    Sources: Hong et al., 2024, https://arxiv.org/abs/2403.07691, equations 4 to 7. Reference implementation:
    `trl.experimental.orpo.ORPOTrainer`.
    """
    check_positive("beta", beta)
    items = PairItems.of(arguments)
    batch = Batch.of(arguments)
    sequences = batch.sequences
    loss, token_logps = _pairs_and_nll(batch, "orpo", LossOptions(), items, (beta, 1.0))
    logps = sequences.token_means(token_logps.detach())
    chosen, rejected = sequences.halves(logps)
    odds = log_odds(chosen, rejected)
    metrics = {
        **reward_metrics(beta * chosen, beta * rejected, logps, sequences),
        "nll_loss": chosen_nll(token_logps.detach(), sequences, items),
        "log_odds_ratio": sequences.mean(F.logsigmoid(odds)),
        "log_odds_chosen": sequences.mean(odds),
    }
    return loss, metrics
