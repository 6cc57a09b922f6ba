"""The driver of distillation from hidden states: the divergence, with or without a cross entropy of the student."""

from dataclasses import dataclass
from typing import Any

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
    PARTIAL,
    REPLICATE,
    KernelOp,
    check_dtype,
    check_number,
    check_same,
    check_shape,
    check_switch,
    replicate_only,
    row_axes,
)
from llmk.registry.record import FLOAT_DTYPES

LEAST = 2.0**-24
"""The smallest size that is measured: float16's smallest number, as logits of that dtype hold no smaller gradient."""
TEACHER = ["teacher_input", "teacher_linear_weight", "teacher_linear_bias"]


@dataclass(frozen=True, kw_only=True)
class DistillationCall(LinearCall):
    """A student's linear layer and a teacher's, whose weights have the same classes in the same order."""

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
    ce_weight: float  # weight of a cross entropy with the labels, 0 for none

    def linears(self, impl: Implementation, compacted: CompactedTokens) -> tuple[ChunkedLinear, ChunkedLinear]:
        """Return the student's and the teacher's layer in the same blocks."""
        plan = self.plan(impl, layers=2)
        layers = (
            (self.input, self.linear_weight, self.linear_bias),
            (self.teacher_input, self.teacher_linear_weight, self.teacher_linear_bias),
        )
        student, teacher = (
            ChunkedLinear(*layer, plan, float32_logits=self.float32_logits, count=compacted.count) for layer in layers
        )
        return student, teacher

    def softmaxes(self, student: ChunkedLinear) -> Softmaxes:
        return Softmaxes(
            mixture=Mixture(self.beta),
            temperature=self.temperature,
            softcap=self.softcap,
            teacher_softcap=self.teacher_softcap,
            exact=self.input.dtype == torch.float32,
            leave_ignored=student.leaves_rows_past_count,
        )

    @property
    def gradient_is_measured(self) -> bool:
        """True if float16 needs its size and a bound is far or none: of log-ratios, and with a small temperature."""
        return self.input.dtype == torch.float16 and (self.beta == 1 or self.temperature < 1)

    def largest_gradient(self, loss_grads: Tensor, ce_grads: Tensor | None) -> Tensor:
        """Return what no element of the logits' gradient exceeds.

        That of a divergence is r - p R (`kernels/_divergence.py`), where r and R are at most 1 each, but for beta 1.
        """
        bound = largest(loss_grads) * (2 / self.temperature)
        return bound if ce_grads is None else bound + largest(ce_grads)

    def mask(self) -> Tensor:
        if self.labels is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.input.device)
        return self.labels.long() != self.ignore_index  # int32 would wrap an index that it does not hold

    @property
    def token_tensors(self) -> tuple[str, ...]:
        return "input", "teacher_input", "labels", "row_weight"

    @property
    def linear_layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return (self.input, self.linear_weight), (self.teacher_input, self.teacher_linear_weight)


def _forward(
    impl: Implementation, full_call: DistillationCall, total: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, ...]:
    """Return the loss, its terms, a denominator, and gradients of input, weight and bias.

    The loss is the mean divergence, or its sum (`total`), and its terms are empty. With a `ce_weight` that times the
    mean cross entropy is added, and the terms are the divergence and the cross entropy.
    """
    compacted, call = full_call.compacted(impl)
    mask = call.mask().reshape(-1)
    count = mask.float()
    weights = count if call.row_weight is None else torch.where(mask, call.row_weight.reshape(-1).float(), 0.0)
    denominator = weights.sum()
    # Where weights make the denominator 0 the tokens that count get gradients that are not finite, as is the loss;
    # without weights no token counts then, and all gradients are 0.
    loss_grads, remaining = weights, denominator
    if not total:
        loss_grads, remaining = weights / denominator, torch.ones_like(denominator)
    (student, teacher), need = call.linears(impl, compacted), (need_dx, need_dw, need_db)
    ce_grads = count * (call.ce_weight * remaining / count.sum()) if call.ce_weight > 0 else None

    def bound() -> Tensor:
        if not call.gradient_is_measured:
            return call.largest_gradient(loss_grads, ce_grads)
        nothing = LinearGradients(student, (False, False, False), call.saved_dtypes)
        sizes = [torch.full((), LEAST, dtype=torch.float32, device=count.device)]
        _losses_and_gradients(impl, call, nothing, teacher, count, loss_grads, ce_grads, sizes)
        return torch.stack(sizes).amax()

    scale = float16_scale(call.input.dtype, need, bound)
    gradients = LinearGradients(student, need, call.saved_dtypes, scale)
    divergences, nll = _losses_and_gradients(impl, call, gradients, teacher, count, loss_grads, ce_grads)
    rest = remaining, *gradients.results(compacted)
    divergence = torch.where(mask, divergences * weights, 0.0).sum()
    divergence = divergence if total else divergence / denominator
    if call.ce_weight == 0:
        return divergence, *(divergence.new_empty((0,)) for _ in range(2)), *rest
    nll = nll / count.sum()
    return divergence + call.ce_weight * nll, divergence, nll, *rest


