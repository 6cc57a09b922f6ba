"""The driver of distillation from hidden states: divergences from teachers, and a cross entropy of the student.

A block of rows has the student's logits, one teacher's at a time and, where there are several teachers, the float32 sum
of the gradients for those that are done. The last one's is added to that and rounded where it is multiplied.

A teacher whose classes are some of the student's, in any order, has a map of these. It is compared with the student's
softmax over the classes that it has: their logits are gathered, and the gradient is added to that of their columns. The
divergence over all of the student's classes would ask for a probability of 0 of each that such a teacher does not
know, and be infinite for beta 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmk.ops.common.scaling import mean_of_all, scale_op
from llmk.ops.linear_loss.chunked import (
    DIFFERENTIABLE,
    CallOp,
    ChunkedLinear,
    CompactedTokens,
    LinearCall,
    LinearGradients,
    check_chunk_size,
    check_temperature,
    checked_linear,
    fake_gradients,
    float16_scale,
    largest,
    local_fields,
    scaled,
    wants_float32,
    with_shard,
)
from llmk.ops.linear_loss.kernels import CrossEntropyTerm, Implementation, LogitTransform, Softmaxes
from llmk.ops.loss.divergence_math import Mixture
from llmk.registry import (
    LARGEST,
    PARTIAL,
    REPLICATE,
    KernelOp,
    check_dtype,
    check_number,
    check_same,
    check_shape,
    check_switch,
    empty,
    replicate_only,
    row_axes,
)
from llmk.registry.checks import TINY
from llmk.registry.record import FLOAT_DTYPES

LEAST = 2.0**-24
"""The smallest size that is measured: float16's smallest number, as logits of that dtype hold no smaller gradient."""
OR_NONE = ("teacher_linear_bias", "vocab_map")
"""Lists with one for each teacher, or empty."""
TEACHER = ["teacher_input", "teacher_linear_weight", "teacher_linear_bias"]


class Teacher(NamedTuple):
    """A teacher's linear layer, and its part of the loss."""

    input: Tensor  # [..., H']
    linear_weight: Tensor  # [V, H']
    linear_bias: Tensor | None  # [V]
    temperature: float
    softcap: float
    weight: Tensor | None = None  # [...]
    vocab_map: Tensor | None = None  # [V'], the student's class of each; None where they are the same


@dataclass(frozen=True, kw_only=True)
class DistillationCall(LinearCall):
    """A student's linear layer, and what the losses from one teacher or several have in common."""

    labels: Tensor | None  # [...]
    row_weight: Tensor | None  # [...]
    beta: float
    temperature: float
    softcap: float
    ignore_index: int
    ce_weight: float  # weight of a cross entropy with the labels, 0 for none

    @property
    def teachers(self) -> list[Teacher]:
        raise NotImplementedError

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes in which the divergences and the cross entropy are returned beside the loss; `(0,)` for not."""
        raise NotImplementedError

    def linears(self, impl: Implementation, compacted: CompactedTokens) -> tuple[ChunkedLinear, list[ChunkedLinear]]:
        """Return the student's and the teachers' layers in the same blocks."""
        float32_layer = torch.float32.itemsize // self.logits_dtype.itemsize
        layers = 2 if len(self.teachers) == 1 else 2 + float32_layer
        if any(each.vocab_map is not None for each in self.teachers):
            layers = 3 + 2 * float32_layer  # the student's logits of the map, and the gradients for these and for all
        plan = self.plan(impl, layers=layers)
        student, *teachers = (
            ChunkedLinear(*layer, plan, float32_logits=self.float32_logits, count=compacted.count)
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
            leave_ignored=student.leaves_rows_past_count,
        )

    @property
    def gradient_is_measured(self) -> bool:
        """True if float16 needs its size and a bound is far or none: of log-ratios, and with a small temperature."""
        return self.input.dtype == torch.float16 and (self.beta == 1 or self.temperature < 1)

    def largest_gradient(self, loss_grads: Tensor, ce_grads: Tensor | None) -> Tensor:
        """Return what no element of the logits' gradient exceeds, for those of the teachers' losses `[D, N]`.

        That of a divergence is r - p R (`kernels/_divergence.py`), where r and R are at most 1 each, but for beta 1.
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


