"""The rows of distillation: divergences of a student's logits from its teachers', and their gradient, in blocks.

A block of rows has the student's logits, one teacher's at a time and, where there are several teachers, the float32 sum
of the gradients for those that are done. The last one's is added to that and rounded where it is multiplied.

Teachers that are known by the log-probabilities of some classes of each token, their top-k, have no logits. Their
divergences are functions of the student's log-probabilities of these classes, which one pass over a block's logits
gives for all of them, and another writes the gradient for all of them where the sum begins.

A teacher whose classes are some of the student's, in any order, has a map of these. It is compared with the student's
softmax over the classes that it has: their logits are gathered, and the gradient is added to that of their columns. The
divergence over all of the student's classes would ask for a probability of 0 of each that such a teacher does not
know, and be infinite for beta 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.ops.linear_loss.drivers._rows_call import NOT_IGNORED
from llmk.ops.linear_loss.drivers._tails import Tails
from llmk.ops.linear_loss.drivers.distillation_call import DistillationCall, TopkTeachers
from llmk.ops.linear_loss.kernels import CrossEntropyTerm, Implementation, LogitTransform, Softmaxes
from llmk.ops.linear_loss.rows.logits import LogitRows, scaled
from llmk.ops.linear_loss.rows.projection import Gradients
from llmk.registry import gradient_of


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
        widest = max(teachers, key=lambda rows: rows.layer.V, default=student)
        buffer = widest.buffer(widest.plan.block_rows if teachers else 0)
        order = sorted(range(D), key=lambda i: maps[i] is None)  # those with a map first: the last writes all columns
        has_maps, has_plain = any(ids is not None for ids in maps), any(ids is None for ids in maps)
        totals = student.buffer(student.plan.block_rows if wanted and call.adds_gradients else 0)
        divergences, logprobs = [], [self.counts.new_zeros((1,))]
        for block, end, z, dz in student.blocks(gradients, self.counts, scale):
            assert z is not None
            assert dz is not None
            counts, wants_block, before, ce = self.counts[block], wanted and z.numel() > 0, None, None
            if ce_grads is not None:
                logprob, ce = self._cross_entropy_term(z, block, ce_grads)
                logprobs.append(logprob)
            losses, total = [counts] * D, totals[: z.shape[0]]
            if wants_block and (has_maps or topk is not None):
                before = total
            if topk is not None:  # whose gradient begins the sum
                losses.extend(self._topk_divergences(topk, z, block, loss_grads[D:, block], before))
            elif before is not None:
                before.zero_()
            plain = impl.divergence.statistics(z, counts, call.temperature, call.softcap) if has_plain else None
            for i in order:
                ids, softmaxes = maps[i], call.softmaxes(call.teachers[i])
                x, w = z if ids is None else z.index_select(1, ids), teachers[i].logits(block, end, buffer)
                losses[i], stats, sums = self._divergences(x, w, counts, plain if ids is None else None, softmaxes)
                if wants_block:
                    grads = counts, loss_grads[i, block], stats, sums
                    if ids is not None:
                        part = torch.empty(x.shape, dtype=torch.float32, device=x.device)
                        impl.divergence.gradients(x, w, *grads, None, None, part, softmaxes)
                        total.index_copy_(1, ids, part.add_(total.index_select(1, ids)))
                    else:
                        out = dz if i == order[-1] else total
                        impl.divergence.gradients(x, w, *grads, ce, before, out, softmaxes)
                        ce, before = None, out
            divergences.append(torch.stack(losses))
            if wants_block and not has_plain:
                self._finish(z, ce, total, dz)
            if wants_block and sizes is not None:
                sizes.append(torch.linalg.vector_norm(dz, float("inf"), dtype=torch.float32))
        return torch.cat(divergences, 1), -torch.cat(logprobs).sum()

    def _topk_divergences(
        self, topk: TopkTeachers, z: Tensor, block: slice, loss_grads: Tensor, out: Tensor | None
    ) -> Tensor:
        """Return the divergences from top-k teachers, and write the gradient of all to `out`, given that of each."""
        impl, call = self.impl, self.call
        transform, ids = self._transform(call.temperature, NOT_IGNORED), topk.ids[block]
        rank = impl.logprobs.statistics(z, ids, transform)
        logprobs, stats = impl.logprobs.combine(call.gather_ranks(rank), ids, transform)
        tails = Tails.of(call, topk, z, ids, logprobs, stats) if topk.add_tail else None
        given = [logprobs] if tails is None else [logprobs, tails.logprobs]
        if out is not None:
            _, grads = gradient_of(lambda *given: (topk.losses(block, *given) * loss_grads).sum(), *given)
            assert grads[0] is not None
            impl.logprobs.gradients(grads[0], z, ids, stats, out, transform)
            if tails is not None:
                assert grads[1] is not None
                tails.add_gradients(grads[1], out)
        return topk.losses(block, *given)

    def _divergences(
        self, z: Tensor, w: Tensor, counts: Tensor, student: Tensor | None, softmaxes: Softmaxes
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the divergence `[M]` of vocabulary-parallel rows, and the statistics that its gradient needs.

        The student's statistics `[2, M]` of this rank are computed if they are not given.
        """
        impl, call = self.impl, self.call

        def gathered(parts: Tensor, *shape: int) -> Tensor:
            return call.gather_ranks(parts).view(call.ranks, *shape, z.shape[0])

        if student is None:
            student = impl.divergence.statistics(z, counts, softmaxes.temperature, softmaxes.softcap)
        teacher = impl.divergence.statistics(w, counts, softmaxes.teacher_temperature, softmaxes.teacher_softcap)
        parts = gathered(torch.cat((student, teacher)), 2, 2)  # rank, tensor, number
        m = parts[:, :, 0].amax(0)
        base = torch.where(m == float("-inf"), 0.0, m)
        logsum = (parts[:, :, 1] * (parts[:, :, 0] - base).exp()).sum(0).log()
        stats = torch.stack((m, logsum), dim=1).view(4, z.shape[0])
        loss, shift = gathered(impl.divergence.sums(z, w, counts, stats, None, softmaxes), 2).sum(0)
        rest = torch.zeros_like(shift)
        if softmaxes.exact:
            rest = gathered(impl.divergence.sums(z, w, counts, stats, shift, softmaxes), 2).sum(0)[1]
        return loss, stats, torch.stack((loss, shift, rest))

    def _finish(self, z: Tensor, ce: CrossEntropyTerm | None, total: Tensor, dz: Tensor) -> None:
        """Write the gradient of a block no teacher of which writes all columns, with the term of the cross entropy."""
        if ce is not None:
            term, target = torch.empty(z.shape, dtype=torch.float32, device=z.device), ce.target.unsqueeze(-1)
            transform = self._transform(1.0, self.call.ignore_index)
            self.impl.logprobs.gradients(-ce.grad.unsqueeze(-1), z, target, ce.stats, term, transform)
            total.add_(term)
        dz.copy_(total)

    def _cross_entropy_term(self, logits: Tensor, block: slice, grads: Tensor) -> tuple[Tensor, CrossEntropyTerm]:
        """Return the labels' log-probabilities at temperature 1, and the term of the logits' gradient."""
        impl, call = self.impl, self.call
        assert call.labels is not None
        transform = self._transform(1.0, call.ignore_index)
        target = call.labels.reshape(-1)[block].contiguous()
        rank = impl.logprobs.statistics(logits, target.unsqueeze(-1), transform)
        logprobs, stats = impl.logprobs.combine(call.gather_ranks(rank), target.unsqueeze(-1), transform)
        return logprobs.view(-1), CrossEntropyTerm(target, call.first_class, grads[block], stats)

    def _transform(self, temperature: float, ignore_index: int) -> LogitTransform:
        return LogitTransform(
            ignore_index=ignore_index,
            scale=1.0,
            softcap=self.call.softcap,
            temperature=temperature,
            first_class=self.call.first_class,
            num_classes=self.call.num_classes,
        )
