"""The driver of a linear layer and the cross entropy of its outputs, chunk by chunk, on one rank or on several.

The math is in `fused_linear_ce.py`. Where each rank of a group has some of the classes, the ranks exchange statistics
of their logits, as in `vocab_parallel_linear_ce.py`; all else is the same.
"""

from dataclasses import dataclass
from functools import partial
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
    fake_gradients,
    fake_loss,
    local_fields,
)
from llmk.ops.linear_loss.kernels import STATISTICS, Implementation, LogitTransform
from llmk.ops.loss.cross_entropy_options import Columns, Options, Rows, check_loss_options, counted
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    check_dtype,
    check_same,
    check_shape,
    is_sharded,
    replicate_only,
    row_axes,
)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCall(LinearCall):
    """A linear layer and the cross entropy of its outputs."""

    target: Tensor  # [...]
    weight: Tensor | None  # [classes of all ranks]
    row_weight: Tensor | None  # the target's shape
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    skip_ignored: bool
    chunk_size: int

    def targets(self) -> Tensor:
        return self.target.reshape(-1).contiguous()

    def linear(self, compacted: CompactedTokens | None) -> ChunkedLinear:
        count = None if compacted is None else compacted.count
        return ChunkedLinear(
            self.input, self.linear_weight, self.linear_bias, self.chunk_size, self.mean_classes, count=count
        )

    def options(self, linear: ChunkedLinear) -> Options:
        columns = None if self.shard is None else Columns(self.first_class, self.num_classes)
        return Options(
            self.weight,
            self.ignore_index,
            self.label_smoothing,
            self.softcap,
            self.z_loss,
            columns,
            linear.leaves_rows_past_count,
        )

    def token_weights(self) -> Tensor | None:
        """Return the weight of each token's loss, `[N]`, 0 where a token does not count, or None."""
        if self.row_weight is None:
            return None
        mask, _ = counted(self.targets(), self.ignore_index)
        return torch.where(mask, self.row_weight.reshape(-1).float(), 0.0)

    def compacted(self, impl: Implementation) -> CompactedTokens | None:
        """Return the tokens that count if the others are to be skipped and can be, else None."""
        if not self.skip_ignored:
            return None
        mask, _ = counted(self.target, self.ignore_index)
        return CompactedTokens.of(mask, (self.input, self.linear_weight), on_host=impl.on_host)

    def of(self, compacted: CompactedTokens | None) -> "CrossEntropyCall":
        return self if compacted is None else compacted.select(self, "input", "target", "row_weight")


class TokenMetrics:
    """The entropy of each token's logits and whether its target is correct, in one more pass over a chunk's logits.

    It reads the logits before their gradient overwrites them.
    """

    def __init__(self, impl: Implementation, call: CrossEntropyCall) -> None:
        self.impl, self.shard = impl, call.shard
        self.transform = LogitTransform(
            call.ignore_index, 1.0, call.softcap, 1.0, first_class=call.first_class, num_classes=call.num_classes
        )
        self.entropies: list[Tensor] = []
        self.correct: list[Tensor] = []

    def add(self, logits: Tensor, target: Tensor) -> None:
        candidates = target.unsqueeze(-1)
        parts = self.impl.logprobs.statistics(logits, candidates, self.transform)
        parts = parts if self.shard is None else self.shard.gather(parts)
        _, entropy, _ = self.impl.logprobs.combine(parts, candidates, self.transform)
        ranks = 1 if self.shard is None else self.shard.ranks
        by_rank = parts.view(ranks, STATISTICS + 1, target.shape[0])
        largest, target_logit = by_rank[:, 0].amax(0), by_rank[:, STATISTICS].amax(0)
        self.entropies.append(entropy)
        self.correct.append((target.long() != self.transform.ignore_index) & (target_logit == largest))

    def per_token(self, compacted: CompactedTokens | None, shape: torch.Size) -> tuple[Tensor, ...]:
        """Return entropies and correctness `[...]`, float32, 0 for tokens that do not count."""
        each = torch.cat(self.entropies), torch.cat(self.correct).float()
        return tuple(x.view(shape) if compacted is None else compacted.scatter(x) for x in each)

    def means(self, target: Tensor) -> tuple[Tensor, ...]:
        """Return the means over the tokens that count, NaN over none."""
        count = (target.long() != self.transform.ignore_index).sum()
        return tuple(x.sum() / count for x in (torch.cat(self.entropies), torch.cat(self.correct).float()))


