"""The driver of distillation: divergences of a student from teachers, and its cross entropy.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from llmk.ops.common.scaling import mean_of_all, scale_op
from llmk.ops.linear_loss.chunked import (
    ChunkedLinear,
    CompactedTokens,
    LinearCall,
    LinearGradients,
    LinearOp,
    fake_gradients,
    float16_scale,
    largest,
    local_fields,
    scaled,
    with_shard,
)
from llmk.ops.linear_loss.drivers._rows_call import NOT_IGNORED
from llmk.ops.linear_loss.head import DIFFERENTIABLE, checked_linear
from llmk.ops.linear_loss.kernels import MOST_SUPPORT, CrossEntropyTerm, Implementation, LogitTransform, Softmaxes
from llmk.ops.linear_loss.rows.products import Transform
from llmk.ops.loss.divergence_math import Mixture
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    check_dtype,
    check_number,
    check_same,
    check_shape,
    check_switch,
    empty,
    gradient_of,
    replicate_only,
    row_axes,
)
from llmk.registry.record import FLOAT_DTYPES

LEAST = 2.0**-24
"""The smallest size that is measured: float16's smallest number, as logits of that dtype hold no smaller gradient."""
MOST_CLASSES = MOST_SUPPORT
"""The most classes of a token that all top-k teachers have, which one program holds and compares with each other."""
TEACHER = ["teacher_input", "teacher_linear_weight", "teacher_linear_bias"]


class Teacher(NamedTuple):
    """A teacher's linear layer, and its part of the loss."""

    input: Tensor  # [..., H']
    linear_weight: Tensor  # [V, H']
    linear_bias: Tensor | None  # [V]
    temperature: float
    softcap: float
    vocab_map: Tensor | None = None  # [V'], the student's class of each; None where they are the same


