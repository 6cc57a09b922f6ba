r"""A linear layer over classes that are spread over the ranks of a group, and the cross entropy of its outputs.

Sources: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, for the slices of the classes; the
chunks of tokens and the gradients made in the forward pass are those of `fused_linear_ce.py`.

Each rank has x [N, H], the targets [N] and a slice W_C of the weight's rows: the classes C. For a chunk of tokens:

    logits = x_chunk @ W_C^T + b_C            [C, V_C], the rank's own
    parts  = slice_statistics(logits)         three numbers a token, five with smoothing
    losses = combine_slices(all ranks' parts) and each row's maximum and sum over all classes
    G      = row_gradients(logits)            over the logits, in place
    dx     = G @ W_C                          what C adds to it
    dW_C  += G^T @ x_chunk                    and db_C += the column sums of G

so that the ranks exchange numbers of tokens, never logits. The math of the slices is in `_row_loss_slices.py`. The
gradient of x is the sum of what the ranks add: it is summed in the backward pass, so that a loss that nobody
differentiates costs no sum, in float32, and rounded once. Rounded to bfloat16 on every rank and summed in bfloat16 its
error would be 1.6 times that of one rank's product over 4 ranks, and 1.9 times over 8 (root mean square, 4096 classes).

All ranks make the same chunks, by the classes that a rank has on average: each chunk is one exchange.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._chunked_linear import ChunkedLinear, scale_op
from llmk.ops.linear_loss._linear_ce import (
    Call,
    check_chunk_size,
    checked_linear,
    fake_gradients,
    linear_flops,
    reduced,
    row_by_row,
    row_by_row_gradients,
    saved_dtype,
)
from llmk.ops.linear_loss._row_loss_slices import (
    SLICE_CPU,
    SLICE_KERNELS,
    SliceLoss,
    group_size,
    row_loss_over,
    sum_over,
)
from llmk.ops.linear_loss.fused_linear_ce import (
    fused_linear_ce_cost,
    fused_linear_ce_reference,
    fused_linear_ce_resized,
)
from llmk.ops.loss.cross_entropy import check_loss_options
from llmk.ops.loss.row_loss_math import Columns, Options
from llmk.registry import KernelOp, Sample, cdiv, public_op, whole_only


def vocab_parallel_linear_ce_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, vocab_start: int = 0, num_classes: int = 0,
    group_name: str = "", **options: Any,
) -> Tensor:  # fmt: skip
    """Of one rank that has all classes."""
    if group_name:
        raise ValueError(f"group_name: expected '', one rank with all classes, got {group_name!r}")
    return fused_linear_ce_reference(input, linear_weight, target, **options)


def _call_of(
    slices: SliceLoss, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
    weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
    chunk_size: int, vocab_start: int, num_classes: int, group_name: str, dx_group_name: str,
) -> Call:  # fmt: skip
    classes = cdiv(num_classes, group_size(group_name))
    linear = ChunkedLinear(input, linear_weight, linear_bias, chunk_size, classes)
    options = Options(weight, ignore_index, label_smoothing, softcap, z_loss, Columns(vocab_start, num_classes))
    dx_dtype = _dx_dtype(input, dx_group_name)
    return Call(linear, target.reshape(-1).contiguous(), options, row_loss_over(group_name, slices), dx_dtype)


def _dx_dtype(input: Tensor, dx_group_name: str) -> torch.dtype:
    return torch.float32 if dx_group_name else input.dtype


def _vocab_parallel_linear_ce_fwd(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, chunk_size: int,
    vocab_start: int, num_classes: int, group_name: str, dx_group_name: str,
    mean: bool, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call_of(
        SLICE_KERNELS, input, linear_weight, linear_bias, target, weight,
        ignore_index, label_smoothing, softcap, z_loss, chunk_size, vocab_start, num_classes, group_name, dx_group_name,
    )  # fmt: skip
    loss, divisor, (dx, dw, db) = reduced(call, "mean" if mean else "sum", (need_dx, need_dw, need_db))
    return loss, divisor, dx, dw, db


def _vocab_parallel_linear_ce_rows_fwd(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, chunk_size: int,
    vocab_start: int, num_classes: int, group_name: str, dx_group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _call_of(
        SLICE_KERNELS, input, linear_weight, linear_bias, target, weight,
        ignore_index, label_smoothing, softcap, z_loss, chunk_size, vocab_start, num_classes, group_name, dx_group_name,
    )  # fmt: skip
    return row_by_row(call)


def _vocab_parallel_linear_ce_rows_bwd(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, chunk_size: int,
    vocab_start: int, num_classes: int, group_name: str, dx_group_name: str,
    grad: Tensor, stats: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call_of(
        SLICE_KERNELS, input, linear_weight, linear_bias, target, weight,
        ignore_index, label_smoothing, softcap, z_loss, chunk_size, vocab_start, num_classes, group_name, dx_group_name,
    )  # fmt: skip
    return row_by_row_gradients(call, grad, stats, (need_dx, need_dw, need_db))


vocab_parallel_linear_ce_fwd = KernelOp(_vocab_parallel_linear_ce_fwd, opaque=True)
scale = scale_op("_vocab_parallel_linear_ce_scale")
vocab_parallel_linear_ce_rows_fwd = KernelOp(_vocab_parallel_linear_ce_rows_fwd, opaque=True)
vocab_parallel_linear_ce_rows_bwd = KernelOp(_vocab_parallel_linear_ce_rows_bwd, opaque=True)


@vocab_parallel_linear_ce_fwd.register_kernel("cpu")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *call, mean, need_dx, need_dw, need_db = args
    loss, divisor, (dx, dw, db) = reduced(
        _call_of(SLICE_CPU, *call), "mean" if mean else "sum", (need_dx, need_dw, need_db)
    )
    return loss, divisor, dx, dw, db


@vocab_parallel_linear_ce_rows_fwd.register_kernel("cpu")
def _(*call: Any) -> tuple[Tensor, Tensor]:
    return row_by_row(_call_of(SLICE_CPU, *call))


@vocab_parallel_linear_ce_rows_bwd.register_kernel("cpu")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call, grad, stats, need_dx, need_dw, need_db = args
    return row_by_row_gradients(_call_of(SLICE_CPU, *call), grad, stats, (need_dx, need_dw, need_db))


@vocab_parallel_linear_ce_fwd.register_fake
def _(input: Tensor, linear_weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, divisor = (input.new_empty((), dtype=torch.float32) for _ in range(2))
    dtypes = [_dx_dtype(input, args[-5]), saved_dtype(input.dtype), torch.float32]
    return loss, divisor, *fake_gradients(input, linear_weight, args[-3:], dtypes)


@vocab_parallel_linear_ce_rows_fwd.register_fake
def _(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, *args: Any):
    return tuple(input.new_empty(shape, dtype=torch.float32) for shape in (target.shape, (2, *target.shape)))


@vocab_parallel_linear_ce_rows_bwd.register_fake
def _(input: Tensor, linear_weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(input, linear_weight, args[-3:], [_dx_dtype(input, args[-6]), input.dtype, input.dtype])


# They are called on each rank's own tensors.
vocab_parallel_linear_ce_fwd.register_sharding(whole_only)
vocab_parallel_linear_ce_rows_fwd.register_sharding(whole_only)
vocab_parallel_linear_ce_rows_bwd.register_sharding(whole_only)


@vocab_parallel_linear_ce_fwd.register_flop_formula
@vocab_parallel_linear_ce_rows_bwd.register_flop_formula
def _(input: Tensor, linear_weight: Tensor, *args: Any, out_val: Any = None) -> int:
    need_dx, need_dw, _ = args[-3:]
    return linear_flops(1 + need_dx + need_dw, input.shape, linear_weight.shape)


@vocab_parallel_linear_ce_rows_fwd.register_flop_formula
def _(input: Tensor, linear_weight: Tensor, *args: Any, out_val: Any = None) -> int:
    return linear_flops(1, input.shape, linear_weight.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.dtype, ctx.dx_group_name = inputs[0].dtype, inputs[13]
    _, *saved = output
    ctx.save_for_backward(*saved)


def _backward(ctx, grad):
    divisor, dx, dw, db = ctx.saved_tensors
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    return (
        _summed(scale(dx, grad, divisor, dx.dtype), ctx) if need_dx else None,
        scale(dw, grad, divisor, ctx.dtype) if need_dw else None,
        scale(db, grad, divisor, ctx.dtype) if need_db else None,
        *[None] * 15,
    )


def _summed(dx: Tensor, ctx) -> Tensor:
    return sum_over(ctx.dx_group_name, dx).to(ctx.dtype)


def _keeps(needs_input_grad, args):
    return needs_input_grad[:3]


vocab_parallel_linear_ce_fwd.register_autograd(_backward, setup_context=_setup_context, keeps=_keeps)


def _rows_setup_context(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.dtype, ctx.dx_group_name = inputs[0].dtype, inputs[13]
    _, stats = output
    ctx.save_for_backward(*tensors, stats)


def _rows_backward(ctx, grad):
    *tensors, stats = ctx.saved_tensors
    need = ctx.needs_input_grad[:3]
    dx, dw, db = vocab_parallel_linear_ce_rows_bwd(*tensors, *ctx.options, grad, stats, *need)
    need_dx, need_dw, need_db = need
    return _summed(dx, ctx) if need_dx else None, dw if need_dw else None, db if need_db else None, *[None] * 11


vocab_parallel_linear_ce_rows_fwd.register_autograd(_rows_backward, setup_context=_rows_setup_context)


def loss_of_slices(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, *,
    ignore_index: int, reduction: str, label_smoothing: float, softcap: float, z_loss: float, chunk_size: int,
    vocab_start: int, num_classes: int, group_name: str, dx_group_name: str,
) -> Tensor:  # fmt: skip
    """The public op; with `dx_group_name` empty each rank's gradient of input is what its own classes add to it."""
    input, linear_weight, linear_bias = checked_linear(input, linear_weight, linear_bias, fewest_classes=0)
    if not 0 <= vocab_start <= vocab_start + linear_weight.shape[0] <= num_classes or num_classes == 0:
        raise ValueError(
            f"num_classes: expected at least vocab_start {vocab_start} and the {linear_weight.shape[0]} classes of "
            f"linear_weight, and one class, got {num_classes}"
        )
    check_loss_options(num_classes, input, target, weight, reduction, label_smoothing, softcap, z_loss)
    check_chunk_size(chunk_size)
    call = (
        input, linear_weight, linear_bias, target, weight, ignore_index, label_smoothing, softcap, z_loss, chunk_size,
        vocab_start, num_classes, group_name, dx_group_name,
    )  # fmt: skip
    if reduction == "none":
        losses, _ = vocab_parallel_linear_ce_rows_fwd(*call)
        return losses
    loss, *_ = vocab_parallel_linear_ce_fwd(*call, reduction == "mean")
    return loss