@dataclass(frozen=True, kw_only=True)
class TeachersCall(DistillationCall):
    """A call with D teachers."""

    teacher_weight: Tensor | None  # [..., D]
    teacher_input: Sequence[Tensor]  # [..., H'] each
    teacher_linear_weight: Sequence[Tensor]  # [V, H'] each
    teacher_linear_bias: Sequence[Tensor]  # [V] each, or none of any
    vocab_map: Sequence[Tensor]  # [V'] each, [0] where it has the student's classes, or none of any
    teacher_temperature: Sequence[float]
    teacher_softcap: Sequence[float]

    @property
    def teachers(self) -> list[Teacher]:
        D = len(self.teacher_input)
        biases = self.teacher_linear_bias or [None] * D
        weights = [None] * D if self.teacher_weight is None else self.teacher_weight.unbind(-1)
        layers = self.teacher_input, self.teacher_linear_weight, biases
        maps = [each if each.shape[0] > 0 else None for each in self.vocab_map] or [None] * D
        options = self.teacher_temperature, self.teacher_softcap, weights, maps
        return [Teacher(*each) for each in zip(*layers, *options, strict=True)]

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (len(self.teacher_input),), ()

    @property
    def token_tensors(self) -> tuple[str, ...]:
        return "input", "teacher_input", "labels", "row_weight", "teacher_weight"


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
    count = mask.float()
    weights = count if call.row_weight is None else torch.where(mask, call.row_weight.reshape(-1).float(), 0.0)
    denominator = weights.sum()
    # Where weights make the denominator 0 the tokens that count get gradients that are not finite, as is the loss;
    # without weights no token counts then, and all gradients are 0.
    loss_grads, remaining = weights, denominator
    if not total:
        loss_grads, remaining = weights / denominator, torch.ones_like(denominator)
    shares = _shares(call, mask)
    loss_grads = shares * loss_grads
    (student, teachers), need = call.linears(impl, compacted), (need_dx, need_dw, need_db)
    ce_grads = count * (call.ce_weight * remaining / count.sum()) if call.ce_weight > 0 else None

    def bound() -> Tensor:
        if not call.gradient_is_measured:
            return call.largest_gradient(loss_grads, ce_grads)
        nothing = LinearGradients(student, (False, False, False), call.saved_dtypes)
        sizes = [torch.full((), LEAST, dtype=torch.float32, device=count.device)]
        _losses_and_gradients(impl, call, nothing, teachers, maps, count, loss_grads, ce_grads, sizes)
        return torch.stack(sizes).amax()

    scale = float16_scale(call.input.dtype, need, bound)
    gradients = LinearGradients(student, need, call.saved_dtypes, scale)
    losses, nll = _losses_and_gradients(impl, call, gradients, teachers, maps, count, loss_grads, ce_grads)
    rest = remaining, *gradients.results(compacted)
    divergences = torch.where(mask, losses * (shares * weights), 0.0).sum(-1)
    divergences = divergences if total else divergences / denominator
    if maps_are_valid is not None:
        divergences = torch.where(maps_are_valid, divergences, float("nan"))
    loss = divergences.sum()
    if ce_grads is not None:
        nll = nll / count.sum()
        loss = loss + call.ce_weight * nll
    terms = zip((divergences, nll), call.term_shapes, strict=True)
    returned = (empty(shape, each.dtype, each.device) if 0 in shape else each.view(shape) for each, shape in terms)
    return loss, *returned, *rest


