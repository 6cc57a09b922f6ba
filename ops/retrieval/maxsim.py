r"""MaxSim, the score of late interaction: each token of a query finds its nearest token of a document.

Sources: Khattab and Zaharia, "ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over
BERT", 2020, https://arxiv.org/abs/2004.12832; images as documents: Faysse et al., "ColPali: Efficient Document
Retrieval with Vision Language Models", 2024, https://arxiv.org/abs/2407.01449.

Forward, for a query of tokens q_t and a document of tokens d_s:

    best_t = max over s of q_t . d_s
    score = sum over t of best_t

Backward, given the gradient g of the score, w_t the token of the document that has the maximum, the first of several:

    dq_t = sum over documents of g * d_(w_t)
    dd_s = sum over queries and their t with w_t = s of g * q_t

What is kept is w, 4 bytes for each token of a query and each document: N * T * 4 bytes, where the similarities of all
tokens, which are never in memory (in float32 64 MiB of them), take N * T * L * 2 in bfloat16. `_maxima.py` has the
kernels.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.samples import normal_resized
from llmk.ops.retrieval._maxima import (
    KERNELS,
    PYTORCH,
    Implementation,
    Sequences,
    check_sequences,
    count_of,
    padded,
)
from llmk.registry import (
    BatchDependent,
    Cost,
    KernelOp,
    Sample,
    check_flag,
    check_same,
    or_no_gradient,
    public_op,
    replicate_only,
)


def maxsim_reference(
    query: Tensor, document: Tensor, *, query_mask: Tensor | None = None, document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None, document_offsets: Tensor | None = None, pairwise: bool = False,
) -> Tensor:  # fmt: skip
    query, in_query = padded(query, query_mask, query_offsets)
    document, in_document = padded(document, document_mask, document_offsets)
    own = (query.shape[0], -1) if pairwise else (1, document.shape[0])
    document, in_document = document.unflatten(0, own), in_document.unflatten(0, own)
    products = query.unsqueeze(1) @ document.mT  # [Q, N, Lq, Ld]
    products = products.masked_fill(~in_document.unsqueeze(2), float("-inf"))
    best = products.gather(-1, products.argmax(-1, keepdim=True)).squeeze(-1)
    best = best.masked_fill(~in_query.unsqueeze(1), 0)
    return best.sum(-1, dtype=torch.promote_types(best.dtype, torch.float32))


def _forward(
    impl: Implementation, query: Tensor, document: Tensor, query_mask: Tensor | None, document_mask: Tensor | None,
    query_offsets: Tensor | None, document_offsets: Tensor | None, pairwise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries = Sequences.of("query", query, query_mask, query_offsets)
    documents = Sequences.of("document", document, document_mask, document_offsets)
    best, winners = impl.maxima(queries, documents, pairwise=pairwise)
    return impl.sum_of_rows(best, queries), winners


def _backward(
    impl: Implementation, grad: Tensor, query: Tensor, document: Tensor, query_offsets: Tensor | None, winners: Tensor,
    need_query: bool, need_document: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries, documents = (x.reshape(-1, x.shape[-1]).contiguous() for x in (query, document))
    coef, S = _of_rows(grad, query, query_offsets), documents.shape[0]
    dq = impl.rows_gradient(coef, winners, documents).view(query.shape) if need_query else None
    dd = impl.tokens_gradient(coef, winners, queries, S).view(document.shape) if need_document else None
    return or_no_gradient(dq, grad), or_no_gradient(dd, grad)


def _of_rows(grad: Tensor, query: Tensor, query_offsets: Tensor | None) -> Tensor:
    """`[R, T]`: for each token of the queries the gradient `[Q, R]` of its query, 0 for tokens of none."""
    if query_offsets is None:
        return grad.t().unsqueeze(2).expand(-1, -1, query.shape[1]).flatten(1).contiguous()
    ends = Sequences.of("query", query, None, query_offsets).ends_in_range
    assert ends is not None
    tokens = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    owner = torch.searchsorted(ends, tokens, right=True)
    of_none = torch.zeros((1, grad.shape[1]), dtype=grad.dtype, device=grad.device)
    return torch.cat([grad, of_none]).index_select(0, owner).t().contiguous()


def _maxsim_fwd(
    query: Tensor, document: Tensor, query_mask: Tensor | None, document_mask: Tensor | None,
    query_offsets: Tensor | None, document_offsets: Tensor | None, pairwise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(KERNELS, query, document, query_mask, document_mask, query_offsets, document_offsets, pairwise)


def _maxsim_bwd(
    grad: Tensor, query: Tensor, document: Tensor, query_offsets: Tensor | None, winners: Tensor, need_query: bool,
    need_document: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _backward(KERNELS, grad, query, document, query_offsets, winners, need_query, need_document)


# A graph keeps each as one node: on a CPU it is a loop over documents.
maxsim_fwd = KernelOp(_maxsim_fwd, opaque=True)
maxsim_bwd = KernelOp(_maxsim_bwd, opaque=True)
maxsim_fwd.register_kernel("cpu")(partial(_forward, PYTORCH))
maxsim_bwd.register_kernel("cpu")(partial(_backward, PYTORCH))


@maxsim_fwd.register_fake
def _(query, document, query_offsets, document_offsets, pairwise):
    Q, N = count_of(query, query_offsets), count_of(document, document_offsets)
    R = N // Q if pairwise else N
    scores = query.new_empty((Q, R), dtype=torch.float32)
    return scores, query.new_empty((R, math.prod(query.shape[:-1])), dtype=torch.int32)


@maxsim_fwd.register_flop_formula
def _(query, document, query_mask, document_mask, query_offsets, document_offsets, pairwise, out_val=None) -> int:
    queries = count_of(query, query_offsets) if pairwise else 1
    return 2 * query.numel() * document.shape[:-1].numel() // queries


maxsim_fwd.register_sharding(replicate_only)
maxsim_fwd.register_backward(
    maxsim_bwd,
    outputs=("output", "winners"),
    depends_on=[["query", "document"]],
)


def maxsim_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def ends(*tokens: int) -> Tensor:
        return torch.tensor(tokens, device=device, dtype=torch.int32)

    def first(L: int, *counts: int) -> Tensor:
        return torch.arange(L, dtype=torch.int32, device=device) < ends(*counts).unsqueeze(1)

    yield Sample((randn(2, 4, 16), randn(4, 8, 16)), why="powers of two")
    yield Sample((randn(3, 5, 13), randn(7, 70, 13)), why="odd, several tiles of tokens")
    masks = {"query_mask": first(5, 5, 2), "document_mask": first(7, 7, 1, 4)}
    yield Sample((randn(2, 5, 24), randn(3, 7, 24)), masks, why="masks")
    masks = {"query_mask": first(3, 0, 3), "document_mask": first(6, 6, 5).flip(1)}
    yield Sample((randn(2, 3, 8), randn(2, 6, 8)), masks, why="a query without tokens, tokens after what is left out")
    yield Sample((randn(2, 3, 8), randn(6, 4, 8)), {"pairwise": True}, why="three documents of each query")
    packed = {"query_offsets": ends(3, 3, 7), "document_offsets": ends(5, 9)}
    yield Sample((randn(8, 12), randn(10, 12)), packed, why="packed, a query without tokens, tokens of none")
    packed = {"query_offsets": ends(3, 7), "document_offsets": ends(5, 9, 10, 12), "pairwise": True}
    yield Sample((randn(9, 12), randn(12, 12)), packed, why="packed pairs, tokens of none")
    yield Sample((randn(2, 3, 8), randn(9, 8)), {"document_offsets": ends(4, 9)}, why="documents packed, queries not")
    yield Sample((randn(2, 70, 136), randn(2, 66, 136)), why="long rows, several tiles of both")
    yield Sample((randn(0, 4, 8), randn(2, 4, 8)), why="no queries")
    yield Sample((randn(2, 4, 8), randn(0, 4, 8)), why="no documents")
    yield Sample((randn(1, 1, 1), randn(1, 1, 1)), why="one of everything")
    yield Sample((randn(8, 3, 4).permute(2, 1, 0), randn(3, 10, 8)[:, ::2]), why="strided")
    few = randn(2, 1, 8)
    yield Sample((few, few.expand(2, 3, 8).contiguous()), why="ties: equal tokens, the first one")


def maxsim_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for Q, Lq, N, Ld, D in [(128, 32, 128, 300, 128), (32, 24, 32, 1030, 128)]:
        query, document = (
            torch.nn.functional.normalize(torch.randn(*shape, D, device=device, dtype=dtype), dim=-1)
            for shape in ((Q, Lq), (N, Ld))
        )
        yield Sample((query, document), why=f"{Q} queries of {Lq}, {N} documents of {Ld}, {D} features")


def maxsim_cost(
    query: Tensor, document: Tensor, *, query_offsets: Tensor | None = None, document_offsets: Tensor | None = None,
    pairwise: bool = False, **masks: Tensor | None,
) -> Cost:  # fmt: skip
    """Winners are written and read beside the tensors; only the forward pass has a product."""
    Q, N = count_of(query, query_offsets), count_of(document, document_offsets)
    tensors = (query.numel() + document.numel()) * query.element_size()
    scores = 4 * (N if pairwise else Q * N)
    pairs = query.shape[:-1].numel() * (N // Q if pairwise and Q else N)
    flops = 2 * query.numel() * document.shape[:-1].numel() // (Q if pairwise and Q else 1)
    full = 3 * tensors + 2 * scores + 8 * pairs
    return Cost(tensors + scores, full, flops, flops + 4 * pairs * query.shape[-1])


@public_op(
    reference=maxsim_reference,
    differentiable=("query", "document"),
    kernel_ops=(maxsim_fwd, maxsim_bwd),
    samples=maxsim_samples,
    resized=normal_resized(lambda rows: ((rows, 3, 16), (5, 7, 16))),
    workloads=maxsim_workloads,
    cost=maxsim_cost,
    batch_dependent=BatchDependent.float32_products("output 0"),
)
def maxsim(
    query: Tensor,
    document: Tensor,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    pairwise: bool = False,
) -> Tensor:
    """The sum over a query's tokens of their largest product with a token of a document, for queries and documents.

    Embeddings are used as they are: for cosine similarities normalize them first. The similarities of tokens are never
    in memory, in float32 and in batch 64 MiB of them at a time. Each maximum passes its gradient to the token that has
    it, the first of several.

    The maximum over a document without tokens is -inf, and so is its score with every query that has tokens. A query
    without tokens has score 0 with every document. Neither has a gradient.

    Args:
        query: `[Q, Lq, D]`, or packed `[T, D]` with `query_offsets`; float32, float16 or bfloat16, any strides.
        document: `[N, Ld, D]`, or packed with `document_offsets`, in the dtype of `query`.
        query_mask: Which tokens count `[Q, Lq]`, bool; None is all. Not with `query_offsets`.
        document_mask: `[N, Ld]`, as `query_mask`. A token that does not count is never the nearest; PyLate gives it a
            similarity of 0, which is the largest where all others are negative.
        query_offsets: The end of each query's tokens `[Q]`, int32, none before the last. Tokens after the last end
            belong to none.
        document_offsets: `[N]`, as `query_offsets`.
        pairwise: Score each query with its own documents alone, of which all have equally many: those of query i are
            `i * N / Q` and the following.

    Returns:
        `[Q, N]`, where `pairwise` `[Q, N / Q]`; float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, or both a mask and offsets are given.
        IndexError: On the CPU, offsets are not such ends. On a GPU they are made so.

    Sources: Khattab and Zaharia, 2020, https://arxiv.org/abs/2004.12832; Faysse et al., 2024,
    https://arxiv.org/abs/2407.01449.
    """
    check_sequences("query", query, query_mask, query_offsets)
    check_sequences("document", document, document_mask, document_offsets)
    check_same("document", document, "query", query, dtype=True)
    if document.shape[-1] != query.shape[-1]:
        raise ValueError(f"document: expected {query.shape[-1]} features as query has, got {document.shape[-1]}")
    check_flag("pairwise", pairwise)
    Q, N = count_of(query, query_offsets), count_of(document, document_offsets)
    if pairwise and (Q == 0 or N == 0 or N % Q):
        raise ValueError(f"pairwise: expected as many documents for each query, got {N} documents of {Q} queries")
    scores, _ = maxsim_fwd(query, document, query_mask, document_mask, query_offsets, document_offsets, pairwise)
    return scores
