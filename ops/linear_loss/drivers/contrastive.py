"""The driver of a contrastive loss: the products of queries with keys, a block of queries at a time.

The math is in `info_nce.py`. The keys are the classes of a linear layer without a bias, and the columns of a block of
products have statistics as its rows have: those of the blocks are merged one after the other. Over the ranks of a group
each rank has its own queries, and gathers the keys of all. Ranks exchange the statistics of the columns, two numbers a
key, and in the backward pass the gradient of each query's loss. The gradient of a key is the sum over the ranks, each
of which has the part of its own queries: float32, in the ranks' order, and rounded once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from llmk.ops.common.collectives import gather_from_ranks, sum_over_ranks
from llmk.ops.common.sums import sum_to_scalar
from llmk.ops.linear_loss.chunked import CompactedTokens
from llmk.ops.linear_loss.chunked.plan import FREE_MEMORY, plan
from llmk.ops.linear_loss.head import check_chunk_size
from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH, Implementation, LossGradients, Products, Similarities
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows.logits import Block, LogitRows, float16_scale, largest, scaled
from llmk.ops.linear_loss.rows.products import Weights
from llmk.ops.linear_loss.rows.projection import Gradients, projection_of
from llmk.registry import (
    CallOp,
    FromArguments,
    autocast_dtype,
    check_dtype,
    check_like,
    check_option,
    check_parameter,
    check_positive,
    check_same,
    empty,
    no_gradient,
    or_no_gradient,
    replicate_only,
)
from llmk.registry.checks import resolve_group
from llmk.registry.private.processes import group_named

REDUCTIONS = ("none", "sum", "mean")
INTEGERS = (torch.int64, torch.int32)
STATISTICS_CHUNKS = 16
"""The chunks of products that take as much memory as the parts of statistics that a tile leaves in place of its own."""
SMALLEST_FACTOR = 2.0**-48
"""The smallest factor that the scale of float16 gradients makes up for. Float16's normal range of 2**29 is left below
it, and for a factor of 2**-77 a float16 gradient of float16 embeddings is 0."""


@dataclass(frozen=True)
class ContrastiveCall(FromArguments):
    """Queries and keys, in the order of a kernel op's arguments."""

    query: Tensor  # [N, H]
    key: Tensor  # [N, H]: the queries' own
    negatives: Tensor | None  # [K, H]
    scale: Tensor | None  # [] or [1]
    query_ids: Tensor | None  # [N]
    key_ids: Tensor | None  # [N]
    negative_ids: Tensor | None  # [K]
    temperature: float
    symmetric: bool
    reduction: str
    chunk_size: int
    group_name: str  # "" for one rank

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        """Check that the arguments fit each other, cast embeddings under autocast, and return the call."""
        sides = {name: arguments[name] for name in ("query", "key", "negatives")}
        dtype = autocast_dtype(sides["query"].device)
        if dtype is not None:
            sides = {name: side if side is None else side.to(dtype) for name, side in sides.items()}
        call = cls.of(arguments, **sides)
        _check_embeddings(call.query, call.key, call.negatives)
        _check_ids(call)
        if call.scale is not None:
            check_dtype("scale", call.scale)
            check_same("scale", call.scale, "query", call.query)
            if tuple(call.scale.shape) not in ((), (1,)):
                raise ValueError(f"scale: expected one number, shape () or (1,), got {tuple(call.scale.shape)}")
        check_positive("temperature", call.temperature)
        check_option("reduction", call.reduction, REDUCTIONS)
        check_chunk_size("chunk_size", call.chunk_size)
        if call.group_name:
            resolve_group("group_name", call.group_name)
        return call

    @property
    def ranks(self) -> int:
        return group_named(self.group_name).size() if self.group_name else 1

    @property
    def rank_keys(self) -> int:
        """The number of keys and negatives of a rank, M."""
        return self.key.shape[0] + (0 if self.negatives is None else self.negatives.shape[0])

    @property
    def first_pair(self) -> int:
        """The first query's own key, among those of all ranks."""
        return group_named(self.group_name).rank() * self.rank_keys if self.group_name else 0

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in the ranks' order."""
        return gather_from_ranks.fn(rows, self.ranks, self.group_name) if self.group_name else rows

    def sum_ranks(self, rows: Tensor) -> Tensor:
        """Return this rank's part of what `gather` concatenates: the sum of what each rank has."""
        return sum_over_ranks.fn(rows, self.ranks, self.group_name) if self.group_name else rows

    def factor(self) -> Tensor:
        """Return what products are multiplied with, float32 `[]`."""
        if self.scale is None:
            return torch.full((), 1 / self.temperature, dtype=torch.float32, device=self.query.device)
        return self.scale.float().view(()) / self.temperature

    def rows(self, impl: Implementation, *, gradients: bool) -> LogitRows:
        """Return the queries as the rows of a linear layer, whose weight the keys are."""
        query, keys = self.query, self.gather(_joined(self.key, self.negatives))
        stored = stores_products(query, impl)
        if not stored:
            query, keys = query.contiguous(), keys.contiguous()
        options = {"chunk_size": self.chunk_size, "matrices": int(stored), "free": FREE_MEMORY}
        chosen = plan((*query.shape, keys.shape[0]), query.dtype, on_host=impl.on_host, **options)
        if not (stored or gradients):
            chosen = replace(chosen, chunk_rows=chosen.chunk_rows * STATISTICS_CHUNKS)
        if self.group_name:  # the sum over the ranks is rounded
            chosen = replace(chosen, rounded_sums=False)
        layer = projection_of(query, Weights(keys, None, None, Transform()), None, not impl.on_host)
        return LogitRows(layer, CompactedTokens(tuple(query.shape[:1])), chosen)

    def similarities(self, factor: Tensor, key_ids: Tensor | None, block: slice) -> Similarities:
        query_ids = None if self.query_ids is None else self.query_ids[block].contiguous()
        return Similarities(factor, query_ids, key_ids, self.first_pair + block.start)

    def ids_of_keys(self) -> Tensor | None:
        if self.key_ids is None:
            return None
        return self.gather(_joined(self.key_ids, self.negative_ids)).contiguous()

    def own_keys(self, columns: Tensor) -> Tensor:
        """Return the columns `[..., R M]` of the queries' own keys, `[..., N]`."""
        return columns[..., self.first_pair : self.first_pair + self.query.shape[0]]

    def to_keys(self, grads: Tensor) -> Tensor:
        """Return a value of each query `[N]` at its own key, of all ranks `[R M]`, and 0 at the others."""
        return self.gather(torch.nn.functional.pad(grads, (0, self.rank_keys - grads.shape[0])))

    def loss_gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of each query's loss in one direction, `[N]`, from that of the loss."""
        N = self.query.shape[0]
        grads = grad if self.reduction == "none" else grad.expand(N)
        if self.reduction == "mean" and N > 0:
            grads = grads / (N * self.ranks)
        return (grads / 2 if self.symmetric else grads).contiguous()


