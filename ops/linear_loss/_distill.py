"""The driver of distillation from hidden states: the divergence, with or without a cross entropy of the student."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._call import LinearCall, saved_dtypes
from llmk.ops.linear_loss._chunked_linear import ChunkedLinear, LinearGradients
from llmk.ops.linear_loss._divergence_rows import CPU, CrossEntropy, DivergenceRows, Softmaxes, losses
from llmk.ops.linear_loss._ignored import Kept
from llmk.ops.linear_loss._logprob_rows import CPU as LOGPROBS_CPU
from llmk.ops.linear_loss._logprob_rows import KERNELS as LOGPROBS
from llmk.ops.linear_loss._logprob_rows_cpu import Scores
from llmk.ops.linear_loss._ranks import group_size
from llmk.ops.linear_loss.checks import check_chunk_size, check_temperature, checked_linear
from llmk.ops.loss.divergence_math import Mixture
from llmk.registry import cdiv, check_dtype, check_number, check_same, check_shape, check_switch
from llmk.registry.record import FLOAT_DTYPES


@dataclass(frozen=True)
class DistillCall(LinearCall):
    """Both have the same classes, which on the ranks of a group are slices of all."""

    teacher_input: Tensor  # [..., H']
    teacher_linear_weight: Tensor  # [V, H']
    teacher_linear_bias: Tensor | None  # [V]
    labels: Tensor | None  # [...]
    row_weight: Tensor | None  # [...]
    beta: float
    temperature: float
    softcap: float
    teacher_softcap: float
    ignore_index: int
    skip_ignored: bool
    chunk_size: int
    ce_weight: float  # of a cross entropy with the labels, 0 for none
    num_classes: int
    group_name: str  # "" where there is none
    dx_group_name: str  # over which the gradient of the input is summed

    @property
    def dtypes(self) -> list[torch.dtype]:
        return saved_dtypes(self.input.dtype, self.dx_group_name)

    def linears(self, kept: Kept | None) -> tuple[ChunkedLinear, ChunkedLinear]:
        """The student's and the teacher's, in the same chunks, whose logits together fit the budget."""
        classes = 2 * cdiv(self.num_classes, group_size(self.group_name))  # on all ranks the same chunks
        count = Kept.count_of(kept)
        student = ChunkedLinear(self.input, self.linear_weight, self.linear_bias, self.chunk_size, classes, count=count)
        teacher = ChunkedLinear(
            self.teacher_input, self.teacher_linear_weight, self.teacher_linear_bias, student.chunk_rows, count=count
        )
        return student, teacher

    def softmaxes(self, student: ChunkedLinear) -> Softmaxes:
        return Softmaxes(
            Mixture(self.beta), self.temperature, self.softcap, self.teacher_softcap, student.leaves_rows_past_count
        )

    def counts(self) -> Tensor:
        """Which tokens count, `[N]`."""
        if self.labels is None:
            return torch.ones((self.tokens.numel(),), dtype=torch.bool, device=self.input.device)
        return self.labels.reshape(-1).long() != self.ignore_index  # int32 would wrap an index that it does not hold

    def kept(self, rows: DivergenceRows) -> Kept | None:
        """The tokens that count, where that is asked for and can be made use of."""
        if not self.skip_ignored or self.labels is None:
            return None
        linears = (self.input, self.linear_weight), (self.teacher_input, self.teacher_linear_weight)
        return Kept.of(self.counts().view(self.tokens), *linears, on_host=rows is CPU)


def distilled(
    rows: DivergenceRows, call: DistillCall, total: bool, need: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The mean of the divergences, or with `total` their sum, the mean of the cross entropies, 0 without them, what the
    gradients of both are still to be divided by, and these."""
    kept = call.kept(rows)
    if kept is not None:
        call = kept.call(call, "input", "teacher_input", "labels", "row_weight")
    counts = call.counts()
    count = counts.float()
    weights = count if call.row_weight is None else torch.where(counts, call.row_weight.reshape(-1).float(), 0.0)
    divisor = weights.sum()
    # Mostly the gradients of the rows are divided here. Where weights make the divisor 0 the rows that count get some
    # that are not finite, as is the loss; without weights no row counts then, and all gradients are 0.
    of_rows, left = weights, divisor
    if not total and call.input.dtype != torch.float16:  # whose range does not hold what is divided
        of_rows, left = weights / divisor, torch.ones_like(divisor)
    elif not total and call.row_weight is not None:
        of_rows = torch.where(divisor == 0, float("inf"), weights)
    student, teacher = call.linears(kept)
    gradients = LinearGradients(student, need, call.dtypes[0])
    of_ce = None if call.ce_weight == 0.0 else count * (call.ce_weight * left / count.sum())
    loss, nll = _pass(rows, call, gradients, teacher, counts, weights, of_rows, of_ce)
    dx = gradients.dx if kept is None or not need[0] else kept.spread(gradients.dx)
    loss, nll = loss if total else loss / divisor, nll / count.sum()
    return loss, nll, left, dx, gradients.dw.to(call.dtypes[1]), gradients.db