def vocab_parallel_linear_ce_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def classes(V: int, *shape: int) -> Tensor:
        target = torch.randint(0, V, shape, device=device)
        return target.masked_fill(
            torch.arange(target.numel(), device=device, dtype=torch.int64).view(shape) % 4 == 3, -100
        )

    everything = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2}
    yield Sample((randn(8, 16), randn(32, 16), classes(32, 8)), why="powers of two")
    yield Sample((randn(2, 5, 12), randn(37, 12), classes(37, 2, 5)), {"chunk_size": 4}, why="three chunks, odd sizes")
    for reduction in ("none", "sum", "mean"):
        weight = torch.rand(37, device=device, dtype=dtype) + 0.5
        kwargs = {"weight": weight, "linear_bias": randn(37), "reduction": reduction, "chunk_size": 5, **everything}
        yield Sample((randn(11, 12), randn(37, 12), classes(37, 11)), kwargs, why=f"every option, {reduction}")
        target = classes(37, 2, 5)
        yield Sample((randn(2, 5, 12), randn(37, 12), target), {"reduction": reduction}, why=f"no option, {reduction}")
    smoothed = {"label_smoothing": 0.2}
    yield Sample((randn(7, 12), randn(37, 12), classes(37, 7)), smoothed, why="label smoothing without weights")
    yield Sample((randn(0, 16), randn(32, 16), classes(32, 0)), {"reduction": "sum"}, why="no tokens")
    yield Sample((randn(5, 1), randn(1, 1), torch.zeros(5, device=device, dtype=torch.int64)), why="one feature, class")
    yield Sample((randn(12, 9).t(), randn(12, 37).t(), classes(37, 18)[::2]), why="everything strided")
    yield Sample(
        (randn(4, 8), randn(32, 8), torch.full((4,), -100, device=device, dtype=torch.int64)),
        why="every target ignored: NaN",
    )
    yield Sample((randn(2, 4), randn(100_003, 4), classes(100_003, 2)), why="100,003 classes")
    yield Sample((1e4 * randn(5, 8), 0.1 * randn(37, 8), classes(37, 5)), why="large values")