class TopkTeachers(Protocol):
    """Teachers that are known by their log-probabilities of some classes of each token."""

    @property
    def ids(self) -> Tensor:
        """The classes of all of them, one after the other, `[N, K]`; -1 for one that is not there."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Each teacher's K."""
        ...

    @property
    def add_tail(self) -> bool:
        """True if the other classes are one class more."""
        ...

    def losses(self, block: slice, logprobs: Tensor, tails: Tensor | None = None) -> Tensor:
        """Return the divergences `[teachers, M]` of a block's rows.

        Args:
            block: The rows.
            logprobs: The student's log-probabilities of the classes, `[M, K]`.
            tails: Those of all other classes than a teacher's together, `[teachers, M]`, with `add_tail`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DistillationCall(LinearCall):
    """A student's linear layer, and what the losses from one teacher or several have in common."""

    labels: Tensor | None  # [...]
    row_weight: Tensor | None  # [...]
    beta: float
    temperature: float
    softcap: float
    ignore_index: int
    ce_weight: float = 0.0  # weight of a cross entropy with the labels, 0 for none

    @property
    def teachers(self) -> list[Teacher]:
        """The teachers with hidden states."""
        raise NotImplementedError

    def topk_teachers(self, mask: Tensor, *, on_host: bool) -> TopkTeachers | None:
        """Return the others, with no class at tokens `[N]` that do not count; None for none.

        Raises:
            IndexError: On the host, an id is no class.
        """
        return None

    @property
    def has_topk_teachers(self) -> bool:
        return False

    def teacher_weights(self, mask: Tensor) -> Tensor:
        """Return the weights `[D, N]` of all teachers at the tokens that count, 0 at others."""
        return mask.float().unsqueeze(0)

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes in which the divergences and the cross entropy are returned beside the loss; `(0,)` for not."""
        raise NotImplementedError

    def linears(self, impl: Implementation, compacted: CompactedTokens) -> tuple[ChunkedLinear, list[ChunkedLinear]]:
        """Return the student's and the teachers' layers in the same blocks."""
        float32_layer = torch.float32.itemsize // self.logits_dtype.itemsize
        layers = 1 + (len(self.teachers) > 0) + float32_layer * self.adds_gradients
        if any(each.vocab_map is not None for each in self.teachers):
            layers += 1 + float32_layer  # the student's logits of the map, and the gradient for these
        plan, end = self.plan(impl, layers=layers), self.product_end(compacted)
        student, *teachers = (
            ChunkedLinear(*layer, plan, float32_logits=self.float32_logits, count=end)
            for layer in ((self.input, self.linear_weight, self.linear_bias), *(each[:3] for each in self.teachers))
        )
        return student, teachers

    def softmaxes(self, teacher: Teacher, student: ChunkedLinear) -> Softmaxes:
        return Softmaxes(
            mixture=Mixture(self.beta),
            temperature=self.temperature,
            teacher_temperature=teacher.temperature,
            softcap=self.softcap,
            teacher_softcap=teacher.softcap,
            exact=self.input.dtype == torch.float32,
        )

    @property
    def adds_gradients(self) -> bool:
        """True if a block's gradient is a float32 sum, beside what the last teacher's is added to as it is written."""
        has_maps = any(each.vocab_map is not None for each in self.teachers)
        return len(self.teachers) > 1 or has_maps or self.has_topk_teachers

    @property
    def gradient_is_measured(self) -> bool:
        """True if float16 needs its size and a bound is far or none: of log-ratios, and with a small temperature."""
        return self.input.dtype == torch.float16 and (self.beta == 1 or self.temperature < 1)

    def largest_gradient(self, loss_grads: Tensor, ce_grads: Tensor | None) -> Tensor:
        """Return what no element of the logits' gradient exceeds, for those of the teachers' losses `[D, N]`.

        That of a divergence is r - p R (`kernels/_divergence.py`), where r and R are at most 1 each, but for beta 1.
        That of top-k classes is no larger: so it is of these and the tail, which hands it on to the other classes in
        parts.
        """
        bound = largest(loss_grads.abs().sum(0)) * (2 / self.temperature)
        return bound if ce_grads is None else bound + largest(ce_grads)

    def mask(self) -> Tensor:
        if self.labels is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.input.device)
        return self.labels.long() != self.ignore_index  # int32 would wrap an index that it does not hold

    @property
    def linear_layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return (self.input, self.linear_weight), *((each.input, each.linear_weight) for each in self.teachers)


@dataclass(frozen=True, kw_only=True)
class OneTeacherCall(DistillationCall):
    """A call with one teacher at the student's temperature."""

    teacher_input: Tensor  # [..., H']
    teacher_linear_weight: Tensor  # [V, H']
    teacher_linear_bias: Tensor | None  # [V]
    teacher_softcap: float

    @property
    def teachers(self) -> list[Teacher]:
        layer = self.teacher_input, self.teacher_linear_weight, self.teacher_linear_bias
        return [Teacher(*layer, self.temperature, self.teacher_softcap)]

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ((), ()) if self.ce_weight > 0 else ((0,), (0,))

    @property
    def token_tensors(self) -> tuple[str, ...]:
        return "input", "teacher_input", "labels", "row_weight"


