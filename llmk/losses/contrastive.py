"""The contrastive loss of embeddings, with a temperature that may be learned and over the ranks of a group."""

from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import KINDS, NUMBERS, check_is_tensor, check_tensor
from llmk.losses._ranks import make_ranks
from llmk.ops.linear_loss.info_nce import info_nce as info_nce_op
from llmk.registry import check_same


def info_nce(
    query: Tensor, key: Tensor, *, negatives: Tensor | None = None, temperature: Tensor | float = 1.0,
    symmetric: bool = False, query_ids: Tensor | None = None, key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None, chunk_size: int = 0, group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """InfoNCE of embeddings: the mean over queries of -log of the probability of a query's own key among all keys.

    Args:
        query, key: Embeddings `[N, H]`: row i of `key` is the own key of query i. They are used as they are: for
            cosine similarities normalize them first.
        negatives: `[K, H]`, more negatives of every query.
        temperature: Divides the similarities, a positive number, or a scalar tensor, which gets a gradient: CLIP's is
            `(-logit_scale).exp()`.
        symmetric: Take the mean of both directions, as CLIP does.
        query_ids, key_ids, negative_ids: As in `llmk.functional.info_nce`: equal ids are no negatives.
        chunk_size: As in `llmk.functional.fused_linear_ce`, in queries.
        group: A `torch.distributed.ProcessGroup`, its name or a DeviceMesh of one dimension, whose ranks' keys and
            negatives are those of every query. Each rank has equally many rows. The loss is that of all ranks' queries,
            the same on each, and so are its gradients: a parameter's is the sum over the ranks. Where DDP or FSDP takes
            their mean, multiply the loss by the number of ranks. None is one rank.

    Returns:
        The loss, a float32 scalar, and the metric "temperature".

    Raises:
        TypeError: An argument is not a tensor, or a dtype or the group does not fit.
        ValueError: A shape or an option does not fit.

    Four products of queries and keys, for one direction or both.

    Sources: van den Oord et al., 2018, https://arxiv.org/abs/1807.03748; both directions: Radford et al., 2021,
    https://arxiv.org/abs/2103.00020.
    """
    check_is_tensor("query", query)
    check_is_tensor("key", key)
    (group_name,) = make_ranks(group).sequences or ("",)
    number, scale = (1.0, _reciprocal(temperature, query)) if isinstance(temperature, Tensor) else (temperature, None)
    loss = info_nce_op(
        query, key, negatives, scale=scale, temperature=number, symmetric=symmetric, query_ids=query_ids,
        key_ids=key_ids, negative_ids=negative_ids, chunk_size=chunk_size, group_name=group_name,
    )  # fmt: skip
    shown = torch.as_tensor(temperature, dtype=torch.float32, device=query.device).detach()
    return loss, {"temperature": shown.reshape(())}


def _reciprocal(temperature: Tensor, query: Tensor) -> Tensor:
    """Return what similarities are multiplied with, in float32."""
    check_tensor("temperature", temperature, NUMBERS, KINDS[NUMBERS])
    if tuple(temperature.shape) not in ((), (1,)):
        raise ValueError(f"temperature: expected one number, shape () or (1,), got {tuple(temperature.shape)}")
    check_same("temperature", temperature, "query", query)
    return temperature.float().reciprocal()
