"""The loop over the chunks of a loss over a vocabulary, and its two schedules.

Where a loss is local to a chunk of whole groups, its gradients are made in the forward pass: the statistics of a chunk
give the rows' results, the objective is a plain function of these, autograd differentiates it, and the chunk's
exponentials, scaled, are what the products of the gradients read. Three products in all.

Where it is not, or each row has an incoming gradient of its own, a first pass gives all results and a second one the
gradients: of exponentials that were kept, or with the logits made once more.

So they are made again within a chunk where the gradient is no multiple of the exponentials: that of an entropy, of
label smoothing, of float16, whose range holds no exponentials, and over supports.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import CompactedTokens, VocabShard
from llmk.ops.linear_loss.plan import Plan
from llmk.ops.linear_loss.products import Transform, Weights
from llmk.ops.linear_loss.projection import (
    LARGEST_EXPONENT,
    Chunk,
    Gradients,
    KernelProjection,
    MatrixProjection,
    RowMatrix,
    matrix,
    projection_of,
)
from llmk.ops.linear_loss.softmax import (
    STATISTICS,
    Coefficients,
    RowGradients,
    RowResults,
    Statistics,
    coefficients,
    row_results,
)
from llmk.ops.linear_loss.support import Support
from llmk.registry import gradient_of

LEAST_FACTOR = 2.0**-30
"""A row's factor is no smaller part of its target's gradient: so the entry of the target, their ratio, is a number."""


class Objective(Protocol):
    """A loss as a function of what rows give."""

    def value(self, rows: slice, results: RowResults) -> Tensor:
        """Return the sum over some rows, which are whole groups."""
        ...


@dataclass(frozen=True)
class Classes:
    """The classes of a chunk's rows whose probabilities are asked for, and the one that is left out of its sums."""

    columns: Tensor  # int32 [M, K] among this rank's classes; negative where a class does not count or is elsewhere
    counts: Tensor  # bool [M, K]
    y: Tensor  # float32 [M, K], transformed logits, NaN of a class that is none
    slopes: Tensor | None  # float32 [M, K], dy / dz
    best: Tensor  # int64 [M, 1], which of them is the row's own
    is_own: Tensor  # bool [M, K], True for it, wherever it stands
    same: Tensor  # float32 [M, K, K], 1 where two are the same class