def _check_embeddings(query: Tensor, key: Tensor, negatives: Tensor | None) -> None:
    check_dtype("query", query)
    if query.dim() != 2 or query.shape[1] == 0:
        raise ValueError(f"query: expected shape [N, H] with H at least 1, got {tuple(query.shape)}")
    check_like("key", key, "query", query)
    if negatives is not None:
        if negatives.dim() != 2 or negatives.shape[1] != query.shape[1]:
            expected = f"[K, {query.shape[1]}] to fit query"
            raise ValueError(f"negatives: expected shape {expected}, got {tuple(negatives.shape)}")
        check_same("negatives", negatives, "query", query, dtype=True)


def _check_ids(call: ContrastiveCall) -> None:
    """Check that everything has ids or nothing has, one for each row."""
    rows = {"query_ids": call.query, "key_ids": call.key}
    if call.negatives is not None:
        rows["negative_ids"] = call.negatives
    given = {name: getattr(call, name) for name in ("query_ids", "key_ids", "negative_ids")}
    some = [name for name, ids in given.items() if ids is not None]
    for name, ids in given.items():
        if ids is None:
            if some and name in rows:
                raise ValueError(f"{name}: expected ids, as {some[0]} is given, got None")
            continue
        if name not in rows:
            raise ValueError(f"{name}: expected None without negatives, got shape {tuple(ids.shape)}")
        check_parameter(name, ids, rows[name].shape[:1], "one for each row", "query", call.query, INTEGERS)