def _shares(call: DistillationCall, mask: Tensor) -> Tensor:
    """Return the teachers' weights `[D, N]` at the tokens that count, 0 at others."""
    count = mask.float()
    weights = [each.weight for each in call.teachers]
    return torch.stack([count if w is None else torch.where(mask, w.reshape(-1).float(), 0.0) for w in weights])


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
    maps: list[Tensor | None], count: Tensor, loss_grads: Tensor, ce_grads: Tensor | None,
    sizes: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the divergences `[D, N]` and the sum of the cross entropies, given the gradient of each term.

    With `sizes` the largest size of each block's gradient of the logits is added to them; none need be needed.
    """
    student, D = gradients.linear, len(teachers)
    loss_grads = scaled(loss_grads, gradients.scale)
    ce_grads = None if ce_grads is None else scaled(ce_grads, gradients.scale)
    wanted = any(gradients.need) or sizes is not None
    buffer = max(teachers, key=lambda layer: layer.weight.shape[0]).block_buffer()
    order = sorted(range(D), key=lambda i: maps[i] is None)  # those with a map first: the last writes all columns
    has_maps, has_plain = maps[order[0]] is not None, maps[order[-1]] is None
    total = student.buffer(student.plan.block_rows if wanted and (D > 1 or has_maps) else 0, torch.float32)
    divergences, logprobs = [], [count.new_zeros((1,))]
    for block, z, dz in gradients.blocks():
        counts, wants_block, before, ce = count[block], wanted and z.numel() > 0, None, None
        if ce_grads is not None:
            logprob, ce = _cross_entropy_term(impl, call, z, block, ce_grads)
            logprobs.append(logprob)
        if wants_block and has_maps:
            before = total[: z.shape[0]].zero_()
        plain = impl.divergence.statistics(z, counts, call.temperature, call.softcap) if has_plain else None
        losses = [counts] * D
        for i in order:
            ids, softmaxes = maps[i], call.softmaxes(call.teachers[i], student)
            x, w = z if ids is None else z.index_select(1, ids), teachers[i].outputs(block, buffer)
            losses[i], stats, sums = _divergences(impl, call, x, w, counts, plain if ids is None else None, softmaxes)
            if wants_block:
                grads = counts, loss_grads[i, block], stats, sums
                if ids is not None:
                    part = torch.empty(x.shape, dtype=torch.float32, device=x.device)
                    impl.divergence.gradients(x, w, *grads, None, None, part, softmaxes)
                    total[: z.shape[0]].index_copy_(1, ids, part.add_(total[: z.shape[0]].index_select(1, ids)))
                else:
                    out = dz if i == order[-1] else total[: z.shape[0]]
                    impl.divergence.gradients(x, w, *grads, ce, before, out, softmaxes)
                    ce, before = None, out
            del x, w  # a product that allocates its result would hold two
        divergences.append(torch.stack(losses))
        if wants_block and not has_plain:
            _finish(impl, call, z, ce, total[: z.shape[0]], dz)
        if wants_block and sizes is not None:
            sizes.append(torch.linalg.vector_norm(dz, float("inf"), dtype=torch.float32))
    return torch.cat(divergences, 1), -torch.cat(logprobs).sum()


def _finish(
    impl: Implementation, call: DistillationCall, z: Tensor, ce: CrossEntropyTerm | None, total: Tensor, dz: Tensor
) -> None:
    """Write the gradient of a block whose teachers all have maps, with the term of the cross entropy."""
    if ce is not None:
        term, target = torch.empty(z.shape, dtype=torch.float32, device=z.device), ce.target.unsqueeze(-1)
        transform = _cross_entropy_transform(call)
        impl.logprobs.gradients(-ce.grad.unsqueeze(-1), None, z, target, ce.stats, term, transform)
        total.add_(term)
    dz.copy_(total)


def _cross_entropy_term(
    impl: Implementation, call: DistillationCall, logits: Tensor, block: slice, grads: Tensor
) -> tuple[Tensor, CrossEntropyTerm]:
    """Return the labels' log-probabilities at temperature 1, and the term of the logits' gradient."""
    assert call.labels is not None
    transform = _cross_entropy_transform(call)
    target = call.labels.reshape(-1)[block].contiguous()
    rank = impl.logprobs.statistics(logits, target.unsqueeze(-1), transform)
    logprobs, _, stats = impl.logprobs.combine(call.gather_ranks(rank), target.unsqueeze(-1), transform)
    return logprobs.view(-1), CrossEntropyTerm(target, call.first_class, grads[block], stats)


def _cross_entropy_transform(call: DistillationCall) -> LogitTransform:
    return LogitTransform(
        ignore_index=call.ignore_index,
        scale=1.0,
        softcap=call.softcap,
        temperature=1.0,
        first_class=call.first_class,
        num_classes=call.num_classes,
    )


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
        self.forward = CallOp(f"_{name}_fwd", call_type, _forward, outputs=7, fake=_fake_forward, products=_products)
        self.scale = scale_op(f"_{name}_scale")
        self.forward.op.register_sharding(_forward_sharding if splits else replicate_only)
        # The caller divides a total, whose gradient is that of a sum.
        self.forward.differentiate_by_scaling(self.scale, lambda inputs, output: None if inputs[-4] else output[3])

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.scale

    def with_teachers(self, **fields: Any) -> tuple[Tensor, ...]:
        """Return the loss and its terms from the fields of a `TeachersCall`."""
        return self.forward(_checked_teachers(**fields), False)[:3]

    def __call__(self, **fields: Any) -> tuple[Tensor, ...]:
        """Return the loss, and with a `ce_weight` its terms, from a `OneTeacherCall`'s fields and a rank's classes."""
        fields = with_shard(**fields)
        classes = fields["linear_weight"].shape[:1], fields["teacher_linear_weight"].shape[:1]
        if not self.splits:
            return self.forward(_checked_call(classes, **fields), False)[:3]
        fields, as_given, is_sharded = local_fields(fields, [DIFFERENTIABLE, TEACHER], ["labels", "row_weight"])
        call = _checked_call(classes, **fields)
        if is_sharded:
            total, _, _, denominator, *_ = self.forward(call, True)
            return (mean_of_all(total, denominator.detach(), call.row_weight is not None),)
        return (as_given(self.forward(call, False)[0]),)


def _checked_call(classes: tuple[torch.Size, torch.Size], **fields: Any) -> OneTeacherCall:
    """Check the arguments and return the call; `classes` are those of both weights as the caller has them.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
    """
    linears: dict[str, Any] = _checked_student(fields) | dict(
        zip(TEACHER, _checked_teacher(fields, TEACHER), strict=True)
    )
    call = OneTeacherCall(**fields | linears)
    own, of_teacher = (shape[0] for shape in classes)  # parts of DTensors may have equally many though these do not
    _check_fits(call, "teacher_input", call.teacher_input, "teacher_linear_weight", of_teacher, own)
    _check_call(call)
    check_switch("teacher_softcap", call.teacher_softcap)
    return call


def _checked_teachers(**fields: Any) -> TeachersCall:
    """Check the arguments and return the call with D teachers.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device, a list's length or an option does not fit.
    """
    D = len(fields["teacher_input"])
    if D == 0:
        raise ValueError("teacher_input: expected the hidden states of at least one teacher, got none")
    for name in ("teacher_linear_weight", *OR_NONE, "teacher_temperature", "teacher_softcap"):
        may_be_empty = name in OR_NONE
        if len(fields[name]) != D and not (may_be_empty and len(fields[name]) == 0):
            none = " or none" if may_be_empty else ""
            raise ValueError(f"{name}: expected {D}{none}, one for each of teacher_input, got {len(fields[name])}")
    linears = _checked_student(fields)
    teachers = [_checked_teacher(_of_teacher(fields, i), [f"{name}[{i}]" for name in TEACHER]) for i in range(D)]
    inputs, weights, biases = (list(each) for each in zip(*teachers, strict=True))
    linears |= zip(TEACHER, (inputs, weights, biases if fields["teacher_linear_bias"] else []), strict=True)
    call = TeachersCall(**fields | linears)
    for i, teacher in enumerate(call.teachers):
        names = f"teacher_input[{i}]", f"teacher_linear_weight[{i}]"
        classes = teacher.linear_weight.shape[0]
        if teacher.vocab_map is not None:
            ids = teacher.vocab_map
            check_dtype(f"vocab_map[{i}]", ids, (torch.int64,))
            check_shape(f"vocab_map[{i}]", ids, (classes,), f"one for each class of teacher_linear_weight[{i}]")
            check_same(f"vocab_map[{i}]", ids, "input", call.input)
            classes = call.num_classes
        _check_fits(call, names[0], teacher.input, names[1], classes, call.num_classes)
        check_number(f"teacher_temperature[{i}]", teacher.temperature, TINY, LARGEST, "a finite positive number")
        check_switch(f"teacher_softcap[{i}]", teacher.softcap)
    _check_call(call)
    return call


def checked_teacher_weight(teacher_weight: Tensor | None, input: Tensor, D: int) -> Tensor | None:
    """Check the weights `[D]` or `[..., D]` of D teachers and return the latter."""
    if teacher_weight is None:
        return None
    check_dtype("teacher_weight", teacher_weight, FLOAT_DTYPES)
    shape = (*input.shape[:-1], D)
    if teacher_weight.shape != shape and teacher_weight.shape != (D,):
        got = tuple(teacher_weight.shape)
        raise ValueError(f"teacher_weight: expected shape {(D,)} or {shape}, one for each teacher, got {got}")
    check_same("teacher_weight", teacher_weight, "input", input)
    return teacher_weight.expand(shape)


def _of_teacher(fields: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the tensors of one of several teachers by their names; a bias may be None."""
    return {f"{name}[{i}]": fields[name][i] if fields[name] else None for name in TEACHER}


