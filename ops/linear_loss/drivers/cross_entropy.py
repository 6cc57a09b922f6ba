"""The driver of a linear layer and the cross entropy of its outputs, chunk by chunk, on one rank or on several.

The math is in `fused_linear_ce.py`. Where each rank of a group has some of the classes, the ranks exchange statistics
of their logits, as in `vocab_parallel_linear_ce.py`; all else is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.scaling import mean_of_all, scale_op
from llmk.ops.linear_loss.chunked import (
    DIFFERENTIABLE,
    ChunkedLinear,
    CompactedTokens,
    LinearCall,
    LinearGradients,
    LinearOp,
    VocabShard,
    check_chunk_size,
    check_linear,
    fake_gradients,
    float16_scale,
    largest,
    local_fields,
    recomputing_op,
    scaled,
    with_shard,
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
    replicate_only,
    row_axes,
)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCall(LinearCall):
    """A linear layer and the cross entropy of its outputs."""

    target: Tensor  # [...]
    weight: Tensor | None  # [classes of all ranks]
    row_weight: Tensor | None = None  # the target's shape
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    with_metrics: bool = False  # return entropies and correctness too

    @property
    def token_tensors(self) -> tuple[str, ...]:
        return "input", "target", "row_weight"

    def mask(self) -> Tensor:
        return counted(self.target, self.ignore_index)[0]

    def targets(self) -> Tensor:
        return self.target.reshape(-1).contiguous()

    def linear(self, impl: Implementation, compacted: CompactedTokens) -> ChunkedLinear:
        return ChunkedLinear(
            self.input,
            self.linear_weight,
            self.linear_bias,
            self.plan(impl),
            float32_logits=self.float32_logits,
            count=self.product_end(compacted),
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
        return torch.where(self.mask().reshape(-1), self.row_weight.reshape(-1).float(), 0.0)

    @property
    def bounded_by_statistics(self) -> bool:
        """True if only the rows' statistics bound the logits' gradient: that of a z-loss grows with the logits."""
        return self.input.dtype == torch.float16 and self.z_loss > 0

    def largest_gradient(self, loss_grads: Tensor, stats: Tensor | None) -> Tensor:
        """Return what no element of the logits' gradient exceeds: that of a cross entropy is at most its weight.

        That of a z-loss has the class's probability as a factor, of which the largest one is 1 / s.
        """
        bound = largest(loss_grads) if self.weight is None else largest(loss_grads) * largest(self.weight)
        if self.z_loss == 0:
            return bound
        assert stats is not None
        m, s = stats
        slopes = loss_grads * (m + s.log()) / s
        return bound + 2 * self.z_loss * largest(torch.where(self.mask().reshape(-1), slopes, 0.0))


class TokenMetrics:
    """The entropy of each token's logits and whether its target is correct, in one more pass over a block's logits.

    It reads the logits before their gradient overwrites them.
    """

    def __init__(self, impl: Implementation, call: CrossEntropyCall) -> None:
        self.impl, self.call = impl, call
        self.transform = LogitTransform(
            ignore_index=call.ignore_index,
            scale=1.0,
            softcap=call.softcap,
            temperature=1.0,
            first_class=call.first_class,
            num_classes=call.num_classes,
        )
        self.entropies: list[Tensor] = []
        self.correct: list[Tensor] = []

    def add(self, logits: Tensor, target: Tensor) -> None:
        candidates = target.unsqueeze(-1)
        parts = self.call.gather_ranks(self.impl.logprobs.statistics(logits, candidates, self.transform))
        _, entropy, _ = self.impl.logprobs.combine(parts, candidates, self.transform)
        by_rank = parts.view(self.call.ranks, STATISTICS + 1, target.shape[0])
        largest, target_logit = by_rank[:, 0].amax(0), by_rank[:, STATISTICS].amax(0)
        self.entropies.append(entropy)
        self.correct.append((target.long() != self.transform.ignore_index) & (target_logit == largest))

    def per_token(self, compacted: CompactedTokens) -> tuple[Tensor, Tensor]:
        """Return entropies and correctness `[...]`, float32, 0 for tokens that do not count."""
        return compacted.scatter(torch.cat(self.entropies)), compacted.scatter(torch.cat(self.correct).float())

    def means(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means over the `count` tokens that count, NaN over none."""
        return torch.cat(self.entropies).sum() / count, torch.cat(self.correct).float().sum() / count