def vocab_parallel_linear_ce_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for ranks in (2, 8):
        N, H, V = 8192, 4096, 128256 // ranks
        x = torch.randn(N, H, device=device, dtype=dtype)
        linear_weight = torch.randn(V, H, device=device, dtype=dtype) / H**0.5
        target = torch.randint(0, V, (N,), device=device)
        yield Sample((x, linear_weight, target), why=f"{N}x{H}x{V}, what one of {ranks} ranks computes")


@public_op(
    "vocab_parallel_linear_ce(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
    'Tensor? weight=None, int ignore_index=-100, str reduction="mean", float label_smoothing=0.0, '
    "float softcap=0.0, float z_loss=0.0, int chunk_size=0, int vocab_start=0, int num_classes=0, "
    'str group_name="") -> Tensor',
    reference=vocab_parallel_linear_ce_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(
        vocab_parallel_linear_ce_fwd,
        vocab_parallel_linear_ce_rows_fwd,
        vocab_parallel_linear_ce_rows_bwd,
        scale,
    ),
    samples=vocab_parallel_linear_ce_samples,
    resized=fused_linear_ce_resized,
    workloads=vocab_parallel_linear_ce_workloads,
    cost=fused_linear_ce_cost,
)
def vocab_parallel_linear_ce(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int = 0,
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
) -> Tensor:
    """`fused_linear_ce` where each rank of a process group holds the weights of some of the classes.

    Loss and gradients are those of all classes. In the forward pass the ranks gather three float32 numbers for each
    token (five with `label_smoothing`), however many classes there are, once a chunk of tokens; in the backward pass
    they sum the gradient of `input`, in float32. Every rank makes the call, with slices of its own and the rest alike,
    and all of them or none want the gradient of `input`. `fused_linear_ce` does this by itself where its
    `linear_weight` is a DTensor placed `Shard(0)`.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides; the same on all ranks.
        linear_weight: `[V, H]`, dtype of `input`: this rank's classes, V of them, `vocab_start` and those that follow.
            The slices cover every class once, in any order and of any lengths; a rank may have none.
        target: Class indices `[...]` among all classes, int64 or int32; the same on all ranks.
        linear_bias: `[V]`, dtype of `input`, of this rank's classes.
        weight: `[num_classes]`, a weight for each of all classes, the same on all ranks; None for 1.
        ignore_index: Rows with this target have loss 0 and gradient 0, and do not count in the mean, whatever their
            logits are. NaN or infinity in `input` itself reaches the gradient of `linear_weight` from any row, as it
            does through PyTorch's product.
        reduction: "none", "sum", or "mean": the sum over the rows divided by the sum of their targets' weights.
        label_smoothing: The share of the target, 0 to 1, that is spread evenly over all classes.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        z_loss: `z_loss * logsumexp(logits)**2` is added to the loss of every row that counts; 0 is off. It has no class
            weight, but the mean divides the whole sum by the weights, where Liger divides z_loss by the number of rows.
        chunk_size: Tokens whose logits exist at a time. 0 chooses as `fused_linear_ce` does, for `num_classes` divided
            by the number of ranks.
        vocab_start: The class of the first row of `linear_weight`.
        num_classes: How many classes all ranks have together; 0 without a group: those of `linear_weight`.
        group_name: The `group_name` of a `torch.distributed.ProcessGroup`; "" is one rank, which has all classes.

    Returns:
        float32, the same bits on all ranks: a scalar, or `[...]` with reduction "none". The mean over no row is NaN.
        Where the weights of all rows that count are 0, neither the mean nor its gradients are finite.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU such a row makes the loss NaN.
        NotImplementedError: `weight` requires a gradient.

    Sources: Megatron-LM, https://arxiv.org/abs/1909.08053; `torch.nn.functional.linear_cross_entropy`.
    """
    if not group_name:
        own = linear_weight.shape[0]
        if vocab_start != 0 or num_classes not in (0, own):
            raise ValueError(
                f"group_name: expected one for the classes that are not among the {own} of linear_weight, with "
                f"vocab_start {vocab_start} and num_classes {num_classes}, got ''"
            )
        num_classes = own
    return loss_of_slices(
        input, linear_weight, linear_bias, target, weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, chunk_size=chunk_size,
        vocab_start=vocab_start, num_classes=num_classes, group_name=group_name, dx_group_name=group_name,
    )  # fmt: skip
