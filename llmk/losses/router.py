"""Losses of a mixture's router, from the sums of `llmk.functional.router_topk_sums`."""

from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import NUMBERS, check_tensor
from llmk.losses._ranks import Ranks, make_ranks, sum_over
from llmk.registry import check_option, check_shape, check_size

MEANS = ("batch", "sequence")


def router_balance(
    sums: Tensor, counts: Tensor, top_k: int, *, by: str = "batch", group: Any = None, context_group: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The auxiliary loss that keeps the experts of a mixture equally busy.

    With P_e the mean over tokens of the probability of expert e, and f_e the share of the tokens that chose it,

        E * sum over e of f_e * P_e              by "batch": transformers' `load_balancing_loss_func`
        E / K * sum over e of f_e * P_e          by "sequence": DeepSeek-V3's, the mean over sequences

    By "batch" the tokens are those of everything before the last axis. For one loss of all layers, as transformers has
    it, stack the sums of the layers, and the counts; for one of each layer, add up the losses.

    Args:
        sums: The second result of `router_topk_sums`, `[..., E]`. Of sequences without tokens 0.
        counts: The last one, `[..., E]`.
        top_k: K, how many experts a token chose.
        by: "batch" or "sequence".
        group: A `torch.distributed.ProcessGroup`, its name or a DeviceMesh of one dimension, whose ranks have other
            sequences of the batch. The loss is that of all ranks, the same on each; a parameter's gradient is the sum
            over the ranks. Where DDP or FSDP takes their mean, multiply the loss by the number of ranks.
        context_group: The same, of ranks that have other tokens of the same sequences.

    Returns:
        The loss, a float32 scalar, and the metric "load/max": the tokens of the busiest expert, times E / K, as a share
        of all; 1 where all are equally busy.

    Raises:
        TypeError: An argument is not a tensor, or a dtype or the group does not fit.
        ValueError: A shape or an option does not fit.

    Sources: Fedus et al., 2021, https://arxiv.org/abs/2101.03961; DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437.
    """
    check_tensor("sums", sums, NUMBERS, "numbers")
    _check_counts(counts)
    check_shape("counts", counts, sums.shape, "that of sums")
    check_option("by", by, MEANS)
    check_size("top_k", top_k, most=sums.shape[-1])
    ranks, E = make_ranks(group, context_group), sums.shape[-1]
    probabilities, chosen = (sum_over(ranks.context, x.float().reshape(-1, E)) for x in (sums, counts))
    total = sum_over(ranks.sequences, chosen.sum(0))
    if by == "batch":
        probabilities, chosen = sum_over(ranks.sequences, probabilities.sum(0)), total
    tokens = (chosen.sum(-1, keepdim=True) / top_k).clamp(min=1)
    terms = E * (chosen / tokens * (probabilities / tokens)).sum(-1)
    loss = terms if by == "batch" else _mean_of_sequences(terms, ranks) / top_k
    return loss, {"load/max": (total.max() * E / total.sum().clamp(min=1)).detach()}


def router_z(
    squares: Tensor, counts: Tensor, top_k: int, *, group: Any = None, context_group: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over tokens of the square of the log-sum-exp of the router's logits, which keeps them small.

    Args:
        squares: The third result of `router_topk_sums`, `[...]`.
        counts: The last one, `[..., E]`, of which the tokens are counted.
        top_k: How many experts a token chose.
        group, context_group: As in `router_balance`.

    Returns:
        The loss, a float32 scalar, and the metric "logsumexp/rms": its square root.

    Raises:
        TypeError: An argument is not a tensor, or a dtype or the group does not fit.
        ValueError: A shape or an option does not fit.

    Source: Zoph et al., 2022, https://arxiv.org/abs/2202.08906.
    """
    check_tensor("squares", squares, NUMBERS, "numbers")
    _check_counts(counts)
    check_shape("squares", squares, counts.shape[:-1], "that of counts without its last axis")
    check_size("top_k", top_k, most=counts.shape[-1])
    ranks = make_ranks(group, context_group)
    tokens = (sum_over(ranks.tokens, counts.sum().float()) / top_k).clamp(min=1)
    loss = sum_over(ranks.tokens, squares.float().sum()) / tokens
    return loss, {"logsumexp/rms": loss.detach().sqrt()}


def _check_counts(counts: Any) -> None:
    check_tensor("counts", counts, (torch.int64,), "numbers of tokens")
    if counts.dim() == 0 or counts.shape[-1] == 0:
        raise ValueError(f"counts: expected shape [..., E] with at least one expert, got {tuple(counts.shape)}")


def _mean_of_sequences(terms: Tensor, ranks: Ranks) -> Tensor:
    sequences = torch.full((), len(terms), dtype=torch.float32, device=terms.device)
    return sum_over(ranks.sequences, terms.sum()) / sum_over(ranks.sequences, sequences).clamp(min=1)
