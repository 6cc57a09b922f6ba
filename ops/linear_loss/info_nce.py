r"""A contrastive loss: of all keys of a batch each query is to find its own, and with `symmetric` each key its query.

Sources: van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018,
https://arxiv.org/abs/1807.03748; both directions: Radford et al., "Learning Transferable Visual Models From Natural
Language Supervision", 2021, https://arxiv.org/abs/2103.00020, figure 3.

Forward, for queries q [N, H] and keys k [M, H], of which the first N are the queries' own, the others negatives:

    y_ij = scale / temperature * q_i . k_j        -inf where key j, not query i's own, has query i's id
    loss_i = logsumexp_j(y_ij) - y_ii             with `symmetric` the mean of it and logsumexp_j(y_ji) - y_ii

The products are made a block of queries at a time and read once, for statistics of rows and of columns: those of the
columns, a maximum and a sum for each key, are merged block after block. On a GPU the kernel that reads products of
16-bit embeddings makes them itself, and no memory holds them.

Backward, given the gradient g_i of loss_i, with P the softmax of each row and C that of each column:

    dy_ij = g_i * (P_ij - [i = j])                                              one direction
    dy_ij = (g_i * (P_ij - [i = j]) + g_j * (C_ij - [i = j])) / 2               both, g_j = 0 for j >= N
    dq = scale / temperature * dy @ k          dk = scale / temperature * dy^T @ q
    dscale = sum(dy * (q @ k^T)) / temperature

in which the products are made again: four in all, for one direction or both.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, linear_cost, linear_reference, resized, rows_plan, workloads
from llmk.ops.linear_loss.chunked.plan import FREE_MEMORY
from llmk.ops.linear_loss.drivers.contrastive import ContrastiveCall, info_nce_bwd, info_nce_fwd, stores_products
from llmk.registry import Cost, Sample, public_op


def info_nce_reference(
    query: Tensor, key: Tensor, negatives: Tensor | None = None, *, scale: Tensor | None = None,
    temperature: float = 1.0, symmetric: bool = False, query_ids: Tensor | None = None,
    key_ids: Tensor | None = None, negative_ids: Tensor | None = None, reduction: str = "mean", chunk_size: int = 0,
    group_name: str = "",
) -> Tensor:  # fmt: skip
    N = query.shape[0]
    logits = linear_reference(query, key if negatives is None else torch.cat((key, negatives)), None)
    logits = (logits if scale is None else logits * scale) / temperature
    if query_ids is not None and key_ids is not None:
        ids = key_ids if negative_ids is None else torch.cat((key_ids, negative_ids))
        own = torch.ones_like(logits, dtype=torch.bool).tril().triu()
        logits = logits.masked_fill((query_ids.unsqueeze(1) == ids) & ~own, float("-inf"))
    loss = -logits.log_softmax(1).diagonal()
    if symmetric:
        loss = (loss - logits[:, :N].log_softmax(0).diagonal()) / 2
    return {"none": loss, "sum": loss.sum(), "mean": loss.mean()}[reduction]


def info_nce_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn

    def ids(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device, dtype=torch.int64)

    def scale(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, device=device, dtype=torch.float32)

    both = {"symmetric": True}
    yield Sample((randn(8, 16), randn(8, 16)), why="powers of two")
    yield Sample((randn(7, 13), randn(7, 13)), {"chunk_size": 3, **both}, why="three chunks, both directions")
    yield Sample((randn(5, 12), randn(5, 12), randn(9, 12)), {"temperature": 0.5, **both}, why="negatives, both ways")
    given = {"query_ids": ids(3, 1, 3, 2, 1), "key_ids": ids(3, 1, 3, 2, 1).int(), "negative_ids": ids(2, 7)}
    everything = {"scale": scale(0.7), "temperature": 0.5, "chunk_size": 2, **given, **both}
    yield Sample((randn(5, 12), randn(5, 12), randn(2, 12)), everything, why="every option")
    yield Sample((randn(5, 12), randn(5, 12), randn(2, 12)), {"reduction": "none", **given}, why="a loss each, masked")
    yield Sample((randn(6, 8), randn(6, 8)), {"reduction": "none", "scale": scale(-0.5, 1), **both}, why="a loss each")
    yield Sample((randn(4, 8), randn(4, 8)), {"reduction": "sum", "scale": scale(1.5)}, why="a sum, a learned scale")
    alike = {"query_ids": ids(1, 1, 1), "key_ids": ids(1, 1, 1)}
    yield Sample((randn(3, 8), randn(3, 8)), {**alike, **both}, why="all masked")
    yield Sample((randn(1, 8), randn(1, 8)), both, why="one query")
    yield Sample((randn(1, 1), randn(1, 1), randn(3, 1)), why="one feature")
    yield Sample((randn(0, 8), randn(0, 8)), {"reduction": "sum", **both}, why="no queries")
    yield Sample((randn(0, 8), randn(0, 8), randn(2, 8)), both, why="no queries, negatives: the mean is NaN")
    yield Sample((randn(12, 5).t(), randn(12, 5).t()), both, why="everything strided")
    yield Sample((randn(65, 8), randn(65, 8), randn(66, 8)), both, why="several tiles")
    more = {"chunk_size": 140, "scale": scale(0.7), "query_ids": ids(*range(150)), "key_ids": ids(*range(0, 300, 2))}
    yield Sample((randn(150, 80), randn(150, 80)), {**more, **both}, why="blocks of features, parts of tiles, masked")
    near = torch.nn.functional.normalize(randn(6, 16), dim=-1)
    yield Sample((near, near + randn(6, 16) / 8), {"scale": scale(20.0), **both}, why="peaked: pairs are the nearest")


def info_nce_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of N queries and H features, the sizes, in both directions."""
    N, H = sizes
    make = Make(device, dtype)
    query, key = (torch.nn.functional.normalize(make.randn(N, H), dim=-1) for _ in range(2))
    scale = torch.full((), 20.0, device=device, dtype=torch.float32)
    return Sample((query, key), {"scale": scale, "symmetric": True}, why=f"{N}x{H}, both directions")