def _losses(impl: Implementation, call: CrossEntropyCall, logits: Tensor, target: Tensor, options: Options) -> Rows:
    """Compute the losses of a chunk's tokens over the classes of all ranks."""
    if call.shard is None:
        return impl.cross_entropy.losses(logits, target, options)
    parts = call.shard.gather(impl.vocab_parallel.statistics(logits, target, options))
    return impl.vocab_parallel.combine(parts, target, options)


def _gradients(
    impl: Implementation, grad: Tensor, logits: Tensor, target: Tensor, stats: Tensor, options: Options
) -> None:
    """Overwrite a chunk's logits with their gradient; a rank may have no classes."""
    if logits.shape[1] > 0:
        impl.cross_entropy.gradients(grad, None, logits, target, stats, logits, options)


def _loss_gradients_and_denominator(
    call: CrossEntropyCall, weights: Tensor | None, mean: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of each token's loss or one for all, and the denominator left to the backward pass.

    The denominator of a mean is known before the logits, so the gradients are divided here and the backward pass
    divides by 1. It is left to the backward pass for float16, whose range does not hold the divided gradients.

    Where weights make the denominator 0 the tokens that count get gradients that are not finite, like the loss. Without
    weights no token counts then, and all gradients are 0.
    """
    target = call.targets()
    one = torch.ones((), dtype=torch.float32, device=target.device)
    grads = one if weights is None else weights
    if not mean:
        return grads, one
    mask, index = counted(target, call.ignore_index)
    weighted = call.weight is not None or weights is not None
    each = grads.expand(mask.shape)
    if call.weight is not None:
        mask = mask & (index >= 0) & (index < call.num_classes)
        each = grads * call.weight[torch.where(mask, index, 0)].float()
    denominator = torch.where(mask, each, 0.0).sum()
    if call.input.dtype != torch.float16:
        return grads / denominator, one
    return torch.where(denominator == 0, float("inf"), grads) if weighted else grads, denominator


def _losses_and_gradients(
    impl: Implementation, call: CrossEntropyCall, gradients: LinearGradients, loss_grads: Tensor,
    metrics: TokenMetrics | None,
) -> Rows:  # fmt: skip
    """Make one pass over the chunks, given the gradient of each loss; it frees their buffer."""
    options, target = call.options(gradients.linear), call.targets()
    parts: list[Rows] = []
    for chunk, logits in gradients.linear.chunks():
        part = _losses(impl, call, logits, target[chunk], options)
        parts.append(part)
        if metrics is not None:
            metrics.add(logits, target[chunk])
        if any(gradients.need):
            grad = loss_grads[chunk] if loss_grads.dim() else loss_grads
            _gradients(impl, grad, logits, target[chunk], part.stats, options)
            gradients.add(chunk, logits)
    return Rows.cat(parts)


def _reduced(
    impl: Implementation, full_call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool, *,
    with_metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the reduced loss, the means of the metrics, a denominator, and gradients of input, weight and bias.

    The backward pass divides the gradients by the denominator, except for "total": the sum, with the denominator of the
    mean, both of which processes with some tokens each add up first.
    """
    compacted = full_call.compacted(impl)
    call = full_call.of(compacted)
    metrics = TokenMetrics(impl, call) if with_metrics else None
    weights = call.token_weights()
    gradients = LinearGradients(call.linear(compacted), (need_dx, need_dw, need_db), call.dx_dtype)
    loss_grads, denominator = _loss_gradients_and_denominator(call, weights, reduction == "mean")
    loss, counts, _ = _losses_and_gradients(impl, call, gradients, loss_grads, metrics)
    if weights is not None:
        loss, counts = loss * weights, counts * weights
    if reduction == "mean":
        loss, _ = impl.cross_entropy.mean(loss, counts)
    else:
        loss = impl.cross_entropy.sum(loss)
    if reduction == "total":
        denominator = impl.cross_entropy.sum(counts)
    dx = gradients.dx if compacted is None or not need_dx else compacted.scatter(gradients.dx)
    means = () if metrics is None else metrics.means(full_call.target)
    return loss, *means, denominator, dx, gradients.dw.to(call.saved_dtypes[1]), gradients.db


def _per_token(impl: Implementation, full_call: CrossEntropyCall, *, with_metrics: bool) -> tuple[Tensor, ...]:
    """Return each token's loss `[...]`, its metrics if asked for, and its maximum and sum `[2, ...]`."""
    compacted, shape = full_call.compacted(impl), full_call.target.shape
    call = full_call.of(compacted)
    metrics = TokenMetrics(impl, call) if with_metrics else None
    linear = call.linear(compacted)
    options, target, parts = call.options(linear), call.targets(), []
    for chunk, logits in linear.chunks():
        parts.append(_losses(impl, call, logits, target[chunk], options))
        if metrics is not None:
            metrics.add(logits, target[chunk])
    loss, _, stats = Rows.cat(parts)
    weights = call.token_weights()
    loss = loss if weights is None else loss * weights
    if compacted is None:
        loss, stats = loss.view(shape), stats.view(2, *shape)
    else:
        loss, stats = compacted.scatter(loss), compacted.scatter(stats.t()).movedim(-1, 0).contiguous()
    each = () if metrics is None else metrics.per_token(compacted, shape)
    return loss, *each, stats


def _per_token_gradients(
    impl: Implementation, full_call: CrossEntropyCall, grad: Tensor, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of each token's loss; the logits are recomputed."""
    compacted = full_call.compacted(impl)
    call = full_call.of(compacted)
    if compacted is not None:
        grad, stats = compacted.gather(grad), compacted.gather(stats.movedim(0, -1)).t()
    linear = call.linear(compacted)
    options, target = call.options(linear), call.targets()
    gradients = LinearGradients(linear, (need_dx, need_dw, need_db), call.dx_dtype)
    weights = call.token_weights()
    grad = grad.reshape(-1) if weights is None else grad.reshape(-1) * weights
    stats = stats.reshape(2, -1)
    for chunk, logits in linear.chunks():
        _gradients(impl, grad[chunk], logits, target[chunk], stats[:, chunk].contiguous(), options)
        gradients.add(chunk, logits)
    dtype = call.input.dtype
    dx = gradients.dx if compacted is None or not need_dx else compacted.scatter(gradients.dx)
    return dx, gradients.dw.to(dtype), gradients.db.to(dtype)


def _reduced_sharding(input, *args):
    *_, reduction, need_dx, _, _ = args
    if reduction == "mean":
        return replicate_only()
    denominator = PARTIAL if reduction == "total" else REPLICATE
    return [
        (
            [PARTIAL, denominator, axis if need_dx else REPLICATE, PARTIAL, PARTIAL],
            [axis, REPLICATE, REPLICATE, axis, REPLICATE, axis],
        )
        for axis in row_axes(input)
    ]


def _per_token_sharding(input, *_):
    return [([axis, 1 + axis], [axis, REPLICATE, REPLICATE, axis, REPLICATE, axis]) for axis in row_axes(input)]


def _per_token_gradients_sharding(input, *args):
    *_, need_dx, _, _ = args
    return [
        (
            [axis if need_dx else REPLICATE, PARTIAL, PARTIAL],
            [axis, REPLICATE, REPLICATE, axis, REPLICATE, axis, axis, 1 + axis],
        )
        for axis in row_axes(input)
    ]


class CrossEntropyOps:
    """The kernel ops of one public operator and their derivatives, for a reduced loss and for per-token losses.

    Args:
        name: The public operator's name.
        with_metrics: Return entropies and correctness after the loss, without gradients.
        splits_tokens: A DTensor's tokens may be sharded over processes.
    """

    def __init__(self, name: str, *, with_metrics: bool = False, splits_tokens: bool = False) -> None:
        metrics = 2 if with_metrics else 0
        self.splits_tokens = splits_tokens
        self.reduced = CallOp(
            f"_{name}_fwd",
            CrossEntropyCall,
            partial(_reduced, with_metrics=with_metrics),
            outputs=5 + metrics,
            fake=partial(_fake_reduced, metrics=metrics),
            products=lambda call, reduction, dx, dw, db: 1 + dx + dw,
        )
        self.per_token = CallOp(
            f"_{name}_rows_fwd",
            CrossEntropyCall,
            partial(_per_token, with_metrics=with_metrics),
            outputs=2 + metrics,
            fake=partial(_fake_per_token, metrics=metrics),
            products=lambda call: 1,
        )
        self.per_token_gradients = CallOp(
            f"_{name}_rows_bwd",
            CrossEntropyCall,
            _per_token_gradients,
            outputs=3,
            fake=_fake_per_token_gradients,
            products=lambda call, *rest: 1 + rest[-3] + rest[-2],
        )
        self.scale = scale_op(f"_{name}_scale")
        strategies = (_reduced_sharding, _per_token_sharding, _per_token_gradients_sharding)
        for op, strategy in zip((self.reduced, self.per_token, self.per_token_gradients), strategies, strict=True):
            op.op.register_sharding(strategy if splits_tokens else replicate_only)
        self.reduced.differentiate_by_scaling(self.scale, lambda reduction: reduction == "total", metrics)
        self.per_token.op.register_autograd(
            self._per_token_backward,
            setup_context=lambda ctx, inputs, output: self.per_token.save_call(ctx, inputs, output[-1]),
            depends_on=[DIFFERENTIABLE, *[[]] * metrics],
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.reduced.op, self.per_token.op, self.per_token_gradients.op, self.scale

    def _per_token_backward(self, ctx: Any, grad: Tensor, *constants: Tensor) -> Any:
        call, (stats,) = self.per_token.saved_call(ctx)
        need = ctx.needs_input_grad[:3]
        dx, dw, db = self.per_token_gradients(call, grad, stats, *need)
        dx = call.input_gradient(dx) if need[0] else None
        return dx, dw if need[1] else None, db if need[2] else None, *[None] * (self.per_token.fields - 3)

    def __call__(self, reduction: str, **fields: Any) -> tuple[Tensor, ...]:
        """Return the loss, and with metrics entropy and correctness, from a call's fields."""
        if fields["shard"] is None:
            fields, as_given = local_fields(fields, [DIFFERENTIABLE], ["target", "weight", "row_weight"])
            return tuple(as_given(result) for result in self._results(_checked_call(reduction, **fields), reduction))
        return self._results(_checked_call(reduction, **fields), reduction)

    def _results(self, call: CrossEntropyCall, reduction: str) -> tuple[Tensor, ...]:
        if reduction == "none":
            return self.per_token(call)[:-1]
        if reduction == "mean" and self.splits_tokens and is_sharded(call.input, call.linear_weight, call.target):
            total, denominator, *_ = self.reduced(call, "total")
            return (mean_of_all(total, denominator.detach(), call.weight is not None or call.row_weight is not None),)
        return self.reduced(call, reduction)[:-4]


def _checked_call(reduction: str, **fields: Any) -> CrossEntropyCall:
    """Check that the arguments fit each other and return the call.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
    """
    call = CrossEntropyCall.checked(**fields)
    first, classes, num_classes = call.first_class, call.linear_weight.shape[0], call.num_classes
    if not 0 <= first <= first + classes <= num_classes:
        raise ValueError(
            f"num_classes: expected at least vocab_start {first} and the {classes} classes of linear_weight, "
            f"got {num_classes}"
        )
    check_loss_options(
        num_classes, call.input, call.target, call.weight, reduction, call.label_smoothing, call.softcap, call.z_loss
    )
    if call.row_weight is not None:
        check_dtype("row_weight", call.row_weight)
        check_shape("row_weight", call.row_weight, call.target.shape, "one for each token, the shape of target")
        check_same("row_weight", call.row_weight, "input", call.input)
    check_chunk_size(call.chunk_size)
    return call


def _fake_reduced(call: CrossEntropyCall, reduction: str, *need: bool, metrics: int) -> tuple[Tensor, ...]:
    loss, *rest = fake_loss(call, reduction, *need)
    return loss, *(call.input.new_empty((), dtype=torch.float32) for _ in range(metrics)), *rest


def _fake_per_token(call: CrossEntropyCall, *, metrics: int) -> tuple[Tensor, ...]:
    shapes = *[call.target.shape] * (1 + metrics), (2, *call.target.shape)
    return tuple(call.input.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _fake_per_token_gradients(call: CrossEntropyCall, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(call, rest[-3:], [call.dx_dtype, call.input.dtype, call.input.dtype])