def _forward(
    impl: Implementation, full_call: DistillationCall, total: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, ...]:
    """Return the loss, its terms, a denominator, and gradients of input, weight and bias.

    The loss is the sum of the teachers' mean divergences, or the sum over tokens (`total`), and with a `ce_weight` that
    times the mean cross entropy. The terms are the divergences and the cross entropy, in the call's `term_shapes`.
    """
    compacted, call = full_call.compacted(impl)
    maps, maps_are_valid = _maps(impl, call)
    mask = call.mask().reshape(-1)
    topk, count = call.topk_teachers(mask, on_host=impl.on_host), mask.float()
    weights = count if call.row_weight is None else torch.where(mask, call.row_weight.reshape(-1).float(), 0.0)
    denominator = weights.sum()
    # Where weights make the denominator 0 the tokens that count get gradients that are not finite, as is the loss;
    # without weights no token counts then, and all gradients are 0.
    loss_grads, remaining = weights, denominator
    if not total:
        loss_grads, remaining = weights / denominator, torch.ones_like(denominator)
    teacher_weights = call.teacher_weights(mask)
    loss_grads = teacher_weights * loss_grads
    (student, teachers), need = call.linears(impl, compacted), (need_dx, need_dw, need_db)
    ce_grads = count * (call.ce_weight * remaining / count.sum()) if call.ce_weight > 0 else None

    def bound() -> Tensor:
        if not call.gradient_is_measured:
            return call.largest_gradient(loss_grads, ce_grads)
        nothing = LinearGradients(student, (False, False, False), call.saved_dtypes)
        sizes = [torch.full((), LEAST, dtype=torch.float32, device=count.device)]
        _losses_and_gradients(impl, call, nothing, teachers, maps, topk, count, loss_grads, ce_grads, sizes)
        return torch.stack(sizes).amax()

    scale = float16_scale(call.input.dtype, need, bound)
    gradients = LinearGradients(student, need, call.saved_dtypes, scale)
    losses, nll = _losses_and_gradients(impl, call, gradients, teachers, maps, topk, count, loss_grads, ce_grads)
    rest = remaining, *gradients.results(compacted)
    divergences = torch.where(mask, losses * (teacher_weights * weights), 0.0).sum(-1)
    divergences = divergences if total else divergences / denominator
    if maps_are_valid is not None:
        divergences[: len(maps)].masked_fill_(~maps_are_valid, float("nan"))
    loss = divergences.sum()
    if ce_grads is not None:
        nll = nll / count.sum()
        loss = loss + call.ce_weight * nll
    terms = zip((divergences, nll), call.term_shapes, strict=True)
    returned = (empty(shape, each.dtype, each.device) if 0 in shape else each.view(shape) for each, shape in terms)
    return loss, *returned, *rest


def _maps(impl: Implementation, call: DistillationCall) -> tuple[list[Tensor | None], Tensor | None]:
    """Return the teachers' maps, safe to index with, and if each is valid, `[D]`, where the host does not look.

    Raises:
        IndexError: On the host, an id of a map is no class.
        ValueError: On the host, a map repeats an id.
    """
    V, maps = call.num_classes, [each.vocab_map for each in call.teachers]
    if all(ids is None for ids in maps):
        return maps, None
    flags = []
    for i, ids in enumerate(maps):
        if ids is None:
            flags.append(torch.ones((), dtype=torch.bool, device=call.input.device))
            continue
        in_range, ordered = ((ids >= 0) & (ids < V)).all(), ids.sort().values
        unique = (ordered[1:] != ordered[:-1]).all()
        if impl.on_host and not in_range:
            raise IndexError(f"vocab_map[{i}]: expected classes in [0, {V}), got {int(ids.min())} to {int(ids.max())}")
        if impl.on_host and not unique:
            raise ValueError(f"vocab_map[{i}]: expected different classes, got one of them twice")
        flags.append(in_range & unique)
    return [None if ids is None else ids.clamp(0, V - 1) for ids in maps], torch.stack(flags)