def info_nce_cost(query: Tensor, key: Tensor, negatives: Tensor | None = None, **options: Any) -> Cost:
    return linear_cost(query, _keys(key, negatives), reads=3, products=4)


def info_nce_plan(
    query: Tensor, key: Tensor, negatives: Tensor | None = None, *, chunk_size: int = 0, **options: Any
) -> str:
    stored = query.is_cpu or stores_products(query)
    return rows_plan(query, _keys(key, negatives), chunk_size=chunk_size, matrices=int(stored), free=FREE_MEMORY)


def _keys(key: Tensor, negatives: Tensor | None) -> Tensor:
    return key if negatives is None else torch.cat((key, negatives))


@public_op(
    reference=info_nce_reference,
    differentiable=("query", "key", "negatives", "scale"),
    kernel_ops=(info_nce_fwd.op, info_nce_bwd.op),
    samples=info_nce_samples,
    resized=resized(info_nce_workload, 16),
    workloads=workloads(info_nce_workload, (32768, 1024), (8192, 4096)),
    sized=info_nce_workload,
    cost=info_nce_cost,
    plan=info_nce_plan,
)
def info_nce(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    temperature: float = 1.0,
    symmetric: bool = False,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int = 0,
    group_name: str = "",
) -> Tensor:
    """InfoNCE, the contrastive loss of embeddings, in one direction or both, without ever holding all similarities.

    A query's own key is the one in its row; the keys of the other rows and the `negatives` are its negatives. It is the
    cross entropy of `scale / temperature * query @ cat(key, negatives).t()` with targets 0, 1, and so on, or with
    `symmetric` the mean of it and that of `scale / temperature * key @ query.t()`, for which the same products are
    read. Embeddings are used as they are: for cosine similarities normalize them first,
    `torch.nn.functional.normalize(x, dim=-1)`, whose gradient PyTorch has.

    Over a process group each rank has its own queries and negatives, as many as every other. The keys and negatives of
    all ranks are those of each query. Gathered are keys, ids, and in both directions two numbers for each key. "mean"
    and "sum" are over the queries of all ranks, the same on each, and the gradients are those of that one loss: a
    parameter's is the sum over the ranks. Where DDP or FSDP takes their mean, multiply the loss by the number of ranks.
    With "none" each rank has its own queries' losses, and gradients are those of the sum over the ranks.

    Args:
        query: `[N, H]`, float32, float16 or bfloat16, any strides.
        key: `[N, H]`, dtype of `query`: row i is the own key of query i.
        negatives: `[K, H]`, dtype of `query`: more negatives of every query, such as those that were mined.
        scale: A factor of the similarities, `[]` or `[1]`, any of the dtypes: CLIP's `logit_scale.exp()`. It gets a
            gradient. None is 1.
        temperature: Divides the similarities; positive. For a learned one pass its reciprocal as `scale`.
        symmetric: Take the mean of both directions, where a key's negatives are the queries of the other rows.
        query_ids: `[N]`, int64 or int32, with `key_ids`. A key that has the id of a query, but is not its own, is no
            negative of it, in either direction: duplicates, or other right answers.
        key_ids: `[N]`, as `query_ids`.
        negative_ids: `[K]`, as `query_ids`; with these needed for `negatives`.
        reduction: "none", "sum", or "mean" over the queries.
        chunk_size: As in `fused_linear_ce`, in queries.
        group_name: The `group_name` of a `torch.distributed.ProcessGroup`; "" is one rank.

    Returns:
        float32: a scalar, or `[N]` with reduction "none". The mean over no queries is NaN. A query without negatives
        has loss 0.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.

    Gradients take three products besides the forward pass's one, whose result is made again. What is kept from the
    forward to the backward pass is a maximum and a sum for each query, and for each key where both directions are.

    Sources: van den Oord et al., 2018, https://arxiv.org/abs/1807.03748; Radford et al., 2021,
    https://arxiv.org/abs/2103.00020.
    """
    loss, *_ = info_nce_fwd(ContrastiveCall.checked(locals()))
    return loss
