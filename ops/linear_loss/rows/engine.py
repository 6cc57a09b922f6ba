"""The loop over the chunks of a loss over a vocabulary, and its two schedules.

Where a loss is local to a chunk of whole groups, its gradients are made in the forward pass: the statistics of a chunk
give the rows' results, the objective their gradients, by its formula or by autograd, and the chunk's exponentials,
scaled, are what the products of the gradients read. Three products in all.

Where it is not, or each row has an incoming gradient of its own, a first pass gives all results and a second one the
gradients: of exponentials that were kept, or with the logits made once more.

Where the gradient is no multiple of the exponentials, as with label smoothing, one pass over them makes it. Logits are
made again within a chunk where that is not enough: with a cap, whose slope is not known any more, in float16, whose
range holds no exponentials, for several classes of a row, over supports, and for an entropy in bfloat16.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import CompactedTokens
from llmk.ops.linear_loss.chunked.plan import Plan
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows.classes import Classes, Numbering
from llmk.ops.linear_loss.rows.products import FLOAT16_SCALE
from llmk.ops.linear_loss.rows.projection import (
    LARGEST_EXPONENT,
    Chunk,
    ChunkedRows,
    Gradients,
    KernelProjection,
    Projection,
    RowMatrix,
)
from llmk.ops.linear_loss.rows.softmax import (
    STATISTICS,
    Coefficients,
    RowGradients,
    RowResults,
    coefficients,
    row_results,
)
from llmk.ops.linear_loss.rows.support import Support

RowParts: TypeAlias = tuple[Tensor, RowResults, Tensor]
"""Statistics `[5, M]` of rows, their results, and the mask `[M]` of those whose own class has the largest logit."""


class SoftmaxRows(ChunkedRows):
    """The rows of a loss over a vocabulary, in chunks.

    Args:
        projection: The linear layer, its transform, and the class weights of `RowResults.weighted`.
        compacted: Which tokens the rows are.
        plan: The chunks.
        classes: `[N, K]`, int32 or int64.
        ignore_index: A class that does not count.
        moments: The entropy is asked for.
        leaves_out_own: A row's class is left out of its sums; else they are of all classes.
        with_tail: The log-probability of all classes that are not a row's, together, is asked for.
        support: Classes over which each row's softmax is, `[N, L]`.
        logits: `[N, V]`, float32, transformed without a cap: those of a first pass, if it kept them.
    """

    def __init__(
        self, projection: Projection, compacted: CompactedTokens, plan: Plan, classes: Tensor, ignore_index: int,
        *, moments: bool = False, leaves_out_own: bool = True, with_tail: bool = False, support: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(projection, compacted, plan)
        self.classes = classes.contiguous()
        self.moments, self.leaves_out_own, self.with_tail, self.logits = moments, leaves_out_own, with_tail, logits
        self.weights, self.shard = projection.weights, projection.shard
        self.transform = self.weights.transform
        shard = (0, projection.V) if self.shard is None else self.shard[:2]
        self.numbering, self._support = Numbering(ignore_index, *shard), None
        if support is not None:
            self._support = Support(support, self.classes.long(), projection, *shard)
        # Each row has one class, which is left out of its sums, and a softmax over all.
        self.has_one_class = classes.shape[1] == 1 and not with_tail and leaves_out_own and support is None
        # The exponentials of the sums may be the gradient, times a factor for each row.
        self.stores_exponentials = self.has_one_class and projection.keeps_exponentials
        self._all: tuple[Chunk, Classes] | None = None

    def chunk(self, rows: slice) -> tuple[Chunk, Classes]:
        """Return some rows and their classes."""
        if not isinstance(self.projection, KernelProjection):
            return self._prepared(rows)
        everything = slice(0, self.x.shape[0])
        if self._all is None:  # the logits of all rows' classes at once
            self._all = self._prepared(everything)
        if rows == everything:
            return self._all
        chunk, classes = (_cut(each, rows) for each in self._all)
        return chunk._replace(rows=rows, end=self.end(rows)), classes

    def _prepared(self, rows: slice) -> tuple[Chunk, Classes]:
        is_raw = self.shard is not None  # what other ranks have comes before the transform
        ids, transform = self.classes[rows], self.transform
        if self.logits is None:
            classes = self.projection.classes(rows, ids, self.numbering, raw=is_raw, left_out=self.has_one_class)
        else:  # transformed already
            transform, logits = Transform(), partial(self._kept_logits, rows)
            classes = Classes.located(ids, self.numbering, self.projection.V, logits, None if is_raw else transform)
        if self.shard is not None:
            classes = classes.of_ranks(self.shard, transform)
        if self.with_tail or self.classes.shape[1] > 1:
            classes = classes.chosen(self.with_tail)
        mask = classes.counts.squeeze(1) if classes.best is None else classes.counts.any(-1)
        own, y_own = classes.own(classes.columns), classes.own(classes.y)
        if not self.leaves_out_own:
            own, y_own = torch.full_like(own, -1), torch.full_like(y_own, float("-inf")).masked_fill(~mask, 0.0)
        if self._support is not None:
            cuts = self._support.cuts(rows)
            mask, own, y_own = mask & ~cuts, own.masked_fill(cuts, -1), y_own.masked_fill(cuts, 0.0)
        reference = y_own  # of kernels
        left_out = y_left_out = None
        if classes.distinct is not None:
            reference = torch.full_like(y_own, float("-inf"))  # a tail's sums are relative to its own largest logit
            others = classes.distinct & (classes.ids != classes.own(classes.ids).unsqueeze(-1))
            left_out = classes.columns.sort(-1).values
            y_left_out = classes.y.masked_fill(~others, float("-inf"))
        slope_own = None if classes.slopes is None else classes.own(classes.slopes)
        reference = torch.where(mask, reference, float("inf"))  # which says that a row does not count
        return Chunk(rows, self.end(rows), mask, own, y_own, reference, slope_own, left_out, y_left_out), classes

    def _kept_logits(self, rows: slice, columns: Tensor) -> Tensor:
        if self.logits is None or self.projection.V == 0:
            return torch.zeros_like(columns, dtype=torch.float32)
        return self.logits[rows].gather(1, columns.clamp(min=0).long())

    def results(self, chunk: Chunk, classes: Classes, p: Tensor | None) -> RowParts:
        """Return a chunk's part, and write exponentials to P."""
        stats, weighted, is_largest, own_results = self.projection.statistics(chunk, p, self.moments)
        if own_results is not None and self.has_one_class:
            logprobs, *others = own_results.unbind()
            return stats, RowResults(logprobs.unsqueeze(1), *others), is_largest
        results = row_results(stats, classes.y, weighted, classes.counts, classes.distinct)
        if self._support is not None:
            stats, results = self._support.results(chunk.rows, classes, stats, results)
        return stats, results, is_largest

    def exponentials_serve(self, grads: RowGradients) -> bool:
        """Return True if exponentials that are stored give the gradient, as they are or after one pass over them."""
        serves = not self.transform.softcap or grads.is_scaled_exponentials  # a cap's slope is in them
        if grads.entropy is not None:  # a + b log E may be near 0: there what E was rounded by is no small part of it
            serves = serves and self.projection.p_dtype == torch.float32
        return self.stores_exponentials and grads.tail is None and serves

    def matrix_of(
        self, chunk: Chunk, classes: Classes, stats: Tensor, grads: RowGradients, p: Tensor, e: Tensor | None
    ) -> RowMatrix:  # fmt: skip
        """Return what the products of the gradients read, made in p.

        Exponentials e that serve may be there already; without them the logits are made again.
        """
        if e is not None and grads.is_scaled_exponentials:
            return self.projection.exponentials(chunk, stats, grads, e)
        if self.has_one_class and isinstance(self.projection, KernelProjection):
            size = None if p.dtype != torch.float16 else self._power_of_two(grads.masked(classes.counts), stats[1])
            return self.projection.made(chunk, stats, grads, size, p, e)
        grads = grads.masked(classes.counts)
        is_own = torch.zeros_like(classes.counts)
        if self.leaves_out_own:
            is_own = (classes.ids == classes.own(classes.ids).unsqueeze(1)) & classes.counts
        class_weight = self.weights.of_classes(classes.columns)
        row = coefficients(stats, classes.y, grads, classes.ids, is_own, class_weight, classes.distinct)
        return self._made_matrix(chunk, classes, stats, grads, row, p, e)

    def _made_matrix(
        self, chunk: Chunk, classes: Classes, stats: Tensor, grads: RowGradients, row: Coefficients, p: Tensor,
        e: Tensor | None,
    ) -> RowMatrix:  # fmt: skip
        """Make the gradient of a chunk's logits; float16 takes a power of two out of each row."""
        factor, (reference, a, b, entries), u = self.transform.factor, row, grads.weighted
        entries = entries * (factor if classes.slopes is None else classes.slopes)
        size = torch.ones_like(a)
        if p.dtype == torch.float16:
            size = self._power_of_two(grads, a)
            a, b, u = a / size, b / size, None if u is None else u / size
        if self.logits is not None:
            self.projection.from_logits(chunk, self.logits[chunk.rows], reference, a, p)
        elif e is None:
            self.projection.gradients(chunk, reference, a, b, u, p)
        else:
            self.projection.from_exponentials(chunk, e, stats[4], (a, b, u), p)
        row_factor = (size * factor).masked_fill(~classes.counts.any(-1), 0.0)
        columns, stored = classes.columns, entries / (size * factor).unsqueeze(-1)
        own_entry, own_stored = classes.own(entries), classes.own(stored)
        unit = FLOAT16_SCALE if p.dtype == torch.float16 else 1.0
        lost = own_entry - row_factor * ((own_stored * unit).to(p.dtype).float() / unit)
        factors = torch.stack((row_factor, lost.masked_fill(chunk.own < 0, 0.0)))
        if self.has_one_class:
            return RowMatrix(p, factors, chunk.own, own_stored)
        if self._support is not None:
            own = self._support.entries(chunk, classes, stats, grads)
            columns = columns.masked_fill(self._support.cuts(chunk.rows).unsqueeze(-1), -1)
            columns = torch.cat((columns, own[0]), -1)
            stored = torch.cat((stored, own[1] / (size * factor).unsqueeze(-1)), -1)
        return RowMatrix(p, factors, chunk.own, own_stored, columns.contiguous(), stored.contiguous())

    def _power_of_two(self, grads: RowGradients, like: Tensor) -> Tensor:
        """Return powers of two `[M]` that no element of a row's gradient exceeds."""
        bound = torch.zeros_like(like)
        if grads.logprobs is not None:
            bound = bound + grads.logprobs.abs().sum(-1)
        if grads.entropy is not None:
            # p |log p + H| is at most log V + 1
            bound = bound + grads.entropy.abs() * (math.log(self.numbering.num_classes) + 1)
        for each in (grads.logsumexp, grads.tail):
            bound = bound if each is None else bound + each.abs()
        if grads.weighted is not None and self.weights.class_weight is not None:
            bound = bound + grads.weighted.abs() * self.weights.class_weight.abs().amax().float()
        exponent = torch.frexp(torch.where(bound.isfinite() & (bound > 0), bound, 0.5)).exponent
        exponent = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        return torch.ldexp(torch.ones_like(bound), exponent)  # noqa: TID251  in a kernel op