def _joined(first: Tensor, second: Tensor | None) -> Tensor:
    return first if second is None else torch.cat((first, second))


def stores_products(query: Tensor, impl: Implementation = KERNELS) -> bool:
    """True if a block's products are in memory: no kernel makes those of such embeddings where it reads them."""
    return not impl.contrastive.makes_products(query)


def _products(queries: LogitRows, block: Block) -> Products:
    layer = queries.projection
    return Products(layer.x[block.rows], layer.weights.weight, block.logits)


def _losses(stats: Tensor, pairs: Tensor) -> Tensor:
    """Return logsumexp - logit of the pair from maxima and sums `[2, N]`."""
    return stats[1].log() + (stats[0] - pairs)


def _forward(impl: Implementation, call: ContrastiveCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and the statistics of this rank's rows, `[2, N]`, and of all columns, `[2, R M]`."""
    queries, factor, key_ids = call.rows(impl, gradients=False), call.factor(), call.ids_of_keys()
    rows, pairs, columns = [], [], None
    for block in queries.blocks():
        given = _products(queries, block), call.similarities(factor, key_ids, block.rows)
        row_parts, column_parts, own = impl.contrastive.statistics(*given, call.symmetric)
        rows.append(impl.contrastive.merge(row_parts))
        pairs.append(own)
        if column_parts is not None:
            columns = impl.contrastive.merge(column_parts, columns)
    row_stats, pair = torch.cat(rows, -1), torch.cat(pairs)
    losses = _losses(row_stats, pair)
    if columns is not None:
        columns = impl.contrastive.merge(call.gather(columns).view(call.ranks, 2, -1))
        losses = (losses + _losses(call.own_keys(columns), pair)) / 2
    nothing = empty((0,), torch.float32, row_stats.device)
    return _reduced(impl, call, losses), row_stats, nothing if columns is None else columns


def _reduced(impl: Implementation, call: ContrastiveCall, losses: Tensor) -> Tensor:
    if call.reduction == "none":
        return losses
    every = call.gather(losses)
    total = every.sum() if impl.on_host else sum_to_scalar(every)
    return total / every.shape[0] if call.reduction == "mean" else total


def _backward(
    impl: Implementation, grad: Tensor, row_stats: Tensor, column_stats: Tensor, call: ContrastiveCall,
    need_query: bool, need_key: bool, need_negatives: bool, need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Make the products again, and the gradients that are needed."""
    queries, factor, key_ids = call.rows(impl, gradients=True), call.factor(), call.ids_of_keys()
    row_grads, need = call.loss_gradients(grad), (need_query, need_key or need_negatives, False)
    column_grads = call.to_keys(row_grads) if call.symmetric else None
    key_dtype = torch.float32 if call.group_name else call.key.dtype
    scale = float16_scale(queries.projection.p_dtype, need, lambda: _bound(row_grads, column_grads, factor))
    dtypes = call.query.dtype, key_dtype, key_dtype
    gradients = Gradients(queries, need, dtypes)
    counts, of_rows = torch.ones_like(row_grads), scaled(row_grads, scale)
    columns = None if column_grads is None else LossGradients(column_stats, scaled(column_grads, scale))

    def factor_gradient(block: Block) -> Tensor | None:
        """Write the gradient of a block's products, and return that of the factor."""
        rows = LossGradients(row_stats[:, block.rows].contiguous(), of_rows[block.rows])
        given = call.similarities(factor, key_ids, block.rows), rows, columns, need_scale
        return impl.contrastive.gradients(_products(queries, block), block.gradient, *given)

    blocks = queries.blocks(gradients if any(need) else None, counts, scale)
    factor_grads = [factor_gradient(block) for block in blocks]
    dquery, dkeys, _ = gradients.results()
    dkey, dnegatives = _of_own_keys(call, dkeys) if need[1] else (None, None)
    return (
        dquery if need_query else no_gradient(grad),
        or_no_gradient(dkey if need_key else None, grad),
        or_no_gradient(dnegatives if need_negatives else None, grad),
        or_no_gradient(_scale_gradient(call, factor_grads, scale), grad),
    )


def _of_own_keys(call: ContrastiveCall, dkeys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of this rank's keys and negatives from those of all keys; they share no memory."""
    dkeys, N = call.sum_ranks(dkeys), call.key.shape[0]
    if call.negatives is None:
        return dkeys.to(call.key.dtype), None
    return dkeys[:N].to(call.key.dtype, copy=True), dkeys[N:].to(call.key.dtype, copy=True)


def _bound(row_grads: Tensor, column_grads: Tensor | None, factor: Tensor) -> Tensor:
    """Return what no element of the products' gradient exceeds: a softmax less 1 at the pair is within [-1, 1].

    A factor below `SMALLEST_FACTOR` counts as that. The factor's own gradient is made from scaled numbers too, which
    are not multiplied by the factor: for one of 0 they would be infinite.
    """
    bound = largest(row_grads) if column_grads is None else largest(row_grads) + largest(column_grads)
    return bound * factor.abs().clamp(min=SMALLEST_FACTOR)


def _scale_gradient(call: ContrastiveCall, parts: list[Tensor | None], scale: Tensor | None) -> Tensor | None:
    """Return the gradient of the scale from the factor's in each block, None where that is not needed."""
    found = [part for part in parts if part is not None]
    if call.scale is None or not found:
        return None
    total = torch.stack(found).sum() / call.temperature
    return (total if scale is None else total / scale).to(call.scale.dtype).view(call.scale.shape)


def _fake_forward(call: ContrastiveCall) -> tuple[Tensor, Tensor, Tensor]:
    N, M = call.query.shape[0], call.rank_keys * call.ranks
    shapes = (N,) if call.reduction == "none" else (), (2, N), (2, M) if call.symmetric else (0,)
    loss, row_stats, column_stats = (call.query.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return loss, row_stats, column_stats


def _product(call: ContrastiveCall) -> int:
    """Count the FLOPs of this rank's queries with the keys of all ranks."""
    return 2 * call.query.shape[0] * call.query.shape[1] * call.rank_keys * call.ranks


def _backward_flops(grad: Tensor, row_stats: Tensor, column_stats: Tensor, call: ContrastiveCall, *need: bool) -> int:
    need_query, need_key, need_negatives, _ = need
    return _product(call) * (1 + need_query + (need_key or need_negatives))


info_nce_fwd = CallOp(
    "_info_nce_fwd",
    ContrastiveCall,
    partial(_forward, KERNELS),
    on_host=partial(_forward, PYTORCH),
    outputs=3,
    fake=_fake_forward,
    flops=_product,
)
info_nce_bwd = CallOp(
    "_info_nce_bwd",
    ContrastiveCall,
    partial(_backward, KERNELS),
    on_host=partial(_backward, PYTORCH),
    outputs=4,
    fake=None,
    flops=_backward_flops,
)
info_nce_fwd.op.register_sharding(replicate_only)
info_nce_bwd.op.register_sharding(replicate_only)
info_nce_fwd.op.register_backward(
    info_nce_bwd.op,
    outputs=("loss", "row_stats", "column_stats"),
    depends_on=[["query", "key", "negatives", "scale"]],
)
