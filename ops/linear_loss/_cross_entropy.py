"""The driver of a linear layer and the cross entropy of its outputs, chunk by chunk: what the fused losses share.

The math is in `fused_linear_ce.py`. What a chunk's rows of logits cost and give is the loss of rows: `RowLoss`, of
whole rows, or `SliceLoss`, of rows whose classes lie on several ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmk.ops.common.scaling import scale_op
from llmk.ops.linear_loss._call import CallOp, LinearCall, fake_gradients, saved_dtypes
from llmk.ops.linear_loss._chunked_linear import ChunkedLinear, LinearGradients
from llmk.ops.linear_loss._ignored import Kept
from llmk.ops.linear_loss._logprob_rows import CPU as LOGPROBS_CPU
from llmk.ops.linear_loss._logprob_rows import KERNELS as LOGPROBS
from llmk.ops.linear_loss._logprob_rows_cpu import Scores
from llmk.ops.linear_loss._ranks import group_size, sum_over
from llmk.ops.linear_loss._row_loss_slices import SLICE_CPU, SliceLoss, row_loss_over
from llmk.ops.linear_loss._scaled import DIFFERENTIABLE, differentiate_by_scaling
from llmk.ops.linear_loss._watch import Watch
from llmk.ops.loss.row_loss import CPU, RowLoss
from llmk.ops.loss.row_loss_math import Columns, Options, Rows, counted
from llmk.registry import KernelOp, cdiv
from llmk.registry.sharding import Rule

Need = tuple[bool, bool, bool]
"""Whether the gradients of the input, the weight and the bias are needed."""


@dataclass(frozen=True)
class CrossEntropyCall(LinearCall):
    """The classes of `linear_weight` begin at `vocab_start`; others are on the other ranks of a group."""

    target: Tensor  # [...]
    weight: Tensor | None  # [V]
    row_weight: Tensor | None  # the target's shape
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    skip_ignored: bool
    chunk_size: int
    vocab_start: int
    num_classes: int
    group_name: str  # "" where there is none
    dx_group_name: str  # over which the gradient of the input is summed

    @property
    def dtypes(self) -> list[torch.dtype]:
        return saved_dtypes(self.input.dtype, self.dx_group_name)

    def targets(self) -> Tensor:
        return self.target.reshape(-1).contiguous()

    def linear(self, kept: Kept | None) -> ChunkedLinear:
        classes = cdiv(self.num_classes, group_size(self.group_name))  # on all ranks the same chunks
        return ChunkedLinear(
            self.input, self.linear_weight, self.linear_bias, self.chunk_size, classes, count=Kept.count_of(kept)
        )

    def options(self, rows: "RowLoss | SliceLoss", linear: ChunkedLinear) -> Options:
        columns = Columns(self.vocab_start, self.num_classes) if isinstance(rows, SliceLoss) else None
        return Options(
            self.weight, self.ignore_index, self.label_smoothing, self.softcap, self.z_loss, columns,
            linear.leaves_rows_past_count,
        )  # fmt: skip

    def loss_of(self, rows: "RowLoss | SliceLoss") -> RowLoss:
        return row_loss_over(self.group_name, rows) if isinstance(rows, SliceLoss) else rows

    def token_weights(self) -> Tensor | None:
        """What each token's loss is multiplied by, `[N]`: 0 of one that does not count, whatever it was given."""
        if self.row_weight is None:
            return None
        counts, _ = counted(self.targets(), self.ignore_index)
        return torch.where(counts, self.row_weight.reshape(-1).float(), 0.0)

    def watch(self, rows: "RowLoss | SliceLoss") -> Watch:
        scores = Scores(self.ignore_index, 1.0, self.softcap, 1.0, self.vocab_start, self.num_classes)
        return Watch(LOGPROBS_CPU if rows in (CPU, SLICE_CPU) else LOGPROBS, scores, self.group_name)

    def kept(self, rows: "RowLoss | SliceLoss") -> Kept | None:
        """The tokens that count, where that is asked for and can be made use of."""
        if not self.skip_ignored:
            return None
        counts, _ = counted(self.target, self.ignore_index)
        return Kept.of(counts, (self.input, self.linear_weight), on_host=rows in (CPU, SLICE_CPU))

    def of_kept(self, kept: Kept | None) -> "CrossEntropyCall":
        return self if kept is None else kept.call(self, "input", "target", "row_weight")


def _gradient_of_rows(call: CrossEntropyCall, weights: Tensor | None, mean: bool) -> tuple[Tensor, Tensor]:
    """The gradient of each row's loss or of all, and by what the backward pass divides those of the inputs.

    A mean's divisor is known before its rows are read, so their gradients are divided: mostly nothing is left for the
    backward pass to do. Of float16, whose range does not hold what is divided, it is left.

    Where weights make the divisor 0 the rows that count get gradients that are not finite, as is the loss; without
    weights no row counts then, and all gradients are 0.
    """
    target = call.targets()
    one = torch.ones((), dtype=torch.float32, device=target.device)
    rows = one if weights is None else weights
    if not mean:
        return rows, one
    counts, index = counted(target, call.ignore_index)
    weighted = call.weight is not None or weights is not None
    each = rows.expand(counts.shape)
    if call.weight is not None:
        counts = counts & (index >= 0) & (index < call.num_classes)
        each = rows * call.weight[torch.where(counts, index, 0)].float()
    divisor = torch.where(counts, each, 0.0).sum()
    if call.input.dtype != torch.float16:
        return rows / divisor, one
    return torch.where(divisor == 0, float("inf"), rows) if weighted else rows, divisor


