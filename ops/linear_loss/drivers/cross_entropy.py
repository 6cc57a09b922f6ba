"""The cross entropy of a linear layer's outputs, chunk by chunk, on one rank or on several.

The math is in `fused_linear_ce.py`. Where each rank of a group has some of the classes, the ranks exchange the sums of
their exponentials, as in `vocab_parallel_linear_ce.py`; all else is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.scaling import mean_of_all, scale_op
from llmk.ops.linear_loss.chunked import (
    CompactedTokens,
    LinearOp,
    VocabShard,
    fake_gradients,
    local_fields,
    recomputing_op,
    with_shard,
)
from llmk.ops.linear_loss.drivers._rows_call import RowsCall, check_classes
from llmk.ops.linear_loss.head import DIFFERENTIABLE, LINEAR, check_linear
from llmk.ops.linear_loss.kernels import Implementation
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows.engine import first_pass, in_forward, second_pass
from llmk.ops.linear_loss.rows.projection import Gradients
from llmk.ops.linear_loss.rows.softmax import STATISTICS, RowGradients, RowResults, log_total_of
from llmk.ops.loss.cross_entropy_options import check_loss_options
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
class CrossEntropyCall(RowsCall):
    """A linear layer and the cross entropy of its outputs."""

    token_tensors = "input", "target", "row_weight"
    target: Tensor  # [...]
    weight: Tensor | None  # [classes of all ranks]
    row_weight: Tensor | None = None  # the target's shape
    label_smoothing: float
    softcap: float
    z_loss: float
    with_metrics: bool = False  # return entropies and correctness too

    def mask(self) -> Tensor:
        return self.target.long() != self.ignore_index  # int32 would wrap an index that it does not hold

    @property
    def transform(self) -> Transform:
        return Transform(softcap=self.softcap, rounded=not self.float32_logits)

    def row_classes(self) -> Tensor:
        return self.target.reshape(-1, 1)

    def class_weights(self) -> Tensor | None:
        """Return the weights with which smoothing adds up the logits of this rank's classes."""
        if not self.label_smoothing:
            return None
        V = self.linear_weight.shape[0]
        if self.weight is None:
            return torch.ones((V,), dtype=torch.float32, device=self.input.device)
        return self.weight[self.first_class : self.first_class + V].contiguous()

    def token_weights(self) -> Tensor | None:
        """Return the weight of each token's loss, `[N]`, 0 where a token does not count, or None."""
        if self.row_weight is None:
            return None
        return torch.where(self.mask().reshape(-1), self.row_weight.reshape(-1).float(), 0.0)

    @property
    def makes_gradients_again(self) -> bool:
        """True if the logits are made twice where gradients are wanted."""
        return (self.label_smoothing > 0 and self.softcap > 0) or self.input.dtype == torch.float16


