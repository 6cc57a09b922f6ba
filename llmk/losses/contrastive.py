"""The contrastive losses of embeddings, of a text or of each of its tokens, with a temperature that may be learned.

Similarities of embeddings are made and read a block at a time, because there is one for each two rows. Late interaction
has one score for each query and document, which took many products to make: they are all there, and made once.
"""

from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import KINDS, NUMBERS, check_is_tensor, check_tensor
from llmk.losses._ranks import make_ranks
from llmk.ops.linear_loss.info_nce import info_nce as info_nce_op
from llmk.ops.loss.cross_entropy import cross_entropy
from llmk.ops.retrieval.maxsim import maxsim
from llmk.registry import check_flag, check_positive, check_same


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
        group: The ranks whose keys and negatives are those of every query: a `torch.distributed.ProcessGroup`, its name
            or a DeviceMesh of one dimension, as the group of `llmk.functional.info_nce`. None is one rank.

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
    number, scale, shown = _divisor(temperature, query)
    loss = info_nce_op(
        query, key, negatives, scale=scale, temperature=number, symmetric=symmetric, query_ids=query_ids,
        key_ids=key_ids, negative_ids=negative_ids, chunk_size=chunk_size, group_name=group_name,
    )  # fmt: skip
    return loss, {"temperature": shown}


def late_interaction(
    query: Tensor, document: Tensor, *, query_mask: Tensor | None = None, document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None, document_offsets: Tensor | None = None, temperature: Tensor | float = 1.0,
    symmetric: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """InfoNCE of late interaction: the cross entropy of the scores that `llmk.functional.maxsim` gives a query's
    documents, with its own as target.

    Args:
        query: Embeddings of tokens `[Q, Lq, D]`, or packed with `query_offsets`. They are used as they are: for cosine
            similarities normalize them first.
        document: `[N, Ld, D]` with N at least Q, or packed with `document_offsets`: document i is query i's own. The
            others, also those after the first Q, are its negatives.
        query_mask, document_mask, query_offsets, document_offsets: As in `llmk.functional.maxsim`.
        temperature: Divides the scores, a positive number, or a scalar tensor, which gets a gradient.
        symmetric: Take the mean of both directions, where a document's negatives are the other queries.

    Returns:
        The loss, a float32 scalar, and the metric "temperature".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    A document without tokens has score -inf: it is no negative, and as a query's own makes the loss infinite. A query
    without tokens has the same score with every document, and passes no gradient to its tokens.

    Sources: Khattab and Zaharia, 2020, https://arxiv.org/abs/2004.12832; van den Oord et al., 2018,
    https://arxiv.org/abs/1807.03748.
    """
    check_is_tensor("query", query)
    check_is_tensor("document", document)
    check_flag("symmetric", symmetric)
    scores = maxsim(
        query, document, query_mask=query_mask, document_mask=document_mask, query_offsets=query_offsets,
        document_offsets=document_offsets,
    )  # fmt: skip
    Q, N = scores.shape
    if N < Q:
        raise ValueError(f"document: expected at least {Q}, one for each query, got {N}")
    number, scale, shown = _divisor(temperature, query)
    scores = scores / number if scale is None else scores * scale
    own = torch.arange(Q, dtype=torch.int64, device=query.device)
    loss = cross_entropy(scores, own)
    if symmetric:
        loss = (loss + cross_entropy(scores[:, :Q].t(), own)) / 2
    return loss, {"temperature": shown}


def _divisor(temperature: Tensor | float, query: Tensor) -> tuple[float, Tensor | None, Tensor]:
    """Return what similarities are divided by, what they are multiplied with, and the temperature as a metric."""
    scale = _reciprocal(temperature, query) if isinstance(temperature, Tensor) else None
    if scale is None:
        check_positive("temperature", temperature)
    shown = torch.as_tensor(temperature, dtype=torch.float32, device=query.device).detach().reshape(())
    return 1.0 if isinstance(temperature, Tensor) else temperature, scale, shown


def _reciprocal(temperature: Tensor, query: Tensor) -> Tensor:
    """Return what similarities are multiplied with, in float32."""
    check_tensor("temperature", temperature, NUMBERS, KINDS[NUMBERS])
    if tuple(temperature.shape) not in ((), (1,)):
        raise ValueError(f"temperature: expected one number, shape () or (1,), got {tuple(temperature.shape)}")
    check_same("temperature", temperature, "query", query)
    return temperature.float().reciprocal()