def _losses(impl: Implementation, call: CrossEntropyCall, logits: Tensor, target: Tensor, options: Options) -> Rows:
    """Compute the losses of a block's tokens over the classes of all ranks."""
    if call.shard is None:
        return impl.cross_entropy.losses(logits, target, options)
    parts = call.gather_ranks(impl.vocab_parallel.statistics(logits, target, options))
    return impl.vocab_parallel.combine(parts, target, options)


def _gradients(
    impl: Implementation,
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dlogits: Tensor,
    options: Options,
) -> None:
    """Write the gradient of a block's logits, which may be the logits; a rank may have no classes."""
    if logits.shape[1] > 0:
        impl.cross_entropy.gradients(grad, None, logits, target, stats, dlogits, options)


def _loss_gradients(call: CrossEntropyCall, weights: Tensor | None, mean: bool) -> Tensor:
    """Return the gradient of each token's loss or one for all; the denominator of a mean is known before the logits.

    Where weights make the denominator 0 the tokens that count get gradients that are not finite, like the loss. Without
    weights no token counts then, and all gradients are 0.
    """
    target = call.targets()
    grads = torch.ones((), dtype=torch.float32, device=target.device) if weights is None else weights
    if not mean:
        return grads
    mask, index = counted(target, call.ignore_index)
    each = grads.expand(mask.shape)
    if call.weight is not None:
        mask = mask & (index >= 0) & (index < call.num_classes)
        each = grads * call.weight[torch.where(mask, index, 0)].float()
    return grads / torch.where(mask, each, 0.0).sum()


def _losses_and_gradients(
    impl: Implementation, call: CrossEntropyCall, gradients: LinearGradients, loss_grads: Tensor,
    metrics: TokenMetrics | None,
) -> Rows:  # fmt: skip
    """Make one pass over the blocks, given the gradient of each loss; it frees their buffers."""
    options, target = call.options(gradients.linear), call.targets()
    parts: list[Rows] = []
    for block, logits, dlogits in gradients.blocks():
        part = _losses(impl, call, logits, target[block], options)
        parts.append(part)
        if metrics is not None:
            metrics.add(logits, target[block])
        if any(gradients.need):
            grad = loss_grads[block] if loss_grads.dim() else loss_grads
            _gradients(impl, grad, logits, target[block], part.stats, dlogits, options)
    return Rows.cat(parts)


def _forward(
    impl: Implementation, full_call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, ...]:
    """Return the loss, entropy and correctness; statistics, a denominator, and gradients of input, weight and bias.

    With "none" the backward pass recomputes the logits, given the statistics `[2, ...]` of each token. The denominator
    is 1 except for "total": the sum, with the denominator of the mean, both of which processes with some tokens each
    add up first.
    """
    compacted, call = full_call.compacted(impl)
    weights = call.token_weights()
    linear, need = call.linear(impl, compacted), (need_dx, need_dw, need_db)
    metrics = TokenMetrics(impl, call) if call.with_metrics else None
    loss_grads = _loss_gradients(call, weights, reduction == "mean")
    if call.bounded_by_statistics and any(need):
        nothing = LinearGradients(linear, (False, False, False), call.saved_dtypes)
        loss, counts, stats = _losses_and_gradients(impl, call, nothing, loss_grads, metrics)
        gradients = _gradients_of_losses(impl, call, linear, loss_grads, stats, need, call.saved_dtypes)
    else:
        scale = float16_scale(call.input.dtype, need, lambda: call.largest_gradient(loss_grads, None))
        gradients = LinearGradients(linear, need, call.saved_dtypes, scale)
        loss, counts, stats = _losses_and_gradients(impl, call, gradients, scaled(loss_grads, scale), metrics)
    entropy, correct = loss.new_empty((0,)), loss.new_empty((0,))
    if weights is not None:
        loss, counts = loss * weights, counts * weights
    if reduction == "none":
        loss, stats = compacted.scatter(loss), compacted.scatter_statistics(stats)
        if metrics is not None:
            entropy, correct = metrics.per_token(compacted)
    else:
        loss, stats = _reduced(impl, loss, counts, reduction), loss.new_empty((0,))
        if metrics is not None:
            entropy, correct = metrics.means(full_call.mask().sum())
    denominator = impl.cross_entropy.sum(counts) if reduction == "total" else loss.new_ones(())
    return loss, entropy, correct, stats, denominator, *gradients.results(compacted)