class CrossEntropy:
    """The cross entropy of rows as a function of what they give, and its derivative."""

    def __init__(self, call: CrossEntropyCall) -> None:
        self.call = call
        self.weights = None if call.weight is None else self._class_weights(call.weight)  # [N]; None for 1

    @cached_property
    def mask(self) -> Tensor:
        """The mask of the rows that count, `[N]`."""
        return self.call.mask().reshape(-1)

    def _class_weights(self, weight: Tensor) -> Tensor:
        """Return the weights of the rows' classes, `[N]`, 0 where a row does not count."""
        target = self.call.target.reshape(-1).long()
        valid = self.mask & (target >= 0) & (target < self.call.num_classes)
        return torch.where(valid, weight[torch.where(valid, target, 0)].float(), 0.0)

    def total(self, compacted: CompactedTokens, token_weights: Tensor | None) -> Tensor:
        """Return the denominator of a mean, `[]`: the sum of the weights, or the number of rows that count."""
        if self.weights is not None:
            return (self.weights if token_weights is None else self.weights * token_weights).sum()
        if token_weights is None:
            counts = compacted.counts  # of one segment
            return self.call.mask().float().sum() if counts is None else counts.view(()).float()
        return token_weights.sum()

    def losses(self, rows: slice, results: RowResults) -> Tensor:
        """Return the loss of each of some rows, `[M]`: 0 of a row that does not count, whose results are."""
        smoothing, z_loss = self.call.label_smoothing, self.call.z_loss
        logprobs = results.logprobs.squeeze(-1)
        # 0 less it: no -0 of a row that does not count
        loss = torch.rsub(logprobs if self.weights is None else self.weights[rows] * logprobs, 0.0)
        if smoothing:
            smooth = self._all_weights() * results.logsumexp - results.weighted
            smooth = torch.where(self.mask[rows], smooth, 0.0)  # a weight may be infinite
            loss = (1 - smoothing) * loss + smoothing / self.call.num_classes * smooth
        if z_loss:  # no square: it may be infinite, and 0 times that is no number
            loss = loss + z_loss * results.logsumexp * results.logsumexp
        return loss

    def _all_weights(self) -> Tensor | float:
        """Return the sum of the weights of all classes."""
        weight = self.call.weight
        return float(self.call.num_classes) if weight is None else weight.sum(dtype=torch.float32)

    def differentiate(self, loss_grads: Tensor | None) -> None:
        """Take the gradients of the rows' losses, `[N]`, or one for all `[]`; None for 1."""
        if loss_grads is None:
            loss_grads = torch.ones((), dtype=torch.float32, device=self.call.input.device)
        self.row_grads = loss_grads.expand(self.call.tokens.numel())  # [N]
        grads = self.row_grads * (self.call.label_smoothing - 1)
        self.logprob_grads = (grads if self.weights is None else grads * self.weights).unsqueeze(1)  # [N, 1]

    def gradients(self, rows: slice, results: RowResults | Tensor) -> RowGradients:
        """Return the gradients of the results of some rows, given these, or the rows' statistics.

        Those of a row that does not count are not looked at.
        """
        smoothing, z_loss = self.call.label_smoothing, self.call.z_loss
        grad, weighted, logsumexp = self.row_grads[rows], None, None
        if z_loss:
            of_rows = results.logsumexp if isinstance(results, RowResults) else results[0] + log_total_of(results)
            logsumexp = 2 * z_loss * of_rows * grad
        if smoothing:
            smooth = torch.where(self.mask[rows], grad * (smoothing / self.call.num_classes), 0.0)
            of_all = smooth * self._all_weights()
            weighted, logsumexp = -smooth, of_all if logsumexp is None else logsumexp + of_all
        return RowGradients(self.logprob_grads[rows], None, logsumexp, weighted)


def _forward(
    impl: Implementation, full_call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, ...]:
    """Return the loss, entropy and correctness; statistics, a denominator, and gradients of input, weight and bias.

    With "none" the backward pass recomputes the logits, given the statistics `[5, ...]` of each token. There is a
    denominator for "total" alone: the sum, with the denominator of the mean, both of which processes with some tokens
    each add up first.
    """
    compacted, call = full_call.compacted(impl)
    check_classes(impl, call.target, call)
    losses, weights = CrossEntropy(call), call.token_weights()
    total = None if reduction == "none" else losses.total(compacted, weights)
    rows, need = call.softmax_rows(impl, compacted, moments=call.with_metrics), (need_dx, need_dw, need_db)
    gradients = Gradients(rows, need, call.saved_dtypes)
    if any(need):
        # The gradient of each token's loss, or one for all; the denominator of a mean is known before the logits. Where
        # weights make it 0 the tokens that count get gradients that are not finite, like the loss.
        loss_grads = weights
        if reduction == "mean" and total is not None:
            loss_grads = total.reciprocal() if weights is None else weights / total
        losses.differentiate(loss_grads)
        row_stats, results, is_largest = in_forward(rows, losses.gradients, gradients)
    else:
        row_stats, results, is_largest = first_pass(rows)
    loss = losses.losses(slice(None), results)
    if weights is not None:
        loss = loss * weights
    # Each output has memory of its own, also where it has none.
    entropy, correct, stats, denominator = [loss.new_empty((0,)) for _ in range(4)]
    if call.with_metrics:
        correct = (is_largest & losses.mask).float()
        entropy, correct = _metrics(full_call, compacted, results.entropy, correct, reduction)
    if total is not None and reduction == "total":
        denominator = total
    if reduction == "none":
        loss, stats = compacted.scatter(loss), compacted.scatter_statistics(row_stats)
    else:
        loss = loss.sum() / total if reduction == "mean" and total is not None else loss.sum()
    return loss, entropy, correct, stats, denominator, *gradients.results()