@dataclass
class SoftmaxRows:
    """The rows of a loss over a vocabulary, in chunks.

    Attributes:
        compacted: Which tokens the rows are.
        weights: The linear layer, its transform, and the class weights of `RowResults.weighted`.
        shard: The classes of this rank; None for all.
        classes: `[N, K]`, int32 or int64.
        ignore_index: A class that does not count.
        by_kernels: On a GPU, where 16-bit rows take kernels.
        moments: The entropy is asked for.
        leaves_out_own: A row's class is left out of its sums; else they are of all classes.
        support: Classes over which each row's softmax is.
    """

    compacted: CompactedTokens
    x: Tensor  # [N, H]
    weights: Weights
    shard: VocabShard | None
    classes: Tensor
    ignore_index: int
    plan: Plan
    by_kernels: bool
    moments: bool = False
    leaves_out_own: bool = True
    support: Support | None = None
    projection: KernelProjection | MatrixProjection = field(init=False)

    def __post_init__(self) -> None:
        self.projection = projection_of(self.x, self.weights, self.shard, self.by_kernels)
        self._ids = ids = self.classes.long()
        self._counts = ids != self.ignore_index  # int32 would wrap an index that it does not hold
        self._valid = self._counts & (ids >= 0) & (ids < self.num_classes)
        columns = ids - self.first_class
        here = self._valid & (columns >= 0) & (columns < self.weights.weight.shape[0])
        self._columns = columns.masked_fill(~here, -1).int()

    @property
    def transform(self) -> Transform:
        return self.weights.transform

    @property
    def num_classes(self) -> int:
        return self.weights.weight.shape[0] if self.shard is None else self.shard.num_classes

    @property
    def first_class(self) -> int:
        return 0 if self.shard is None else self.shard.first_class

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        N = self.x.shape[0]
        for start in range(0, N, self.plan.chunk_rows):
            yield slice(start, min(start + self.plan.chunk_rows, N))

    def row_matrix(self) -> Tensor:
        """Return an uninitialized P for the rows of a chunk."""
        rows = min(self.plan.chunk_rows, self.x.shape[0])
        return matrix(rows, self.weights.weight.shape[0], self.projection.p_dtype, self.x.device)

    def chunk(self, rows: slice) -> tuple[Chunk, Classes]:
        """Return some rows and their classes."""
        ids, counts, columns = self._ids[rows], self._counts[rows], self._columns[rows]
        z = self.projection.logits(rows, columns)
        if self.shard is not None:  # each class is on one rank: the sum is its logit
            z = self.shard.gather(z.contiguous()).view(self.shard.ranks, *z.shape).sum(0)
        y, slopes = self.transform(z)
        y = y.masked_fill(~self._valid[rows], float("nan"))
        mask = counts.any(-1)
        best = y.masked_fill(~counts, float("-inf")).argmax(-1, keepdim=True)
        is_own = (ids == ids.gather(1, best)) & counts if self.leaves_out_own else torch.zeros_like(counts)
        own, y_own = columns.gather(1, best).squeeze(1), y.gather(1, best).squeeze(1)
        slope_own = None if slopes is None else slopes.gather(1, best).squeeze(1)
        if not self.leaves_out_own:
            own, y_own = torch.full_like(own, -1), torch.full_like(y_own, float("-inf"))
        same = (ids.unsqueeze(-1) == ids.unsqueeze(-2)) & counts.unsqueeze(-2)
        M = rows.stop - rows.start
        if self.compacted.count is None:
            count = torch.full((1,), M, dtype=torch.int32, device=self.x.device)
        else:
            count = self.compacted.count.end(rows)
        if self.support is not None:
            cuts = self.support.cuts(rows)
            mask, own = mask & ~cuts, own.masked_fill(cuts, -1)
        of_rows = Chunk(rows, mask, count, own, y_own.masked_fill(~mask, 0.0), slope_own)
        return of_rows, Classes(columns, counts, y, slopes, best, is_own, same.float())

    def results(
        self, chunk: Chunk, classes: Classes, p: Tensor | None
    ) -> tuple[Statistics, RowResults, Tensor]:  # fmt: skip
        """Return a chunk's statistics, its results, and if the own class is the largest; write exponentials to P."""
        stats, weighted, largest = self.projection.statistics(chunk, p, self.moments)
        results = row_results(stats, classes.y, weighted, classes.counts)
        if self.support is not None:
            stats, results = self.support.results(self, chunk.rows, classes, stats, results)
        # No other class's exponential is larger than the largest of its own classes.
        return stats, results, largest <= stats.own

    def exponentials_serve(self, grads: RowGradients) -> bool:
        """Return True if exponentials that are stored give the gradient."""
        one_class = self.classes.shape[1] == 1 and self.leaves_out_own and self.support is None
        return one_class and grads.is_scaled_exponentials and self.projection.keeps_exponentials

    def matrix_of(
        self, chunk: Chunk, classes: Classes, stats: Statistics, grads: RowGradients, p: Tensor, exponentials: bool
    ) -> RowMatrix:  # fmt: skip
        """Return what the products of the gradients read, given P with the exponentials or to be made."""
        grads = grads.masked(classes.counts)
        class_weight = self.weights.class_weight
        if class_weight is not None:
            class_weight = torch.where(
                classes.columns >= 0, class_weight[classes.columns.clamp(min=0).long()].float(), 0.0
            )
        a, b, entries = coefficients(stats, classes.y, grads, classes.same, classes.is_own, class_weight)
        factor = self.transform.factor
        entries = entries * (factor if classes.slopes is None else classes.slopes)
        own_entry = entries.gather(1, classes.best).squeeze(1)
        if not exponentials:
            return self._made_matrix(chunk, classes, stats, grads, Coefficients(a, b, entries), p)
        row_factor = a * factor * self.projection.scale_of_exponentials(chunk, stats)
        if grads.logsumexp is None:
            return RowMatrix(p, row_factor, own_entry, self.own_of_exponentials(chunk, stats))
        least = own_entry.abs() * LEAST_FACTOR / stats.total
        row_factor = torch.where(row_factor.abs() < least, least, row_factor)
        own_stored = torch.where(row_factor == 0, 0.0, own_entry / row_factor)
        return RowMatrix(p, row_factor, own_entry, own_stored)

    def own_of_exponentials(self, chunk: Chunk, stats: Statistics) -> Tensor:
        """Return what stands among the exponentials at a row's own class where only log p has a gradient."""
        own = -stats.rest / self.projection.scale_of_exponentials(chunk, stats)
        return own if chunk.slope_own is None else own * chunk.slope_own

    def _made_matrix(
        self, chunk: Chunk, classes: Classes, stats: Statistics, grads: RowGradients, coefficients: Coefficients,
        p: Tensor,
    ) -> RowMatrix:  # fmt: skip
        """Make the gradient of a chunk's logits; float16 takes a power of two out of each row."""
        (a, b, entries), u = coefficients, grads.weighted
        size = torch.ones_like(a)
        if p.dtype == torch.float16:
            size = self._power_of_two(grads, a)
            a, b, u = a / size, b / size, None if u is None else u / size
        self.projection.gradients(chunk, stats.reference, a, b, u, p)
        row_factor = (size * self.transform.factor).masked_fill(~classes.counts.any(-1), 0.0)
        columns, stored = classes.columns, entries / (size * self.transform.factor).unsqueeze(-1)
        own_entry, own_stored = (each.gather(1, classes.best).squeeze(1) for each in (entries, stored))
        others = columns.shape[1] > 1 or not self.leaves_out_own
        if self.support is not None:
            own = self.support.entries(self, chunk, classes, stats, grads)
            columns = columns.masked_fill(self.support.cuts(chunk.rows).unsqueeze(-1), -1)
            columns = torch.cat((columns, own[0]), -1)
            stored = torch.cat((stored, own[1] / (size * self.transform.factor).unsqueeze(-1)), -1)
            others = True
        if not others:
            return RowMatrix(p, row_factor, own_entry, own_stored)
        return RowMatrix(p, row_factor, own_entry, own_stored, columns.contiguous(), stored.contiguous())

    def _power_of_two(self, grads: RowGradients, like: Tensor) -> Tensor:
        """Return powers of two `[M]` that no element of a row's gradient exceeds."""
        bound = torch.zeros_like(like)
        if grads.logprobs is not None:
            bound = bound + grads.logprobs.abs().sum(-1)
        if grads.entropy is not None:
            # p |log p + H| is at most log V + 1
            bound = bound + grads.entropy.abs() * (math.log(self.num_classes) + 1)
        if grads.logsumexp is not None:
            bound = bound + grads.logsumexp.abs()
        if grads.weighted is not None and self.weights.class_weight is not None:
            bound = bound + grads.weighted.abs() * self.weights.class_weight.abs().amax().float()
        exponent = torch.frexp(torch.where(bound.isfinite() & (bound > 0), bound, 0.5)).exponent
        return torch.ldexp(torch.ones_like(bound), exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT))