def _reduced(impl: Implementation, loss: Tensor, counts: Tensor, reduction: str) -> Tensor:
    return impl.cross_entropy.mean(loss, counts)[0] if reduction == "mean" else impl.cross_entropy.sum(loss)


def _backward(
    impl: Implementation, full_call: CrossEntropyCall, grad: Tensor, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of each token's loss; the logits are recomputed."""
    compacted, call = full_call.compacted(impl)
    grad, stats = compacted.gather(grad), compacted.gather_statistics(stats)
    linear, weights = call.linear(impl, compacted), call.token_weights()
    grad, need = grad if weights is None else grad * weights, (need_dx, need_dw, need_db)
    return _gradients_of_losses(impl, call, linear, grad, stats, need, call.recomputed_dtypes).results(compacted)


def _gradients_of_losses(
    impl: Implementation, call: CrossEntropyCall, linear: ChunkedLinear, loss_grads: Tensor, stats: Tensor,
    need: tuple[bool, bool, bool], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> LinearGradients:  # fmt: skip
    """Make the logits again and the linear layer's gradients, given that of each loss and its statistics."""
    options, target = call.options(linear), call.targets()
    scale = float16_scale(call.input.dtype, need, lambda: call.largest_gradient(loss_grads, stats))
    grads, gradients = scaled(loss_grads, scale), LinearGradients(linear, need, dtypes, scale)
    for block, logits, dlogits in gradients.blocks():
        grad = grads[block] if grads.dim() else grads
        _gradients(impl, grad, logits, target[block], stats[:, block].contiguous(), dlogits, options)
    return gradients


def _fake_forward(call: CrossEntropyCall, reduction: str, *need: bool) -> tuple[Tensor, ...]:
    per_token = reduction == "none"
    shape = tuple(call.tokens) if per_token else ()
    metrics = shape if call.with_metrics else (0,)
    shapes = shape, metrics, metrics, (2, *shape) if per_token else (0,), ()
    results = (call.input.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return *results, *fake_gradients(call, need, call.saved_dtypes)


def _products(
    impl: Implementation, call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool
) -> int:
    """Count one product for the logits, one more if they are made twice, and one for each gradient."""
    return 1 + (call.bounded_by_statistics and (need_dx or need_dw or need_db)) + need_dx + need_dw


def _forward_sharding(input, reduction, need_dx):
    if reduction == "mean":
        return replicate_only()
    denominator = PARTIAL if reduction == "total" else REPLICATE

    def outputs(axis):
        if reduction == "none":
            return [axis, REPLICATE, REPLICATE, 1 + axis, *[REPLICATE] * 4]
        return [PARTIAL, *[REPLICATE] * 3, denominator, axis if need_dx else REPLICATE, PARTIAL, PARTIAL]

    return [(outputs(axis), _input_splits(axis)) for axis in row_axes(input)]


def _backward_sharding(input, need_dx):
    return [
        ([axis if need_dx else REPLICATE, PARTIAL, PARTIAL], [*_input_splits(axis), axis, 1 + axis])
        for axis in row_axes(input)
    ]


def _input_splits(axis):
    """Return the splits of the call's tensors where the tokens are split."""
    return [axis, REPLICATE, REPLICATE, axis, REPLICATE, axis]


class CrossEntropyOps:
    """The kernel ops of one public operator and their derivative: saved gradients, or with "none" recomputed ones.

    Args:
        name: The public operator's name.
        splits_tokens: A DTensor's tokens may be sharded over processes.
    """

    def __init__(self, name: str, *, splits_tokens: bool = False) -> None:
        self.splits_tokens = splits_tokens
        self.forward = LinearOp(
            f"_{name}_fwd",
            CrossEntropyCall,
            _forward,
            outputs=8,
            fake=_fake_forward,
            products=_products,
        )
        self.backward = recomputing_op(f"_{name}_bwd", CrossEntropyCall, _backward)
        self.scale = scale_op(f"_{name}_scale")
        self.forward.op.register_sharding(_forward_sharding if splits_tokens else replicate_only)
        self.backward.op.register_sharding(_backward_sharding if splits_tokens else replicate_only)
        self.forward.op.register_autograd(
            self._differentiate,
            setup_context=self._save,
            depends_on=[DIFFERENTIABLE, [], []],
            takes_none=True,
            keeps=lambda needs_input_grad, args: (
                (False, False, False) if self._recomputes(args) else needs_input_grad[:3]
            ),
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.backward.op, self.scale

    def _recomputes(self, args: Sequence[Any]) -> bool:
        """Return True if the backward pass recomputes the logits: each token has an incoming gradient of its own."""
        return args[self.forward.fields] == "none"

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, _, stats, denominator, *gradients = output
        ctx.recomputes = self._recomputes(inputs)
        if ctx.recomputes:
            self.forward.save_call(ctx, inputs, stats)
        else:  # the caller divides a total, whose gradient is that of a sum
            total = inputs[self.forward.fields] == "total"
            self.forward.save_gradients(ctx, inputs, None if total else denominator, *gradients)

    def _differentiate(self, ctx: Any, grad: Tensor, *_: None) -> Any:
        if ctx.recomputes:
            return self.forward.recomputed_gradients(ctx, self.backward, grad)
        return self.forward.scaled_gradients(ctx, self.scale, grad)

    def __call__(self, arguments: Mapping[str, Any], *, with_metrics: bool = False) -> tuple[Tensor, ...]:
        """Return the loss, and with metrics entropy and correctness, from the public operator's arguments."""
        arguments, reduction = {**arguments, "with_metrics": with_metrics}, arguments["reduction"]
        local, as_given, is_sharded = local_fields(arguments, [DIFFERENTIABLE], ["target", "weight", "row_weight"])
        call = _checked_call(local)
        if reduction == "mean" and is_sharded and self.splits_tokens:
            total, _, _, _, denominator, *_ = self.forward(call, "total")
            return (mean_of_all(total, denominator.detach(), call.weight is not None or call.row_weight is not None),)
        return tuple(as_given(result) for result in self._results(call, reduction))

    def of_shard(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the same where they say who has which classes; without a group this rank has all of them."""
        check_linear(*(arguments[name] for name in DIFFERENTIABLE))
        fields, own = with_shard(arguments), arguments["linear_weight"].shape[0]
        fields["shard"] = fields["shard"] or VocabShard(0, own, group_name="", dx_group_name="")
        return self._results(_checked_call(fields), arguments["reduction"])

    def _results(self, call: CrossEntropyCall, reduction: str) -> tuple[Tensor, ...]:
        return self.forward(call, reduction)[: 3 if call.with_metrics else 1]


def _checked_call(arguments: Mapping[str, Any]) -> CrossEntropyCall:
    """Check that the arguments fit each other and return the call.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
    """
    call = CrossEntropyCall.checked(arguments)
    check_loss_options(
        call.num_classes, call.input, call.target, call.weight, arguments["reduction"], call.label_smoothing,
        call.softcap, call.z_loss,
    )  # fmt: skip
    if call.row_weight is not None:
        check_dtype("row_weight", call.row_weight)
        check_shape("row_weight", call.row_weight, call.target.shape, "one for each token, the shape of target")
        check_same("row_weight", call.row_weight, "input", call.input)
    check_chunk_size(call.chunk_size)
    return call
