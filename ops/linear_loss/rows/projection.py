"""The projection of a loss over a vocabulary, a chunk of rows at a time, and its gradients.

A projection computes three things of a chunk: the logits of some classes, the statistics of its rows with their
exponentials, and the gradients' matrix P where the exponentials do not serve. `Gradients` adds up what P gives. There
are two of each: of 16-bit matrices on a GPU by the kernels of `products.py`, where no logits exist; and of float32
matrices in plain PyTorch, where a chunk's logits become what P is. A CPU computes with the second in float32 whatever
the dtype, and rounds at the end.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import CompactedTokens, VocabShard, gather_rows, ordered
from llmk.ops.linear_loss.chunked.plan import Plan
from llmk.ops.linear_loss.rows import products
from llmk.ops.linear_loss.rows.classes import Classes, Numbering
from llmk.ops.linear_loss.rows.products import FLOAT16_SCALE, OwnClasses, Rows, Weights
from llmk.ops.linear_loss.rows.softmax import (
    RowGradients,
    relative_to,
    statistics,
    with_classes,
    with_tail,
)

ALIGNED = 16
"""The row stride of a chunk's P is a multiple of this many elements, whatever V is."""
LARGEST_EXPONENT = 100


class Chunk(NamedTuple):
    """Some rows of a softmax over a projection, of which those count that the mask says."""

    rows: slice
    end: Tensor  # int32 [1], no more than the first so many count
    mask: Tensor  # bool [M]
    own: Tensor  # int32 [M], the column of the row's own class, negative where it is elsewhere
    y_own: Tensor  # float32 [M], its transformed logit, of all ranks; -inf for no class
    reference: Tensor  # float32 [M], the same for kernels: +inf where a row does not count, NaN where that is +inf
    slope_own: Tensor | None  # float32 [M], dy / dz of it; None where that is the same for all
    left_out: Tensor | None = None  # int32 [M, K], columns that are left out of the sums besides, in their order
    y_left_out: Tensor | None = None  # float32 [M, K], the logits of other classes than the own that are, of all ranks

    @property
    def own_classes(self) -> OwnClasses:
        return OwnClasses(self.mask, self.own, self.y_own, self.slope_own)


class RowMatrix(NamedTuple):
    """P of some rows, which are multiplied by factors: P's own column has its entry once it is added."""

    p: Tensor  # [M, V]
    factors: Tensor  # float32 [2, M], the rows' factors, and what rounding the entries of own columns loses
    own: Tensor | None = None  # int32 [M], own columns; None where no row has one
    own_stored: Tensor | None = None  # float32 [M], their entries; None where P has them
    columns: Tensor | None = None  # int32 [M, K], of entries that take another column's place
    stored: Tensor | None = None  # float32 [M, K]