def _checked_student(fields: dict[str, Any]) -> dict[str, Any]:
    """Check the student's tensors and the dtype of logits, which is replaced in the fields, and return the tensors."""
    linears: dict[str, Any] = dict(
        zip(DIFFERENTIABLE, checked_linear(*(fields[name] for name in DIFFERENTIABLE)), strict=True)
    )
    fields["float32_logits"] = wants_float32(fields.pop("logits_dtype"), linears["input"])
    return linears


def _checked_teacher(fields: dict[str, Any], names: list[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check a teacher's linear layer; errors of `checked_linear` get the teacher's names."""
    try:
        return checked_linear(*(fields[name] for name in names))
    except (TypeError, ValueError) as error:
        of_student, _, rest = str(error).partition(":")
        raise type(error)(f"{names[DIFFERENTIABLE.index(of_student)]}:{rest}") from None


def _check_fits(
    call: DistillationCall, name: str, input: Tensor, weight_name: str, classes: int, of_student: int
) -> None:
    """Check that a teacher's tokens and classes are the student's."""
    if classes != of_student:
        raise ValueError(f"{weight_name}: expected the classes of linear_weight, {of_student}, got {classes}")
    check_same(name, input, "input", call.input, dtype=True)
    check_shape(name, input, (*call.tokens, input.shape[-1]), "input's tokens")


def _check_call(call: DistillationCall) -> None:
    """Check what does not depend on the teachers."""
    call.check_classes()
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
    check_chunk_size(call.chunk_size)