class RowParts:
    """The statistics and results of rows, gathered chunk by chunk, and if the own class is the largest."""

    def __init__(self, rows: SoftmaxRows) -> None:
        row = torch.zeros((0,), dtype=torch.float32, device=rows.x.device)
        results = RowResults(row.expand(rows.classes.shape[1], 0).t(), row, row, row)
        self.stats, self.results, self.largest = [row.expand(STATISTICS, 0)], [results], [row.bool()]

    def add(self, stats: Statistics, results: RowResults, largest: Tensor) -> None:
        self.stats.append(stats.stacked())
        self.results.append(results)
        self.largest.append(largest)

    def whole(self) -> tuple[Tensor, RowResults, Tensor]:
        """Return the statistics `[4, N]`, the results, and the mask `[N]`."""
        results = RowResults(*(torch.cat(parts) for parts in zip(*self.results, strict=True)))
        return torch.cat(self.stats, -1), results, torch.cat(self.largest)


def in_forward(rows: SoftmaxRows, objective: Objective, gradients: Gradients) -> tuple[Tensor, RowResults, Tensor]:
    """Make the results and the gradients of a loss that is local to each chunk."""
    parts, p = RowParts(rows), rows.row_matrix()
    for block in rows.chunks():
        chunk, classes = rows.chunk(block)
        part = p[: block.stop - block.start]
        stats, results, largest = rows.results(chunk, classes, part if rows.projection.keeps_exponentials else None)
        parts.add(stats, results, largest)
        _, grads = gradient_of(lambda *given, block=block: objective.value(block, RowResults(*given)), *results)
        serves = rows.exponentials_serve(given := RowGradients(*grads))
        gradients.add(chunk, rows.matrix_of(chunk, classes, stats, given, part, serves))
    return parts.whole()


def first_pass(rows: SoftmaxRows, kept: Tensor | None = None) -> tuple[Tensor, RowResults, Tensor]:
    """Make the results of all rows, and their exponentials where `kept [N, V]` has room for them."""
    parts = RowParts(rows)
    for block in rows.chunks():
        chunk, classes = rows.chunk(block)
        stats, results, largest = rows.results(chunk, classes, None if kept is None else kept[block])
        if kept is not None:
            own = rows.own_of_exponentials(chunk, stats)
            rows.projection.put(kept[block], chunk.own.unsqueeze(-1), own.unsqueeze(-1), chunk.count)
        parts.add(stats, results, largest)
    return parts.whole()


def second_pass(
    rows: SoftmaxRows,
    stats: Tensor,
    row_gradients: Callable[[slice, RowResults], RowGradients],
    gradients: Gradients,
    kept: Tensor | None = None,
) -> None:
    """Make the gradients, given the statistics `[4, N]` of a first pass and a function for those of the results.

    Exponentials that were kept serve as they are where they do; what is `weighted` in the results is not made again.
    """
    p = rows.row_matrix() if kept is None else None
    for block in rows.chunks():
        chunk, classes = rows.chunk(block)
        of_rows = Statistics(*stats[:, block].unbind())
        results = row_results(of_rows, classes.y, torch.zeros_like(of_rows.rest), classes.counts)
        grads = row_gradients(block, results)
        serves = kept is not None and rows.exponentials_serve(grads)
        if p is None and not serves:
            p = rows.row_matrix()
        part = kept[block] if kept is not None and serves else p[: block.stop - block.start]
        gradients.add(chunk, rows.matrix_of(chunk, classes, of_rows, grads, part, serves))
