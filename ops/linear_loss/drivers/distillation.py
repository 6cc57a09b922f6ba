"""The driver of distillation: the losses of a student from its teachers, and the kernel ops of an operator of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.scaling import mean_of_all
from llmk.ops.linear_loss.chunked import LinearOp, fake_gradients, local_fields, with_shard
from llmk.ops.linear_loss.drivers._distillation_rows import DivergenceRows
from llmk.ops.linear_loss.drivers.distillation_call import TEACHER, DistillationCall, OneTeacherCall
from llmk.ops.linear_loss.head import DIFFERENTIABLE, checked_linear
from llmk.ops.linear_loss.kernels import Implementation
from llmk.ops.linear_loss.rows.logits import float16_scale
from llmk.ops.linear_loss.rows.projection import Gradients
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    check_number,
    check_parameter,
    check_same,
    check_shape,
    check_switch,
    empty,
    replicate_only,
    row_axes,
)

SMALLEST_SIZE = 2.0**-24
"""The smallest size that is measured: float16's smallest number, as logits of that dtype hold no smaller gradient."""


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
    rows = DivergenceRows(impl, call, student, teachers, maps, topk, count)

    def bound() -> Tensor:
        if not call.gradient_is_measured(impl):
            return call.largest_gradient(loss_grads, ce_grads)
        sizes = [torch.full((), SMALLEST_SIZE, dtype=torch.float32, device=count.device)]
        rows.losses(None, loss_grads, ce_grads, sizes=sizes)
        return torch.stack(sizes).amax()

    scale = float16_scale(student.projection.p_dtype, need, bound)
    gradients = Gradients(student, need, call.saved_dtypes)
    losses, nll = rows.losses(gradients if any(need) else None, loss_grads, ce_grads, scale)
    rest = remaining, *gradients.results()
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
    twice = call.gradient_is_measured(impl) and (need_dx or need_dw or need_db)
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
        self.forward.op.register_sharding(_forward_sharding if splits else replicate_only)
        # The caller divides a total, whose gradient is that of a sum.
        self.kernel_ops = self.forward.differentiate_by_scaling()

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
    like = call.tokens, "one for each token", "input", call.input
    check_parameter("labels", call.labels, *like, (torch.int64, torch.int32))
    check_parameter("row_weight", call.row_weight, *like)
    check_number("beta", call.beta, 0.0, 1.0, "a number from 0 to 1")