def _losses_and_gradients(
    impl: Implementation, call: DistillationCall, gradients: LinearGradients, teacher: ChunkedLinear, count: Tensor,
    loss_grads: Tensor, ce_grads: Tensor | None, sizes: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the rows' divergences and the sum of the cross entropies, given the gradient of each term.

    With `sizes` the largest size of each block's gradient of the logits is added to them; none need be needed.
    """
    softmaxes = call.softmaxes(gradients.linear)
    loss_grads = scaled(loss_grads, gradients.scale)
    ce_grads = None if ce_grads is None else scaled(ce_grads, gradients.scale)
    divergences, logprobs = [], [count.new_zeros((1,))]
    for (block, z, dz), (_, w) in zip(gradients.blocks(), teacher.blocks(), strict=True):
        loss, stats, sums = _divergences(impl, call, z, w, count[block], softmaxes)
        divergences.append(loss)
        ce = None
        if ce_grads is not None:
            logprob, ce = _cross_entropy_term(impl, call, z, block, ce_grads)
            logprobs.append(logprob)
        if (any(gradients.need) or sizes is not None) and z.numel() > 0:
            impl.divergence.gradients(z, w, count[block], loss_grads[block], stats, sums, ce, dz, softmaxes)
            if sizes is not None:
                sizes.append(torch.linalg.vector_norm(dz, float("inf"), dtype=torch.float32))
    return torch.cat(divergences), -torch.cat(logprobs).sum()


def _cross_entropy_term(
    impl: Implementation, call: DistillationCall, logits: Tensor, block: slice, grads: Tensor
) -> tuple[Tensor, CrossEntropyTerm]:
    """Return the labels' log-probabilities at temperature 1, and the term of the logits' gradient."""
    assert call.labels is not None
    transform = LogitTransform(
        ignore_index=call.ignore_index,
        scale=1.0,
        softcap=call.softcap,
        temperature=1.0,
        first_class=call.first_class,
        num_classes=call.num_classes,
    )
    target = call.labels.reshape(-1)[block].contiguous()
    rank = impl.logprobs.statistics(logits, target.unsqueeze(-1), transform)
    logprobs, _, stats = impl.logprobs.combine(call.gather_ranks(rank), target.unsqueeze(-1), transform)
    return logprobs.view(-1), CrossEntropyTerm(target, call.first_class, grads[block], stats)


def _divergences(
    impl: Implementation, call: DistillationCall, z: Tensor, w: Tensor, counts: Tensor, softmaxes: Softmaxes
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence `[M]` of vocabulary-parallel rows, and the statistics that its gradient needs."""

    def gathered(parts: Tensor, *shape: int) -> Tensor:
        return call.gather_ranks(parts).view(call.ranks, *shape, z.shape[0])

    parts = gathered(impl.divergence.statistics(z, w, counts, softmaxes), 2, 2)  # rank, tensor, number
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
    term = () if call.ce_weight > 0 else (0,)
    results = (call.input.new_empty(shape, dtype=torch.float32) for shape in ((), term, term, ()))
    return *results, *fake_gradients(call, need, call.saved_dtypes)


def _forward_sharding(input, total, need_dx):
    if not total:
        return replicate_only()
    return [
        (
            [PARTIAL, REPLICATE, REPLICATE, PARTIAL, axis if need_dx else REPLICATE, PARTIAL, PARTIAL],
            [axis, REPLICATE, REPLICATE, axis, REPLICATE, REPLICATE, axis, axis],
        )
        for axis in row_axes(input)
    ]


def _products(
    impl: Implementation, call: DistillationCall, total: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> float:
    teacher = call.teacher_input.shape[-1] / call.input.shape[-1]
    twice = call.gradient_is_measured and (need_dx or need_dw or need_db)
    return (1 + teacher) * (1 + twice) + need_dx + need_dw


class DistillationOps:
    """The kernel ops of one public operator, whose forward pass makes the gradients.

    Args:
        name: The public operator's name.
        splits: A DTensor's tokens, or classes, may be sharded over processes.
    """

    def __init__(self, name: str, *, splits: bool = False) -> None:
        self.splits = splits
        self.forward = CallOp(
            f"_{name}_fwd", DistillationCall, _forward, outputs=7, fake=_fake_forward, products=_products
        )
        self.scale = scale_op(f"_{name}_scale")
        self.forward.op.register_sharding(_forward_sharding if splits else replicate_only)
        # The caller divides a total, whose gradient is that of a sum.
        self.forward.differentiate_by_scaling(self.scale, lambda inputs, output: None if inputs[-4] else output[3])

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.scale

    def __call__(self, **fields: Any) -> tuple[Tensor, ...]:
        """Return the loss, and with a `ce_weight` its terms, from a call's fields, and who has which classes."""
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


def _checked_call(classes: tuple[torch.Size, torch.Size], **fields: Any) -> DistillationCall:
    """Check the arguments and return the call; `classes` are those of both weights as the caller has them.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
    """
    linears = _checked(fields, DIFFERENTIABLE) | _checked(fields, TEACHER)
    float32_logits = wants_float32(fields.pop("logits_dtype"), linears["input"])
    call = DistillationCall(**fields | linears, float32_logits=float32_logits)
    call.check_classes()
    if classes[0] != classes[1]:  # parts of DTensors may have equally many though these do not
        raise ValueError(
            f"teacher_linear_weight: expected the classes of linear_weight, {classes[0][0]}, got {classes[1][0]}"
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


def _checked(fields: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Check a linear layer's tensors; errors of `checked_linear` get the teacher's names."""
    try:
        return dict(zip(names, checked_linear(*(fields[name] for name in names)), strict=True))
    except (TypeError, ValueError) as error:
        if names is DIFFERENTIABLE:
            raise
        raise type(error)(f"teacher_{error}") from None