def _pass(
    rows: DivergenceRows, call: DistillCall, gradients: LinearGradients, teacher: ChunkedLinear, counts: Tensor,
    weights: Tensor, of_rows: Tensor, of_ce: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums of the weighted divergences and of the cross entropies, given the gradients of each row of both."""
    count, softmaxes = counts.float(), call.softmaxes(gradients.linear)
    logprobs = LOGPROBS_CPU if rows is CPU else LOGPROBS
    scores = Scores(call.ignore_index, 1.0, call.softcap, 1.0, 0, call.num_classes)
    divergences, likelihoods = [], [count.new_zeros((1,))]
    for (chunk, z), (_, w) in zip(gradients.linear.chunks(), teacher.chunks(), strict=True):
        loss, stats, sums = losses(rows, z, w, count[chunk], softmaxes, call.group_name)
        divergences.append(torch.where(counts[chunk], loss * weights[chunk], 0.0))
        ce = None
        if of_ce is not None:
            assert call.labels is not None
            target = call.labels.reshape(-1)[chunk].contiguous()
            parts = logprobs.statistics(z, target.unsqueeze(-1), scores)
            likelihood, _, of_row = logprobs.combine(parts, target.unsqueeze(-1), scores)
            likelihoods.append(likelihood.view(-1))
            ce = CrossEntropy(target, of_ce[chunk], of_row)
        if any(gradients.need):
            if z.shape[1] > 0:
                rows.gradients(z, w, count[chunk], of_rows[chunk], stats, sums, ce, softmaxes)
            gradients.add(chunk, z)
    return torch.cat(divergences).sum(), -torch.cat(likelihoods).sum()


def products(call: DistillCall, *rest: Any) -> float:
    need_dx, need_dw, _ = rest[-3:]
    return 1 + need_dx + need_dw + call.teacher_input.shape[-1] / call.input.shape[-1]


def checked_call(
    tensors: tuple[Any, ...], options: tuple[Any, ...], slices: tuple[int, str, str], teacher_classes: int
) -> DistillCall:
    of_both = *checked_linear(*tensors[:3], fewest_classes=0), *_checked_teacher(*tensors[3:6])
    arguments: tuple[Any, ...] = (*of_both, *tensors[6:], *options, *slices)
    call = DistillCall(*arguments)
    if call.num_classes == 0 or teacher_classes != call.num_classes:
        raise ValueError(
            f"teacher_linear_weight: expected the classes of linear_weight, {call.num_classes} and at least one, "
            f"got {teacher_classes}"
        )
    check_same("teacher_input", call.teacher_input, "input", call.input, dtype=True)
    check_shape("teacher_input", call.teacher_input, (*call.tokens, call.teacher_input.shape[-1]), "input's tokens")
    for name, each, dtypes in (
        ("labels", call.labels, (torch.int64, torch.int32)),
        ("row_weight", call.row_weight, FLOAT_DTYPES),
    ):
        if each is not None:
            check_dtype(name, each, dtypes)
            check_shape(name, each, call.tokens, "one for each token")
            check_same(name, each, "input", call.input)
    check_number("beta", call.beta, 0.0, 1.0, "a number from 0 to 1")
    check_temperature(call.temperature)
    check_switch("softcap", call.softcap)
    check_switch("teacher_softcap", call.teacher_softcap)
    check_chunk_size(call.chunk_size)
    return call


def _checked_teacher(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    try:
        return checked_linear(input, weight, bias, fewest_classes=0)
    except (TypeError, ValueError) as error:  # it names input, linear_weight or linear_bias
        raise type(error)(f"teacher_{error}") from None
