"""The rows of distillation: divergences of a student's logits from its teachers', and their gradient, in blocks.

A block of rows has the student's logits, one teacher's at a time and, where there are several teachers, the float32 sum
of the gradients for those that are done. The last one's is added to that and rounded where it is multiplied.

Teachers that are known by the log-probabilities of some classes of each token, their top-k, have no logits. Their
divergences are functions of the student's log-probabilities of these classes, which the student's softmax gives, and
one pass writes the gradient for all of them where the sum begins. With a tail a teacher's other classes are one class
more, whose log-probability is made of their logits.

A teacher whose classes are some of the student's, in any order, has a map of these. It is compared with the student's
softmax over the classes that it has: their logits are gathered, and the gradient is added to that of their columns. The
divergence over all of the student's classes would ask for a probability of 0 of each that such a teacher does not
know, and be infinite for beta 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.ops.common.math import merged_sums_cpu
from llmk.ops.linear_loss.drivers._rows_call import NOT_IGNORED, check_classes
from llmk.ops.linear_loss.drivers.distillation_call import DistillationCall, TopkTeachers
from llmk.ops.linear_loss.kernels import BothRows, CrossEntropyTerm, Implementation
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows.classes import Classes, Numbering
from llmk.ops.linear_loss.rows.logits import LogitRows, scaled
from llmk.ops.linear_loss.rows.projection import Gradients
from llmk.registry import gradient_of


@dataclass(frozen=True)
class ClassLogprobs:
    """Some classes of a block's rows, and their log-probabilities in the student's softmax."""

    z: Tensor  # [M, V], the rows' logits
    transform: Transform
    classes: Classes
    stats: Tensor  # [2, M], the largest logits and the sums of exponentials, of all ranks
    logprobs: Tensor  # [M, K], 0 of a class that does not count

    @classmethod
    def of(
        cls, call: DistillationCall, z: Tensor, rank: Tensor, ids: Tensor, transform: Transform, ignore_index: int
    ) -> "ClassLogprobs":  # fmt: skip
        """Compute them from logits `[M, V]`, this rank's statistics of these `[2, M]`, and ids `[M, K]`."""
        V, numbering = z.shape[1], Numbering(ignore_index, call.first_class, call.num_classes)

        def logits(columns: Tensor) -> Tensor:
            return z.gather(1, columns.clamp(min=0).long()) if V > 0 else z.new_zeros(columns.shape)

        first = transform if call.shard is None else None  # what other ranks have comes before the transform
        classes = Classes.located(ids, numbering, V, logits, first)
        classes = classes if call.shard is None else classes.of_ranks(call.shard, transform)
        m, s = merged_sums_cpu(*call.own_shard.gather(rank).unbind(1))
        logprobs = (classes.y - m.unsqueeze(-1)) - s.log().unsqueeze(-1)
        return cls(z, transform, classes, torch.stack((m, s)), logprobs.masked_fill(~classes.counts, 0.0))


@dataclass(frozen=True)
class Tails:
    """All classes of a row but a teacher's largest, for each teacher: a sum near 1 does not say their probability."""

    y: Tensor  # [M, V], transformed logits
    slope: Tensor | float  # dy / dz
    is_largest: list[Tensor]  # [M, V] each, False in a row without any
    logsumexps: Tensor  # [teachers, M], of the others' logits
    probabilities: Tensor  # [teachers, M], of the teacher's largest together
    logprobs: Tensor  # [teachers, M], of the others together

    @classmethod
    def of(cls, found: ClassLogprobs, sizes: list[int]) -> "Tails":
        """Compute them from the classes of teachers, so many of each, and the student's log-probabilities of these."""
        (y, slope), (M, V), ids = found.transform(found.z.float()), found.z.shape, found.classes.ids
        is_largest, sums = [], []
        for each, of_each in zip(ids.split(sizes, -1), found.logprobs.split(sizes, -1), strict=True):
            sums.append(of_each.exp().masked_fill(each < 0, 0.0).sum(-1))
            columns = each.masked_fill((each < 0) | (each >= V), V)  # a wrong id makes the loss NaN elsewhere
            mask = torch.zeros((M, V + 1), dtype=torch.bool, device=y.device)
            is_largest.append(mask.scatter_(1, columns, True)[:, :V])
        logsumexps = torch.stack([y.masked_fill(mask, float("-inf")).logsumexp(-1) for mask in is_largest])
        (m, total), p = found.stats.unbind(), torch.stack(sums)
        # Neither a difference of numbers near each other.
        of_others = torch.where(p < 0.5, (-p).log1p(), (logsumexps - m) - total.log())
        return cls(y, found.transform.factor if slope is None else slope, is_largest, logsumexps, p, of_others)

    def add_gradients(self, grads: Tensor, out: Tensor) -> None:
        """Add the gradients of the logits, given those of the tails' log-probabilities, to `out [M, V]`."""
        columns = (each.unsqueeze(-1) for each in (grads, self.logsumexps, self.probabilities, self.logprobs))
        for mask, grad, logsumexp, p_largest, logprob in zip(self.is_largest, *columns, strict=True):
            # A class's share of the tail, less its probability.
            p = (self.y - (logsumexp - logprob)).exp()
            dy = torch.where(mask, -p, (self.y - logsumexp).exp() * p_largest)
            out.add_((dy * self.slope * grad).masked_fill(~mask.any(-1, keepdim=True), 0.0))