def _metrics(
    call: CrossEntropyCall, compacted: CompactedTokens, entropy: Tensor, correct: Tensor, reduction: str
) -> tuple[Tensor, Tensor]:
    """Return entropies and correctness `[...]`, or their means over the tokens that count."""
    if reduction == "none":
        return compacted.scatter_output(entropy), compacted.scatter_output(correct)
    count = call.mask().sum()
    if compacted.counts is not None:
        past = compacted.past(compacted.counts)[: entropy.shape[0]]
        entropy, correct = entropy.masked_fill(past, 0.0), correct.masked_fill(past, 0.0)
    return entropy.sum() / count, correct.sum() / count


def _backward(
    impl: Implementation, full_call: CrossEntropyCall, grad: Tensor, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of each token's loss; the logits are recomputed."""
    compacted, call = full_call.compacted(impl)
    grad, stats = compacted.gather(grad), compacted.gather_statistics(stats)
    losses, weights, need = CrossEntropy(call), call.token_weights(), (need_dx, need_dw, need_db)
    losses.differentiate(grad if weights is None else grad * weights)
    rows = call.softmax_rows(impl, compacted)

    gradients = Gradients(rows, need, call.recomputed_dtypes)
    second_pass(rows, stats, losses.gradients, gradients)
    return gradients.results()


def _fake_forward(call: CrossEntropyCall, reduction: str, *need: bool) -> tuple[Tensor, ...]:
    per_token = reduction == "none"
    shape = tuple(call.tokens) if per_token else ()
    metrics = shape if call.with_metrics else (0,)
    stats = (STATISTICS, *shape) if per_token else (0,)
    shapes = shape, metrics, metrics, stats, () if reduction == "total" else (0,)
    results = (call.input.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return *results, *fake_gradients(call, need, call.saved_dtypes)


def _products(
    impl: Implementation, call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool
) -> int:
    """Count one product for the logits, one more if they are made twice, and one for each gradient."""
    return 1 + (call.makes_gradients_again and (need_dx or need_dw or need_db)) + need_dx + need_dw


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
        self.target, self.ignore_index = map(self.forward.names.index, ("target", "ignore_index"))
        self.backward = recomputing_op(f"_{name}_bwd", CrossEntropyCall, _backward)
        self.scale = scale_op(f"_{name}_scale")
        self.forward.op.register_sharding(_forward_sharding if splits_tokens else replicate_only)
        self.backward.op.register_sharding(_backward_sharding if splits_tokens else replicate_only)
        self.forward.op.register_autograd(
            self._differentiate,
            setup_context=self._save,
            depends_on=[DIFFERENTIABLE, [], []],
            takes_none=True,
            keeps=self._keeps,
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.backward.op, self.scale

    def _keeps(self, needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[bool]:
        """Return which gradients are made; none where each token has an incoming one of its own."""
        return (False, False, False) if args[self.forward.fields] == "none" else needs_input_grad[:3]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.recomputes = inputs[self.forward.fields] == "none"
        if ctx.recomputes:
            self.forward.save_call(ctx, inputs, output[3])
        else:  # the caller divides a total, whose gradient is that of a sum
            counted = inputs[self.target], inputs[self.ignore_index]
            self.forward.save_gradients(ctx, inputs, output, counted)

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
        return tuple(map(as_given, self.forward(call, reduction)[: 3 if with_metrics else 1]))

    def of_shard(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the same where they say who has which classes; without a group this rank has all of them."""
        check_linear(*LINEAR(arguments))
        fields, own = with_shard(arguments), arguments["linear_weight"].shape[0]
        fields["shard"] = fields["shard"] or VocabShard(0, own, group_name="", dx_group_name="")
        return self.forward(_checked_call(fields), arguments["reduction"])[:1]


def _checked_call(arguments: Mapping[str, Any]) -> CrossEntropyCall:
    """Check that the arguments fit each other and return the call.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
    """
    call = CrossEntropyCall.checked(arguments)
    check_loss_options(
        call.num_classes, call.input, call.target, call.weight, arguments["reduction"], call.label_smoothing,
        call.z_loss,
    )  # fmt: skip
    if call.row_weight is not None:
        check_dtype("row_weight", call.row_weight)
        check_shape("row_weight", call.row_weight, call.target.shape, "one for each token, the shape of target")
        check_same("row_weight", call.row_weight, "input", call.input)
    return call