def _of(each: Tensor, chunk: slice) -> Tensor:
    return each[chunk] if each.dim() else each


def _losses_and_gradients(
    rows: RowLoss | SliceLoss, call: CrossEntropyCall, gradients: LinearGradients, of_rows: Tensor, watch: Watch | None
) -> Rows:
    """In one pass over the chunks, given the gradient of every row; their buffer is free again when this returns."""
    row_loss, options, target = call.loss_of(rows), call.options(rows, gradients.linear), call.targets()
    parts: list[Rows] = []
    for chunk, logits in gradients.linear.chunks():
        part = row_loss.losses(logits, target[chunk], options)
        parts.append(part)
        if watch is not None:
            watch.look(logits, target[chunk])
        if any(gradients.need):
            row_loss.gradients(_of(of_rows, chunk), None, logits, target[chunk], part.stats, logits, options)
            gradients.add(chunk, logits)
    return Rows.cat(parts)


def _reduce(
    rows: RowLoss | SliceLoss, call: CrossEntropyCall, reduction: str, need: Need, watch: Watch | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum or mean of the losses, what the gradients after it are still to be divided by, and these.

    "total" is the sum, with the divisor of the mean: what processes with some tokens each add up first.
    """
    kept = call.kept(rows)
    call = call.of_kept(kept)
    weights = call.token_weights()
    gradients = LinearGradients(call.linear(kept), need, call.dtypes[0])
    of_rows, divisor = _gradient_of_rows(call, weights, reduction == "mean")
    loss, counts, _ = _losses_and_gradients(rows, call, gradients, of_rows, watch)
    if weights is not None:
        loss, counts = loss * weights, counts * weights
    row_loss = call.loss_of(rows)
    if reduction == "mean":
        loss, _ = row_loss.mean(loss, counts)
    else:
        loss = row_loss.sum(loss)
    if reduction == "total":
        divisor = row_loss.sum(counts)
    dx = gradients.dx if kept is None or not need[0] else kept.spread(gradients.dx)
    return loss, divisor, dx, gradients.dw.to(call.dtypes[1]), gradients.db


def _reduced(
    rows: RowLoss | SliceLoss, call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _reduce(rows, call, reduction, (need_dx, need_dw, need_db), None)


def _reduced_watched(
    rows: RowLoss | SliceLoss, call: CrossEntropyCall, reduction: str, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, and the means of the entropy and of the hits over the tokens that count."""
    watch = call.watch(rows)
    results = _reduce(rows, call, reduction, (need_dx, need_dw, need_db), watch)
    return results[0], *watch.means(call.target), *results[1:]


def _each_row(rows: RowLoss | SliceLoss, call: CrossEntropyCall, watch: Watch | None) -> tuple[Tensor, Tensor]:
    """Each token's loss `[...]`, and its maximum and sum `[2, ...]`."""
    kept, shape = call.kept(rows), call.target.shape
    call = call.of_kept(kept)
    linear = call.linear(kept)
    row_loss, options, target, parts = call.loss_of(rows), call.options(rows, linear), call.targets(), []
    for chunk, logits in linear.chunks():
        parts.append(row_loss.losses(logits, target[chunk], options))
        if watch is not None:
            watch.look(logits, target[chunk])
    loss, _, stats = Rows.cat(parts)
    weights = call.token_weights()
    loss = loss if weights is None else loss * weights
    if kept is None:
        return loss.view(shape), stats.view(2, *shape)
    return kept.spread(loss), kept.spread(stats.t()).movedim(-1, 0).contiguous()


def _row_by_row(rows: RowLoss | SliceLoss, call: CrossEntropyCall) -> tuple[Tensor, Tensor]:
    return _each_row(rows, call, None)


def _row_by_row_watched(rows: RowLoss | SliceLoss, call: CrossEntropyCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and each token's entropy and hit, `[...]`."""
    watch, kept = call.watch(rows), call.kept(rows)
    results = _each_row(rows, call, watch)
    entropy, hit = (each.view(call.target.shape) if kept is None else kept.spread(each) for each in watch.each())
    return results[0], entropy, hit, results[1]


def _row_by_row_gradients(
    rows: RowLoss | SliceLoss, call: CrossEntropyCall, grad: Tensor, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Chunk by chunk, for an upstream gradient of each row; the logits are made again."""
    kept = call.kept(rows)
    call = call.of_kept(kept)
    if kept is not None:
        grad, stats = kept.rows(grad), kept.rows(stats.movedim(0, -1)).t()
    linear = call.linear(kept)
    row_loss, options, target = call.loss_of(rows), call.options(rows, linear), call.targets()
    gradients = LinearGradients(linear, (need_dx, need_dw, need_db), call.dtypes[0])
    weights = call.token_weights()
    grad = grad.reshape(-1) if weights is None else grad.reshape(-1) * weights
    stats = stats.reshape(2, -1)
    for chunk, logits in gradients.linear.chunks():
        of_chunk = stats[:, chunk].contiguous()
        row_loss.gradients(grad[chunk], None, logits, target[chunk], of_chunk, logits, options)
        gradients.add(chunk, logits)
    dtype = call.input.dtype
    dx = gradients.dx if kept is None or not need_dx else kept.spread(gradients.dx)
    return dx, gradients.dw.to(dtype), gradients.db.to(dtype)


def _fake_reduced(call: CrossEntropyCall, reduction: str, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, divisor = (call.input.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, divisor, *fake_gradients(call, need, call.dtypes)


def _fake_reduced_watched(call: CrossEntropyCall, *rest: Any) -> tuple[Tensor, ...]:
    entropy, hit = (call.input.new_empty((), dtype=torch.float32) for _ in range(2))
    loss, *kept = _fake_reduced(call, *rest)
    return loss, entropy, hit, *kept


def _fake_row_by_row_watched(call: CrossEntropyCall) -> tuple[Tensor, ...]:
    entropy, hit = (call.input.new_empty(call.target.shape, dtype=torch.float32) for _ in range(2))
    loss, stats = _fake_row_by_row(call)
    return loss, entropy, hit, stats


def _fake_row_by_row(call: CrossEntropyCall) -> tuple[Tensor, Tensor]:
    loss, stats = (
        call.input.new_empty(shape, dtype=torch.float32) for shape in (call.target.shape, (2, *call.target.shape))
    )
    return loss, stats


def _fake_row_by_row_gradients(call: CrossEntropyCall, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(call, rest[-3:], [call.dtypes[0], call.input.dtype, call.input.dtype])


class Shardings(NamedTuple):
    """The rules of the three ops of `CrossEntropyOps`."""

    reduced: Rule
    rows: Rule
    rows_gradients: Rule


class CrossEntropyOps:
    """The kernel ops of one public operator, and their derivatives: reduced to one number, and row by row.

    Args:
        name: Of the public operator.
        kernels: The loss of rows on a GPU.
        cpu: The same in plain PyTorch.
        shardings: How the ops may be split.
        watched: Give entropies and hits after the loss, as constants, in the first two.
        scale: What scales the gradients, where other ops of the operator have it already.
    """

    def __init__(
        self, name: str, kernels: Any, cpu: Any, shardings: Shardings, *, watched: bool = False,
        scale: KernelOp | None = None,
    ) -> None:  # fmt: skip
        def op(step: str, run: Callable[..., Any], fake: Callable[..., Any], products: Callable[..., int]) -> CallOp:
            return CallOp(
                f"_{name}_{step}", CrossEntropyCall, run, kernels=kernels, cpu=cpu, fake=fake, products=products
            )

        reduced, rows = (_reduced, _fake_reduced), (_row_by_row, _fake_row_by_row)
        if watched:
            reduced, rows = (_reduced_watched, _fake_reduced_watched), (_row_by_row_watched, _fake_row_by_row_watched)
        self.reduced = op("fwd", *reduced, lambda call, reduction, dx, dw, db: 1 + dx + dw)
        self.rows = op("rows_fwd", *rows, lambda call: 1)
        self.rows_gradients = op(
            "rows_bwd", _row_by_row_gradients, _fake_row_by_row_gradients, lambda call, *rest: 1 + rest[-3] + rest[-2]
        )
        self.scale = scale or scale_op(f"_{name}_scale")
        self.reduced.op.register_sharding(shardings.reduced)
        self.rows.op.register_sharding(shardings.rows)
        self.rows_gradients.op.register_sharding(shardings.rows_gradients)
        constants = 2 if watched else 0
        differentiate_by_scaling(self.reduced, self.scale, lambda reduction: reduction == "total", constants)
        self.rows.op.register_autograd(
            self._made_again, setup_context=_keep_inputs, depends_on=[DIFFERENTIABLE, *[[]] * constants]
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.reduced.op, self.rows.op, self.rows_gradients.op, self.scale

    def _made_again(self, ctx: Any, grad: Tensor, *constants: Tensor) -> Any:
        *tensors, stats = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx, dw, db = self.rows_gradients.op(*tensors, *ctx.options, grad, stats, need_dx, need_dw, need_db)
        return (
            sum_over(ctx.dx_group_name, dx).to(ctx.dtype) if need_dx else None,
            dw if need_dw else None,
            db if need_db else None,
            *[None] * (ctx.arguments - 3),
        )


TENSORS = CrossEntropyCall.names().index("ignore_index")
"""How many of a call's fields are tensors; they come first."""
DX_GROUP_NAME = CrossEntropyCall.names().index("dx_group_name")


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.dtype, ctx.dx_group_name, ctx.arguments = inputs[0].dtype, inputs[DX_GROUP_NAME], len(inputs)
    ctx.options = inputs[TENSORS:]
    ctx.save_for_backward(*inputs[:TENSORS], output[-1])