RowsOfLogits: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What the logits of a chunk give: statistics `[5, M]`, or `[6, M]` with a tail; logits times class weights `[M]`; the
mask `[M]` of the rows whose own class has the largest logit; and the results `[4, M]` of that where they are known."""


def matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized matrix whose rows begin at aligned addresses."""
    stride = -(-max(columns, 1) // ALIGNED) * ALIGNED
    return torch.empty((rows, stride), dtype=dtype, device=device)[:, :columns]


class KernelProjection:
    """A projection of 16-bit rows by the kernels of `products.py`.

    float16 holds neither exponentials nor gradients of any size. So its statistics are relative to the rows' largest
    logits, no exponentials are stored, and `gradients` are at most 1 each.
    """

    def __init__(self, x: Tensor, weights: Weights, shard: VocabShard | None) -> None:
        self.x, self.weights, self.shard = x if x.stride(-1) == 1 else x.contiguous(), weights, shard
        self.p_dtype, self.V = x.dtype, weights.weight.shape[0]
        self.scratch: Tensor | None = None
        self.without_own: tuple[Tensor, Tensor] | None = None

    @property
    def keeps_exponentials(self) -> bool:
        """True where P may hold exponentials until their rows' gradients are known."""
        return self.x.dtype == torch.bfloat16

    def scratch_rows(self, rows: int) -> Tensor:
        """Return a buffer for so many rows, the same for all chunks."""
        if self.scratch is None or self.scratch.shape[0] < rows:
            self.scratch = torch.empty((rows, self.x.shape[1]), dtype=self.x.dtype, device=self.x.device)
        return self.scratch[:rows]

    def classes(self, rows: slice, ids: Tensor, numbering: Numbering, *, raw: bool, left_out: bool = False) -> Classes:
        """Find the ids `[M, K]` of some rows, and compute their logits, without their transform where `raw`.

        Plain PyTorch takes those that `statistics` has, unless each row's class is left out of its sums.
        """
        transform = None if raw else self.weights.transform
        return products.located_classes(self.x[rows], self.weights, ids, numbering, transform)

    def statistics(self, chunk: Chunk, p: Tensor | None, moments: bool) -> RowsOfLogits:
        """Return what a chunk's logits give; write exponentials to P."""
        rows = Rows(self.x[chunk.rows], chunk.reference.unsqueeze(0), chunk.own, chunk.end)
        parts = products.part_sums(rows, self.V)
        if self.V > 0:
            products.launch_logits(rows, self.weights, p, parts, moments=moments, left_out=chunk.left_out)
        weighted = self.weights.class_weight is not None
        direct = products.are_direct(moments, chunk.left_out)
        sums, far = products.combined(parts, rows, moments=moments, weighted=weighted, direct=direct)
        p_is_made = direct and self.shard is None  # else what P is relative to is known later
        if direct and self.V > 0:
            self._make_far_rows(rows, sums[1:2], far, p if p_is_made else None, (parts, sums))
        own_weight = self.weights.of_classes(chunk.own)
        if own_weight is not None:
            sums[3] += (own_weight * chunk.y_own).masked_fill(chunk.own < 0, 0.0)
        if self.shard is not None:
            sums = self._over_ranks(self.shard, sums)
        tail, m, moment, weighted = sums
        if chunk.y_left_out is not None:
            total, moment, largest = with_classes(tail, moment, m, chunk.y_left_out)
            sums = torch.stack((total, largest, moment, weighted))
        stats, results, flags = products.row_statistics(sums, chunk.y_own, chunk.mask)
        if p is not None and self.V > 0 and not p_is_made:
            self._make_far_rows(rows, stats[:1], flags[1], p)
        if chunk.y_left_out is not None:
            stats = with_tail(stats, (tail.log() + (m - stats[0])).masked_fill(~chunk.mask, 0.0))
        return stats, results[3], flags[0].view(torch.bool), results

    def _over_ranks(self, shard: VocabShard, sums: Tensor) -> Tensor:
        """Return the sums `[4, M]` of all ranks from those of each, which are relative to its own largest logit."""
        total, m, moment, weighted = shard.gather(sums).unbind(1)
        largest = m.amax(0)
        total, moment = relative_to(total, moment, m, largest)
        return torch.stack((total.sum(0), largest, moment.sum(0), weighted.sum(0)))

    def _make_far_rows(
        self, rows: Rows, reference: Tensor, far: Tensor, p: Tensor | None,
        sums: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Make the exponentials again of rows whose own class is far below the largest, relative to that.

        So are their sums, given their parts and where they belong.
        """
        place, number = ordered(far, torch.int32, far.shape[0])
        scratch = self.scratch_rows(rows.x.shape[0])
        gather_rows(rows.x, place, scratch, number)
        listed = Rows(scratch, reference, rows.own, number)
        parts, out = (None, None) if sums is None else sums
        weights = self.weights if sums is not None else self.weights._replace(class_weight=None)
        products.launch_logits(listed, weights, p, parts, place=place)
        if parts is not None and out is not None:
            products.combine_listed(parts, listed, place, out, weighted=weights.class_weight is not None)

    def exponentials(self, chunk: Chunk, stats: Tensor, grads: RowGradients, p: Tensor) -> RowMatrix:
        """Return the gradient of a chunk's logits from its exponentials in P, where they serve."""
        out = products.coefficients(stats, chunk.own_classes, self.weights, grads, exponentials=True)
        return RowMatrix(p, out[4:6], chunk.own, out[6])

    def made(
        self, chunk: Chunk, stats: Tensor, grads: RowGradients, size: Tensor | None, p: Tensor, e: Tensor | None
    ) -> RowMatrix:  # fmt: skip
        """Make the gradient of the logits of a chunk whose rows have one class, over each row's size where given.

        It is made of exponentials e where they are given.
        """
        out = products.coefficients(stats, chunk.own_classes, self.weights, grads, size, exponentials=False)
        if e is None:
            self._make_gradients(chunk, out[:4], grads.weighted is not None, p)
        else:
            u = None if grads.weighted is None else out[3]
            self.from_exponentials(chunk, e, stats[4], (out[1], out[2], u), p)
        return RowMatrix(p, out[4:6], chunk.own, out[6])

    def own_entries(self, chunk: Chunk, stats: Tensor) -> Tensor:
        """Return what stands among exponentials at own columns where only log-probabilities have a gradient."""
        grads = RowGradients(None)
        return products.coefficients(stats, chunk.own_classes, self.weights, grads, exponentials=True)[6]

    def gradients(self, chunk: Chunk, reference: Tensor, a: Tensor, b: Tensor, u: Tensor | None, p: Tensor) -> None:
        """Write E (a + b log E) + u w to P, with the exponentials E relative to the references."""
        reference = reference.masked_fill(~chunk.mask, float("inf"))
        numbers = torch.stack((reference, a, b, torch.zeros_like(a) if u is None else u))
        self._make_gradients(chunk, numbers, u is not None, p)

    def _without_own(self, rows: slice, count: Tensor) -> Rows:
        """Return rows whose sums leave out no class, and are relative to their largest logits."""
        x = self.x[rows]
        if self.without_own is None or self.without_own[1].shape[0] != x.shape[0]:
            lowest = torch.full((1, x.shape[0]), float("-inf"), dtype=torch.float32, device=x.device)
            self.without_own = lowest, torch.full(x.shape[:1], -1, dtype=torch.int32, device=x.device)
        return Rows(x, *self.without_own, count)

    def logits(self, rows: slice, count: Tensor, out: Tensor) -> None:
        """Write the transformed logits of some rows, of which the first `count` count, to `out [M, V]`, float32."""
        if self.V > 0:
            products.launch_logits(self._without_own(rows, count), self.weights, out, logits=True)

    def logits_and_sums(self, rows: slice, count: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the logits; return the rows' sums of exponentials and what they are relative to, `[2, M]`.

        That is their largest logit. Also return these two numbers of tiles, `[2 or more, tiles, M]`, where kernels have
        made them.
        """
        of_rows = self._without_own(rows, count)
        parts = products.part_sums(of_rows, self.V)
        if self.V > 0:
            products.launch_logits(of_rows, self.weights, out, parts, logits=True)
        sums, _ = products.combined(parts, of_rows, moments=False, weighted=False, direct=False)
        return sums[:2], parts

    def from_exponentials(
        self, chunk: Chunk, e: Tensor, scale: Tensor, numbers: tuple[Tensor, Tensor, Tensor | None], p: Tensor
    ) -> None:
        """Write the same as `gradients` where E is `scale` times the exponentials e, which P may be.

        The numbers are a, b and u; b, of an entropy, is 0 in 16 bits.
        """
        if self.V > 0:
            a, _, u = numbers
            products.gradients_of_exponentials(e, scale, a, u, self.weights.class_weight, p, chunk.end)

    def from_logits(self, chunk: Chunk, y: Tensor, reference: Tensor, a: Tensor, p: Tensor) -> None:
        """Write the same as `gradients` from transformed logits where there is no b, u or cap."""
        if self.V > 0:
            products.gradients_of_logits(y, reference, a, p, chunk.end)

    def _make_gradients(self, chunk: Chunk, numbers: Tensor, weighted: bool, p: Tensor) -> None:
        weights = self.weights if weighted else self.weights._replace(class_weight=None)
        rows = Rows(self.x[chunk.rows], numbers, chunk.own, chunk.end)
        if self.V > 0:
            products.launch_logits(rows, weights, p, gradients=True, left_out=chunk.left_out)

    def put(self, p: Tensor, columns: Tensor, entries: Tensor, count: Tensor) -> None:
        """Put entries `[M, K]` into P; where a column is negative P stays as it is."""
        products.put_entries(p, columns, entries, count)


class MatrixProjection:
    """A projection of float32 rows in plain PyTorch, with statistics relative to the rows' largest logits.

    `KernelProjection` has the same methods, and says what they do.
    """

    p_dtype = torch.float32
    keeps_exponentials = True

    def __init__(self, x: Tensor, weights: Weights, shard: VocabShard | None) -> None:
        dtype, weight, bias = x.dtype, weights.weight.float(), weights.bias
        self.x, self.shard, self.rounded_to = x.float(), shard, dtype if weights.transform.rounded else None
        if dtype != torch.float32:
            weights = weights._replace(weight=weight, bias=None if bias is None else bias.float())
        self.weights = weights
        self.V, self.factor = weight.shape[0], weights.transform.factor
        self._shared: tuple[slice, Tensor] | None = None

    def _all_logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return the logits of some rows, once for all that is asked of them; they may be in `out`."""
        if self._shared is not None and self._shared[0] == rows:
            logits, self._shared = self._shared[1], None
            return logits
        z = matrix(rows.stop - rows.start, self.V, torch.float32, self.x.device) if out is None else out
        torch.mm(self.x[rows], self.weights.weight.t(), out=z)
        if self.weights.bias is not None:
            z += self.weights.bias
        return z if self.rounded_to is None else z.to(self.rounded_to).float()

    def classes(self, rows: slice, ids: Tensor, numbering: Numbering, *, raw: bool, left_out: bool = False) -> Classes:
        transform = None if raw else self.weights.transform
        return Classes.located(ids, numbering, self.V, partial(self._of, rows, left_out), transform)

    def _of(self, rows: slice, left_out: bool, columns: Tensor) -> Tensor:
        """Return the float32 logits `[M, K]` of columns, any number of a negative one."""
        if self.V == 0:
            return torch.zeros(columns.shape, dtype=torch.float32, device=self.x.device)
        ids = columns.clamp(min=0).long()
        if not left_out:
            logits = self._all_logits(rows)
            self._shared = rows, logits
            return logits.gather(1, ids)
        z = (self.x[rows] * self.weights.weight[ids.squeeze(1)]).sum(-1, keepdim=True)  # there may be no second pass
        z = z if self.weights.bias is None else z + self.weights.bias[ids]
        return z if self.rounded_to is None else z.to(self.rounded_to).float()

    def logits(self, rows: slice, count: Tensor, out: Tensor) -> None:
        out.copy_(self.weights.transform(self._all_logits(rows, out))[0])

    def logits_and_sums(self, rows: slice, count: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
        self.logits(rows, count, out)
        if self.V == 0:
            m = torch.full(out.shape[:1], float("-inf"), dtype=torch.float32, device=out.device)
            return torch.stack((torch.zeros_like(m), m)), None
        m = out.amax(-1)
        base = m.masked_fill(m == float("-inf"), 0.0).unsqueeze(-1)
        return torch.stack((_row_sums((out - base).exp_()), m)), None

    def _transformed(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y; the same but -inf of the rows' own classes and of rows that do not count; and dy / dz."""
        all_y, slope = self.weights.transform(self._all_logits(chunk.rows))
        y = all_y.masked_fill(~chunk.mask.unsqueeze(-1), float("-inf"))
        if self.V > 0:
            has_own, own = (chunk.own >= 0).unsqueeze(-1), chunk.own.clamp(min=0).long().unsqueeze(-1)
            y.scatter_(1, own, torch.where(has_own, float("-inf"), y.gather(1, own)))
        if chunk.left_out is not None:
            columns = torch.where(chunk.left_out < 0, self.V, chunk.left_out).long()
            is_out = torch.zeros((y.shape[0], self.V + 1), dtype=torch.bool, device=y.device)
            y = y.masked_fill(is_out.scatter_(1, columns, True)[:, : self.V], float("-inf"))
        return all_y, y, slope

    def statistics(self, chunk: Chunk, p: Tensor | None, moments: bool) -> RowsOfLogits:
        all_y, y, slope = self._transformed(chunk)
        m = y.amax(-1) if self.V > 0 else torch.full_like(chunk.y_own, float("-inf"))
        if self.shard is not None:
            m = self.shard.gather(m).amax(0)
        reference = torch.maximum(m, chunk.y_own)
        base = reference  # what exponentials are relative to; those of a tail to its own largest logit
        if chunk.left_out is not None:
            base = m.masked_fill(m == float("-inf"), 0.0)
        weighted = nothing = torch.zeros_like(reference)
        if self.weights.class_weight is not None:
            weighted = (all_y * self.weights.class_weight.float()).sum(-1)
        distance = y.sub_(base.unsqueeze(-1)).masked_fill_(~chunk.mask.unsqueeze(-1), float("-inf"))
        e = distance.exp()
        moment = torch.where(e > 0, e * distance, 0.0).sum(-1) if moments else nothing
        rest = _row_sums(e)
        if self.shard is not None:  # what each rank has of its own classes, in the ranks' order
            rest, moment, weighted = self.shard.gather(torch.stack((rest, moment, weighted))).sum(0).unbind()
        log_tail = None
        if chunk.y_left_out is not None:
            tail, tail_m = rest, m
            rest, moment, m = with_classes(rest, moment, m, chunk.y_left_out)
            reference = torch.maximum(m, chunk.y_own)
            rest, moment = relative_to(rest, moment, m, reference)
            log_tail = (tail.log() + (tail_m - reference)).masked_fill(~chunk.mask, 0.0)
        if p is not None:
            p.copy_(e if slope is None else e * slope)
        distance = chunk.y_own - reference
        own = distance.exp()
        moment = moment + torch.where(own > 0, own * distance, 0.0)
        stats = statistics(reference, rest, own, moment, chunk.mask)
        stats = stats if log_tail is None else with_tail(stats, log_tail)
        return stats, weighted, chunk.mask & (m <= chunk.y_own), None

    def exponentials(self, chunk: Chunk, stats: Tensor, grads: RowGradients, p: Tensor) -> RowMatrix:
        rest, own, factor, ignored = stats[1], stats[2], self.factor, ~chunk.mask
        g = torch.zeros_like(rest) if grads.logprobs is None else grads.logprobs.squeeze(1).masked_fill(ignored, 0.0)
        total, stored = own + rest, self.own_entries(chunk, stats)
        if grads.logsumexp is None:
            return RowMatrix(p, (-g / total * factor).unsqueeze(0), chunk.own, stored)
        of_all = grads.logsumexp.masked_fill(ignored, 0.0)
        entry = (g * rest + of_all * own) / total
        entry = entry * (factor if chunk.slope_own is None else chunk.slope_own)
        row_factor, least = (of_all - g) / total * factor, entry.abs() * products.LEAST_FACTOR / total
        row_factor = torch.where(row_factor.abs() < least, least, row_factor)
        stored = torch.where(row_factor == 0, 0.0, entry / row_factor)
        return RowMatrix(p, row_factor.unsqueeze(0), chunk.own, stored)

    def own_entries(self, chunk: Chunk, stats: Tensor) -> Tensor:
        return -stats[1] if chunk.slope_own is None else -stats[1] * chunk.slope_own

    def gradients(self, chunk: Chunk, reference: Tensor, a: Tensor, b: Tensor, u: Tensor | None, p: Tensor) -> None:
        _, y, slope = self._transformed(chunk)
        distance = y.sub_(reference.unsqueeze(-1)).masked_fill_(~chunk.mask.unsqueeze(-1), float("-inf"))
        value = self._gradients(chunk, distance.exp(), distance, (a, b, u))
        p.copy_(value if slope is None else value * slope)

    def from_exponentials(
        self, chunk: Chunk, e: Tensor, scale: Tensor, numbers: tuple[Tensor, Tensor, Tensor | None], p: Tensor
    ) -> None:
        e = e * scale.unsqueeze(-1)
        p.copy_(self._gradients(chunk, e, e.log(), numbers))

    def _gradients(
        self, chunk: Chunk, e: Tensor, log_e: Tensor, numbers: tuple[Tensor, Tensor, Tensor | None]
    ) -> Tensor:  # fmt: skip
        (a, b, u), class_weight = numbers, self.weights.class_weight
        value = torch.where(e > 0, e * (a.unsqueeze(-1) + b.unsqueeze(-1) * log_e), e * a.unsqueeze(-1))
        if u is not None and class_weight is not None:
            value += u.unsqueeze(-1) * class_weight.float()
        return value.masked_fill_(~chunk.mask.unsqueeze(-1), 0.0)

    def from_logits(self, chunk: Chunk, y: Tensor, reference: Tensor, a: Tensor, p: Tensor) -> None:
        torch.mul((y - reference.unsqueeze(-1)).exp_(), a.unsqueeze(-1), out=p)

    def put(self, p: Tensor, columns: Tensor, entries: Tensor, count: Tensor) -> None:
        if self.V == 0:
            return
        at = columns.clamp(min=0).long()
        for i in range(columns.shape[-1]):
            one = slice(i, i + 1)
            p.scatter_(1, at[:, one], torch.where(columns[:, one] >= 0, entries[:, one], p.gather(1, at[:, one])))


def _row_sums(x: Tensor) -> Tensor:
    """Return the sums over the last axis: `torch.sum` of a CPU adds up the lanes of a vector one after the other."""
    return x.sum(-1, dtype=torch.float64).float() if x.is_cpu else x.sum(-1)


Projection: TypeAlias = KernelProjection | MatrixProjection


class ChunkedRows:
    """The rows of a projection, which are these tokens, in the chunks of a plan."""

    def __init__(self, projection: Projection, compacted: CompactedTokens, plan: Plan) -> None:
        self.projection, self.compacted, self.plan, self.x = projection, compacted, plan, projection.x
        self._ends: dict[int, Tensor] = {}
        self._chunk_ends: Tensor | None = None

    def chunks(self) -> list[slice]:
        """Return the rows of each chunk."""
        N, step = self.x.shape[0], self.plan.chunk_rows
        return [slice(start, min(start + step, N)) for start in range(0, N, step)]

    def buffer(self, rows: int, dtype: torch.dtype = torch.float32, more: int = 0) -> Tensor:
        """Return an uninitialized matrix of so many rows, or of all, and some more columns."""
        return matrix(min(rows, self.x.shape[0]), self.projection.V + more, dtype, self.x.device)

    def end(self, rows: slice) -> Tensor:
        """Return how many rows of a chunk, or of a block of it, count as far as the device knows, int32 `[1]`."""
        number, step = rows.stop - rows.start, self.plan.chunk_rows
        if self.compacted.counts is None:
            if number not in self._ends:  # most have as many
                self._ends[number] = torch.full((1,), number, dtype=torch.int32, device=self.x.device)
            return self._ends[number]
        if self._chunk_ends is None:
            self._chunk_ends = self.compacted.ends(self.compacted.counts, step)
        i, first = divmod(rows.start, step)
        end = self._chunk_ends[i : i + 1]
        is_chunk = first == 0 and (number >= step or rows.stop == self.x.shape[0])
        return end if is_chunk else (end - first).clamp_(0, number)


class Gradients:
    """The gradients of input, weight and bias that are needed, as sums over chunks; the others are empty.

    Args:
        rows: All rows.
        need: Which are needed.
        dtypes: The dtypes in which they are returned.
    """

    def __init__(self, rows: ChunkedRows, need: Sequence[bool], dtypes: Sequence[torch.dtype]) -> None:
        projection, compacted = rows.projection, rows.compacted
        self.projection, self.compacted, self.need, self.dtypes = projection, compacted, tuple(need), tuple(dtypes)
        x, (V, H) = projection.x, projection.weights.weight.shape
        device, own_kernels = x.device, isinstance(projection, KernelProjection)
        rounded = rows.plan.rounded_sums and own_kernels and x.dtype == torch.bfloat16
        # Kernels write the rows that count to their places; of other tokens nothing is written.
        make = torch.empty if compacted.index is None else torch.zeros
        make_sum = torch.empty if x.shape[0] > 0 else torch.zeros
        dx_dtype = self.dtypes[0] if own_kernels else torch.float32
        self.dx = make((*compacted.shape, H) if need[0] else (0,), dtype=dx_dtype, device=device)
        self.dx_rows = self.dx.view(-1, H) if need[0] else self.dx
        self.dw = make_sum((V, H) if need[1] else (0,), dtype=x.dtype if rounded else torch.float32, device=device)
        self.db = make_sum((V,) if need[2] else (0,), dtype=torch.float32, device=device)

    def add(self, at: slice, end: Tensor, rows: RowMatrix) -> None:
        """Add the gradients of some rows, of which the first `end` count; the first ones overwrite."""
        projection, first, p = self.projection, at.start == 0, rows.p
        if projection.V == 0:
            if self.need[0]:
                self.dx.zero_()
            return
        if isinstance(projection, KernelProjection):
            return self._add_by_kernels(projection, at, end, rows)
        if rows.own is not None and rows.own_stored is not None:
            projection.put(p, rows.own.unsqueeze(-1), rows.own_stored.unsqueeze(-1), end)
        if rows.columns is not None and rows.stored is not None:
            projection.put(p, rows.columns, rows.stored, end)
        factor = rows.factors[0].unsqueeze(-1)
        counts = factor != 0
        if self.need[0]:
            dx = torch.where(counts, torch.mm(p, projection.weights.weight) * factor, 0.0)
            self.dx_rows[at if self.compacted.index is None else self.compacted.index[at]] = dx
        x = torch.where(counts, projection.x[at] * factor, 0.0)
        if self.need[1] and first:
            torch.mm(p.t(), x, out=self.dw)
        elif self.need[1]:
            self.dw.addmm_(p.t(), x)
        if self.need[2]:
            db = torch.mv(p.t(), torch.where(counts, factor, 0.0).squeeze(-1))
            self.db = db if first else self.db.add_(db)

    def _add_by_kernels(self, projection: KernelProjection, at: slice, count: Tensor, rows: RowMatrix) -> None:
        first, scaled = at.start == 0, projection.scratch_rows(rows.p.shape[0])
        scale, inverse, unit, factors = None, None, 1.0, rows.factors
        if rows.p.dtype == torch.float16:
            scale, inverse, unit = _float16_scales(rows.factors[0])
            factors = torch.cat((factors[:1] / unit, factors[1:]))
        x, entry = projection.x[at], rows.own_stored
        if entry is not None and unit != 1.0:
            entry = entry * unit
        of_rows = Rows(x, rows.factors, rows.own, count)
        products.scale_rows(of_rows, rows.p, scaled, rows.factors[0], entry, scale)
        if rows.columns is not None and rows.stored is not None:
            projection.put(rows.p, rows.columns, rows.stored * unit, count)
        weight, index = projection.weights.weight, self.compacted.index
        place = None if index is None else index[at]
        dx = self.dx_rows if index is not None else self.dx_rows[at]
        if all(self.need[:2]) and products.fit_one_launch(of_rows, rows.p, scaled, weight, self.dw):
            of_input = products.InputGradient(factors, dx, place)
            products.both_gradients(of_rows, rows.p, weight, of_input, scaled, self.dw, add=not first)
        else:
            if self.need[0]:
                products.input_gradient(of_rows, rows.p, weight, factors, dx, place)
            if self.need[1]:
                products.weight_gradient(rows.p, scaled, self.dw, count, add=not first, scale=inverse)
        if self.need[2]:
            products.bias_gradient(rows.p, rows.factors[0], self.db, count, scale=1 / unit, add=not first)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw, db = map(torch.Tensor.to, (self.dx, self.dw, self.db), self.dtypes)
        return dx, dw, db


def _float16_scales(factor: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return what factors are multiplied by to be at most 1, what takes it off the products, and P's own scale."""
    largest = factor.abs().amax()
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0)).exponent
    exponent = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    one = torch.ones_like(largest)
    scale, inverse = torch.ldexp(one, -exponent), torch.ldexp(one, exponent)  # noqa: TID251  in a kernel op
    return scale, inverse / FLOAT16_SCALE, FLOAT16_SCALE


def projection_of(input: Tensor, weights: Weights, shard: VocabShard | None, by_kernels: bool) -> Projection:
    """Return the projection of rows `[..., H]`: by kernels on a GPU where they have 16 bits."""
    x = input.reshape(-1, input.shape[-1])
    if by_kernels and x.dtype != torch.float32:
        return KernelProjection(x, weights, shard)
    return MatrixProjection(x, weights, shard)