def _cut(whole: Any, rows: slice) -> Any:
    """Return those of some rows of what is of all."""
    return type(whole)(*[value[rows] if isinstance(value, Tensor) else value for value in whole])


def _joined(rows: SoftmaxRows, parts: list[RowParts]) -> RowParts:
    """Return what all rows have, given the parts of chunks; one is as it is, and may share memory."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        row = torch.zeros((0,), dtype=torch.float32, device=rows.x.device)
        logprobs, stats = row.new_zeros((0, rows.classes.shape[1])), row.new_zeros((STATISTICS + rows.with_tail, 0))
        return stats, RowResults(logprobs, row, row, row, row if rows.with_tail else None), row.bool()
    stats, results, largest = zip(*parts, strict=True)
    *joined, tails = zip(*results, strict=True)
    tail = torch.cat(tails) if rows.with_tail else None
    return torch.cat(stats, -1), RowResults(*map(torch.cat, joined), tail=tail), torch.cat(largest)


def in_forward(
    rows: SoftmaxRows, row_gradients: Callable[[slice, RowResults], RowGradients], gradients: Gradients
) -> RowParts:
    """Make the results and the gradients of a loss that is local to each chunk, given a function for those of results.

    The rows of a chunk, which the function gets, are whole groups.
    """
    parts, p = [], rows.buffer(rows.plan.chunk_rows, rows.projection.p_dtype)
    for block in rows.chunks():
        chunk, classes = rows.chunk(block)
        part = p[: block.stop - block.start]
        found = stats, results, _ = rows.results(chunk, classes, part if rows.stores_exponentials else None)
        parts.append(found)
        grads = row_gradients(block, results)
        serves = rows.exponentials_serve(grads)
        made = rows.matrix_of(chunk, classes, stats, grads, part, part if serves else None)
        gradients.add(block, chunk.end, made)
    return _joined(rows, parts)


def first_pass(rows: SoftmaxRows, kept: Tensor | None = None) -> RowParts:
    """Make the results of all rows, and their exponentials where `kept [N, V]` has room for them."""
    parts = []
    for block in rows.chunks():
        chunk, classes = rows.chunk(block)
        parts.append(rows.results(chunk, classes, None if kept is None else kept[block]))
        if kept is not None:
            own = rows.projection.own_entries(chunk, parts[-1][0])
            rows.projection.put(kept[block], chunk.own.unsqueeze(-1), own.unsqueeze(-1), chunk.end)
    return _joined(rows, parts)


def second_pass(
    rows: SoftmaxRows,
    stats: Tensor,
    row_gradients: Callable[[slice, Tensor], RowGradients],
    gradients: Gradients,
    kept: Tensor | None = None,
) -> None:
    """Make the gradients, given the statistics `[5, N]` of a first pass and a function for those of the results.

    Exponentials that were kept are read where they serve, and stay: another backward pass may read them.
    """
    p: Tensor | None = None
    for block in rows.chunks():
        chunk, classes = rows.chunk(block)
        of_rows = stats[:, block]
        grads = row_gradients(block, of_rows)
        e = kept[block] if kept is not None and rows.exponentials_serve(grads) else None
        if e is not None and grads.is_scaled_exponentials:  # the entries are there already
            made = rows.matrix_of(chunk, classes, of_rows, grads, e, e)._replace(own_stored=None)
        else:
            p = rows.buffer(rows.plan.chunk_rows, rows.projection.p_dtype) if p is None else p
            made = rows.matrix_of(chunk, classes, of_rows, grads, p[: block.stop - block.start], e)
        gradients.add(block, chunk.end, made)