def _losses_and_gradients(
    impl: Implementation, call: DistillationCall, gradients: LinearGradients, teachers: list[ChunkedLinear],
    maps: list[Tensor | None], topk: TopkTeachers | None, count: Tensor, loss_grads: Tensor, ce_grads: Tensor | None,
    sizes: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the divergences `[D, N]` and the sum of the cross entropies, given the gradient of each term.

    With `sizes` the largest size of each block's gradient of the logits is added to them; none need be needed.
    """
    student, D = gradients.linear, len(teachers)
    loss_grads = scaled(loss_grads, gradients.scale)
    ce_grads = None if ce_grads is None else scaled(ce_grads, gradients.scale)
    wanted = any(gradients.need) or sizes is not None
    widest = max(teachers, key=lambda layer: layer.weight.shape[0], default=None)
    buffer = student.buffer(0, student.logits_dtype) if widest is None else widest.block_buffer()
    order = sorted(range(D), key=lambda i: maps[i] is None)  # those with a map first: the last writes all columns
    has_maps, has_plain = any(ids is not None for ids in maps), any(ids is None for ids in maps)
    totals = student.buffer(student.plan.block_rows if wanted and call.adds_gradients else 0, torch.float32)
    divergences, logprobs = [], [count.new_zeros((1,))]
    for block, z, dz in gradients.blocks():
        counts, wants_block, before, ce = count[block], wanted and z.numel() > 0, None, None
        if ce_grads is not None:
            logprob, ce = _cross_entropy_term(impl, call, z, block, ce_grads)
            logprobs.append(logprob)
        losses, total = [counts] * D, totals[: z.shape[0]]
        if wants_block and (has_maps or topk is not None):
            before = total
        if topk is not None:  # whose gradient begins the sum
            losses.extend(_topk_divergences(impl, call, topk, z, block, loss_grads[D:, block], before))
        elif before is not None:
            before.zero_()
        plain = impl.divergence.statistics(z, counts, call.temperature, call.softcap) if has_plain else None
        for i in order:
            ids, softmaxes = maps[i], call.softmaxes(call.teachers[i], student)
            x, w = z if ids is None else z.index_select(1, ids), teachers[i].outputs(block, buffer)
            losses[i], stats, sums = _divergences(impl, call, x, w, counts, plain if ids is None else None, softmaxes)
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
            del x, w  # a product that allocates its result would hold two
        divergences.append(torch.stack(losses))
        if wants_block and not has_plain:
            _finish(impl, call, z, ce, total, dz)
        if wants_block and sizes is not None:
            sizes.append(torch.linalg.vector_norm(dz, float("inf"), dtype=torch.float32))
    return torch.cat(divergences, 1), -torch.cat(logprobs).sum()


def _finish(
    impl: Implementation, call: DistillationCall, z: Tensor, ce: CrossEntropyTerm | None, total: Tensor, dz: Tensor
) -> None:
    """Write the gradient of a block no teacher of which writes all columns, with the term of the cross entropy."""
    if ce is not None:
        term, target = torch.empty(z.shape, dtype=torch.float32, device=z.device), ce.target.unsqueeze(-1)
        transform = _transform(call, 1.0, call.ignore_index)
        impl.logprobs.gradients(-ce.grad.unsqueeze(-1), None, z, target, ce.stats, term, transform)
        total.add_(term)
    dz.copy_(total)


def _cross_entropy_term(
    impl: Implementation, call: DistillationCall, logits: Tensor, block: slice, grads: Tensor
) -> tuple[Tensor, CrossEntropyTerm]:
    """Return the labels' log-probabilities at temperature 1, and the term of the logits' gradient."""
    assert call.labels is not None
    transform = _transform(call, 1.0, call.ignore_index)
    target = call.labels.reshape(-1)[block].contiguous()
    rank = impl.logprobs.statistics(logits, target.unsqueeze(-1), transform)
    logprobs, _, stats = impl.logprobs.combine(call.gather_ranks(rank), target.unsqueeze(-1), transform)
    return logprobs.view(-1), CrossEntropyTerm(target, call.first_class, grads[block], stats)


def _transform(call: DistillationCall, temperature: float, ignore_index: int) -> LogitTransform:
    return LogitTransform(
        ignore_index=ignore_index,
        scale=1.0,
        softcap=call.softcap,
        temperature=temperature,
        first_class=call.first_class,
        num_classes=call.num_classes,
    )


def _topk_divergences(
    impl: Implementation, call: DistillationCall, topk: TopkTeachers, z: Tensor, block: slice, loss_grads: Tensor,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the divergences from top-k teachers, and write the gradient of all to `out`, given that of each."""
    transform, ids = _transform(call, call.temperature, NOT_IGNORED), topk.ids[block]
    rank = impl.logprobs.statistics(z, ids, transform)
    logprobs, _, stats = impl.logprobs.combine(call.gather_ranks(rank), ids, transform)
    tails = Tails.of(call, topk, z, ids, logprobs, stats) if topk.add_tail else None
    given = [logprobs] if tails is None else [logprobs, tails.logprobs]
    if out is not None:
        _, grads = gradient_of(lambda *given: (topk.losses(block, *given) * loss_grads).sum(), *given)
        impl.logprobs.gradients(grads[0], None, z, ids, stats, out, transform)
        if tails is not None:
            assert grads[1] is not None
            tails.add_gradients(grads[1], out)
    return topk.losses(block, *given)


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
    def of(
        cls, call: DistillationCall, topk: TopkTeachers, z: Tensor, ids: Tensor, logprobs: Tensor, stats: Tensor
    ) -> "Tails":  # fmt: skip
        """Compute them from the logits of a block.

        Args:
            call: What the softmax is of.
            topk: The teachers.
            z: The logits, `[M, V]`.
            ids: The teachers' classes, `[M, K]`.
            logprobs: The student's log-probabilities of these.
            stats: The rows' largest logits and sums of exponentials.
        """
        transform = Transform(1.0, 1.0 / call.temperature, call.softcap)
        (y, slope), (M, V) = transform(z.float()), z.shape
        is_largest, sums = [], []
        for each, of_each in zip(ids.split(topk.sizes, -1), logprobs.split(topk.sizes, -1), strict=True):
            sums.append(of_each.exp().masked_fill(each < 0, 0.0).sum(-1))
            columns = each.long() - call.first_class
            columns = torch.where((each >= 0) & (columns >= 0) & (columns < V), columns, V)
            mask = torch.zeros((M, V + 1), dtype=torch.bool, device=z.device)
            is_largest.append(mask.scatter_(1, columns, True)[:, :V])
        rank = torch.stack([y.masked_fill(mask, float("-inf")).logsumexp(-1) for mask in is_largest])
        logsumexps = call.gather_ranks(rank).view(call.ranks, *rank.shape).logsumexp(0)
        (m, total, _), p = stats.unbind(), torch.stack(sums)
        # Neither a difference of numbers near each other.
        of_others = torch.where(p < 0.5, (-p).log1p(), (logsumexps - m) - total.log())
        return cls(y, transform.factor if slope is None else slope, is_largest, logsumexps, p, of_others)

    def add_gradients(self, grads: Tensor, out: Tensor) -> None:
        """Add the gradients of the logits, given those of the tails' log-probabilities, to `out [M, V]`."""
        columns = (each.unsqueeze(-1) for each in (grads, self.logsumexps, self.probabilities, self.logprobs))
        for mask, grad, logsumexp, p_largest, logprob in zip(self.is_largest, *columns, strict=True):
            # A class's share of the tail, less its probability.
            p = (self.y - (logsumexp - logprob)).exp()
            dy = torch.where(mask, -p, (self.y - logsumexp).exp() * p_largest)
            out.add_((dy * self.slope * grad).masked_fill(~mask.any(-1, keepdim=True), 0.0))


def _divergences(
    impl: Implementation, call: DistillationCall, z: Tensor, w: Tensor, counts: Tensor, student: Tensor | None,
    softmaxes: Softmaxes,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the divergence `[M]` of vocabulary-parallel rows, and the statistics that its gradient needs.

    The student's statistics `[2, M]` of this rank are computed if they are not given.
    """

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


def _fake_forward(call: DistillationCall, total: bool, *need: bool) -> tuple[Tensor, ...]:
    results = (call.input.new_empty(shape, dtype=torch.float32) for shape in ((), *call.term_shapes, ()))
    return *results, *fake_gradients(call, need, call.saved_dtypes)


def _forward_sharding(input, total, need_dx):
    if not total:
        return replicate_only()
    return [
        (
            [PARTIAL, REPLICATE, REPLICATE, PARTIAL, axis if need_dx else REPLICATE, PARTIAL, PARTIAL],
            [axis, REPLICATE, REPLICATE, axis, axis, axis, REPLICATE, REPLICATE],
        )
        for axis in row_axes(input)
    ]


def _products(
    impl: Implementation, call: DistillationCall, total: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> float:
    teachers = sum(each.linear_weight.numel() for each in call.teachers) / max(call.linear_weight.numel(), 1)
    twice = call.gradient_is_measured and (need_dx or need_dw or need_db)
    return (1 + teachers) * (1 + twice) + need_dx + need_dw


class DistillationOps:
    """The kernel ops of one public operator, whose forward pass makes the gradients.

    Args:
        name: The public operator's name.
        splits: A DTensor's tokens, or classes, may be sharded over processes.
        call_type: The dataclass of its calls.
    """

    def __init__(self, name: str, *, splits: bool = False, call_type: type[DistillationCall] = OneTeacherCall) -> None:
        self.splits = splits
        self.forward = LinearOp(f"_{name}_fwd", call_type, _forward, outputs=7, fake=_fake_forward, products=_products)
        self.scale = scale_op(f"_{name}_scale")
        self.forward.op.register_sharding(_forward_sharding if splits else replicate_only)
        # The caller divides a total, whose gradient is that of a sum.
        self.forward.differentiate_by_scaling(self.scale, lambda inputs, output: None if inputs[-4] else output[3])

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.scale

    def of_call(self, call: DistillationCall) -> tuple[Tensor, ...]:
        """Return the loss and its terms from a call that is checked."""
        return self.forward(call, False)[:3]

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the loss, and with a `ce_weight` its terms, from the public operator's arguments, of one teacher."""
        fields = with_shard(arguments)
        classes = fields["linear_weight"].shape[:1], fields["teacher_linear_weight"].shape[:1]
        if not self.splits:
            return self.forward(_checked_call(classes, fields), False)[:3]
        local, as_given, is_sharded = local_fields(fields, [DIFFERENTIABLE, TEACHER], ["labels", "row_weight"])
        call = _checked_call(classes, local)
        if is_sharded:
            total, _, _, denominator, *_ = self.forward(call, True)
            return (mean_of_all(total, denominator.detach(), call.row_weight is not None),)
        return (as_given(self.forward(call, False)[0]),)


def _checked_call(classes: tuple[torch.Size, torch.Size], arguments: Mapping[str, Any]) -> OneTeacherCall:
    """Check the arguments and return the call; `classes` are those of both weights as the caller has them.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
    """
    teacher = dict(zip(TEACHER, checked_teacher(arguments, TEACHER), strict=True))
    call = OneTeacherCall.checked({**arguments, **teacher})
    own, of_teacher = (shape[0] for shape in classes)  # parts of DTensors may have equally many though these do not
    check_teacher_fits(call, "teacher_input", call.teacher_input, "teacher_linear_weight", of_teacher, own)
    check_call(call)
    check_switch("teacher_softcap", call.teacher_softcap)
    return call


def checked_teacher(arguments: Mapping[str, Any], names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check a teacher's linear layer, which has these names, and return it."""
    return checked_linear(*(arguments[name] for name in names), names=names)


def check_teacher_fits(
    call: DistillationCall, name: str, input: Tensor, weight_name: str, classes: int, of_student: int
) -> None:
    """Check that a teacher's tokens and classes are the student's."""
    if classes != of_student:
        raise ValueError(f"{weight_name}: expected the classes of linear_weight, {of_student}, got {classes}")
    check_same(name, input, "input", call.input, dtype=True)
    check_shape(name, input, (*call.tokens, input.shape[-1]), "input's tokens")


def check_call(call: DistillationCall) -> None:
    """Check what does not depend on the teachers."""
    for name, each, dtypes in (
        ("labels", call.labels, (torch.int64, torch.int32)),
        ("row_weight", call.row_weight, FLOAT_DTYPES),
    ):
        if each is not None:
            check_dtype(name, each, dtypes)
            check_shape(name, each, call.tokens, "one for each token")
            check_same(name, each, "input", call.input)
    check_number("beta", call.beta, 0.0, 1.0, "a number from 0 to 1")