@dataclass(frozen=True)
class DivergenceRows:
    """The rows of a call whose tokens are compacted already.

    Attributes:
        impl: What computes them.
        call: The call.
        student, teachers: Their linear layers, in the same blocks.
        maps: The teachers' maps, safe to index with.
        topk: The teachers without logits.
        counts: 1 for a row that counts, 0 for others, float32 `[N]`.
    """

    impl: Implementation
    call: DistillationCall
    student: LogitRows
    teachers: list[LogitRows]
    maps: list[Tensor | None]
    topk: TopkTeachers | None
    counts: Tensor

    def losses(
        self, gradients: Gradients | None, loss_grads: Tensor, ce_grads: Tensor | None, scale: Tensor | None = None,
        sizes: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the divergences `[D, N]` and the sum of the cross entropies, given the gradient of each term.

        With `sizes` the largest size of each block's gradient of the logits is added to them, and to nothing else.
        """
        student, teachers, maps, topk, D = self.student, self.teachers, self.maps, self.topk, len(self.teachers)
        impl, call = self.impl, self.call
        loss_grads = scaled(loss_grads, scale)
        ce_grads = None if ce_grads is None else scaled(ce_grads, scale)
        wanted = gradients is not None or sizes is not None
        widest = max(teachers, key=lambda rows: rows.projection.V, default=student)
        buffer = widest.buffer(widest.plan.block_rows if teachers else 0)
        order = sorted(range(D), key=lambda i: maps[i] is None)  # those with a map first: the last writes all columns
        has_maps, has_plain = any(ids is not None for ids in maps), any(ids is None for ids in maps)
        totals = student.buffer(student.plan.block_rows if wanted and call.adds_gradients else 0, more=1)
        divergences, logprobs = [], [self.counts.new_zeros((1,))]
        for block, end, z, dz in student.blocks(gradients, self.counts, scale):
            assert z is not None
            assert dz is not None
            counts, wants_block, before, ce = self.counts[block], wanted and z.numel() > 0, None, None
            if ce_grads is not None:
                logprob, ce = self._cross_entropy_term(z, block, ce_grads)
                logprobs.append(logprob)
            losses, wide = [counts] * D, totals[: z.shape[0]]  # a column more takes what belongs nowhere
            total, plain = wide[:, :-1], None
            if wants_block and (has_maps or topk is not None):
                before = total
            if has_plain or topk is not None:
                plain = impl.divergence.statistics(z, counts, call.temperature, call.softcap)
            if topk is not None and plain is not None:  # whose gradient begins the sum
                grads = loss_grads[D:, block]
                losses.extend(self._topk_divergences(topk, z, block, plain, grads, wide if wants_block else None))
            elif before is not None:
                before.zero_()
            for i in order:
                ids, w = maps[i], teachers[i].logits(block, end, buffer)
                x = z if ids is None else z.index_select(1, ids)
                both = BothRows(x, w, counts, call.softmaxes(call.teachers[i]))
                losses[i], stats, sums = self._divergences(both, plain if ids is None else None)
                if wants_block:
                    grads = both, loss_grads[i, block], stats, sums
                    if ids is not None:
                        part = torch.empty(x.shape, dtype=torch.float32, device=x.device)
                        impl.divergence.gradients(*grads, None, None, part)
                        total.index_copy_(1, ids, part.add_(total.index_select(1, ids)))
                    else:
                        out = dz if i == order[-1] else total
                        impl.divergence.gradients(*grads, ce, before, out)
                        ce, before = None, out
            divergences.append(torch.stack(losses))
            if wants_block and not has_plain:
                if ce is not None:
                    self._add_cross_entropy(z, block, ce, wide)
                dz.copy_(total)
            if wants_block and sizes is not None:
                sizes.append(torch.linalg.vector_norm(dz, float("inf"), dtype=torch.float32))
        return torch.cat(divergences, 1), -torch.cat(logprobs).sum()

    def _topk_divergences(
        self, topk: TopkTeachers, z: Tensor, block: slice, rank: Tensor, loss_grads: Tensor, out: Tensor | None
    ) -> Tensor:
        """Return the divergences from top-k teachers, and write the gradient of all to `out`, given that of each."""
        transform = self._transform(self.call.temperature)
        found = ClassLogprobs.of(self.call, z, rank, topk.ids[block], transform, NOT_IGNORED)
        tails = Tails.of(found, topk.sizes) if topk.add_tail else None
        given = [found.logprobs] if tails is None else [found.logprobs, tails.logprobs]
        if out is not None:
            _, grads = gradient_of(lambda *given: (topk.losses(block, *given) * loss_grads).sum(), *given)
            assert grads[0] is not None
            self._add_gradient(found, grads[0], block, out, topk.sizes)
            if tails is not None:
                assert grads[1] is not None
                tails.add_gradients(grads[1], out[:, :-1])
        return topk.losses(block, *given)

    def _add_gradient(
        self, found: ClassLogprobs, grads: Tensor, block: slice, out: Tensor, sizes: list[int] | None = None
    ) -> None:
        """Write the gradient of logits to `out [M, V + 1]`, given that of log-probabilities, or add it.

        With `sizes` it is written, and no class is twice among so many; without, each row has one class.
        """
        z, transform, classes, V = found.z, found.transform, found.classes, found.z.shape[1]
        grads = grads.masked_fill(~classes.counts, 0.0)
        self.impl.divergence.softmax_gradient(
            z, self.counts[block], -grads.sum(-1), found.stats, out[:, :V], transform, sizes is None
        )
        entries = grads * (transform.factor if classes.slopes is None else classes.slopes)
        at = classes.columns.long().masked_fill(classes.columns < 0, V)
        sizes = [1] if sizes is None else sizes
        for columns, entry in zip(at.split(sizes, -1), entries.split(sizes, -1), strict=True):
            out.scatter_(1, columns, out.gather(1, columns) + entry)

    def _divergences(self, rows: BothRows, student: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the divergence `[M]` of vocabulary-parallel rows, and the statistics that its gradient needs.

        The student's statistics `[2, M]` of this rank are computed if they are not given.
        """
        impl, gathered, (z, w, counts, softmaxes) = self.impl.divergence, self.call.own_shard.gather, rows
        if student is None:
            student = impl.statistics(z, counts, softmaxes.temperature, softmaxes.softcap)
        teacher = impl.statistics(w, counts, softmaxes.teacher_temperature, softmaxes.teacher_softcap)
        m, s = merged_sums_cpu(*gathered(torch.stack((student, teacher))).unbind(2))  # of rank, tensor, number
        stats = torch.stack((m, s.log()), dim=1).view(4, z.shape[0])
        loss, shift = gathered(impl.sums(rows, stats, None)).sum(0)
        rest = torch.zeros_like(shift)
        if softmaxes.exact:
            rest = gathered(impl.sums(rows, stats, shift)).sum(0)[1]
        return loss, stats, torch.stack((loss, shift, rest))

    def _add_cross_entropy(self, z: Tensor, block: slice, ce: CrossEntropyTerm, out: Tensor) -> None:
        """Add the gradient of the cross entropy to that of a block no teacher of which writes all columns."""
        self._add_gradient(self._labels(z, block), -ce.grad.unsqueeze(-1), block, out)

    def _cross_entropy_term(self, z: Tensor, block: slice, grads: Tensor) -> tuple[Tensor, CrossEntropyTerm]:
        """Return the labels' log-probabilities at temperature 1, and the term of the logits' gradient."""
        found = self._labels(z, block)
        target = found.classes.ids.reshape(-1).contiguous()  # labels may be strided
        return found.logprobs.view(-1), CrossEntropyTerm(target, self.call.first_class, grads[block], found.stats)

    def _labels(self, z: Tensor, block: slice) -> ClassLogprobs:
        assert self.call.labels is not None
        target = self.call.labels.reshape(-1, 1)[block]
        check_classes(self.impl, target, self.call)
        rank = self.impl.divergence.statistics(z, self.counts[block], 1.0, self.call.softcap)
        return ClassLogprobs.of(self.call, z, rank, target, self._transform(1.0), self.call.ignore_index)

    def _transform(self, temperature: float) -> Transform:
        return Transform(1.0, 1.0 / temperature, self.call.softcap)
