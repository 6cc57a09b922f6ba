r"""Cross entropy of logits over a vocabulary.

Sources: `torch.nn.functional.cross_entropy` for the semantics; Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018, https://arxiv.org/abs/1805.02867; softcap as in Gemma 2, https://arxiv.org/abs/2408.00118; z-loss as
in PaLM, https://arxiv.org/abs/2204.02311.

Forward, for a row of V logits, its target t, class weights w (all 1 if not given) and smoothing a, with
x = softcap(logits) where softcap(u) = c * tanh(u / c), or u when c = 0:

    m    = max(x)
    lse  = m + log(sum(exp(x - m)))
    loss = (1 - a) * w_t * (lse - x_t) + a / V * sum_c(w_c * (lse - x_c)) + z_loss * lse^2

A row whose target is `ignore_index` has loss 0. "mean" divides the sum by the sum of w_t over the rows that count.

Backward, given the gradient g of a row's loss, with p = exp(x - lse) and W = sum_c(w_c):

    dx_c      = g * ((1 - a) * w_t * (p_c - [c = t]) + a / V * (W * p_c - w_c) + 2 * z_loss * lse * p_c)
    dlogits_c = dx_c * (1 - tanh(logits_c / c)^2)         the last factor only with a softcap

Forward reads the logits once, keeping a running maximum and sum; both are kept for the backward pass rather than lse,
which in float32 loses the digits of large logits. Backward reads the logits once more, recomputes p as
exp(x - m) / sum and writes the gradient. One more program reduces the losses of rows to one number. The gradient of a
mean is divided by its denominator where it is used.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.math import cap_reference, logsumexp_reference
from llmk.ops.loss._cross_entropy_cpu import CPU, z_loss_cpu
from llmk.ops.loss.cross_entropy_kernels import KERNELS, LONGEST_SHORT
from llmk.ops.loss.cross_entropy_options import CrossEntropyOptions, RowLoss, check_loss_options
from llmk.ops.loss.patterns import CROSS_ENTROPY
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_rows,
    check_switch,
    empty,
    is_sharded,
    public_op,
    replicate_only,
    row_axes,
)


def cross_entropy_reference(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    V = input.shape[-1]
    logits = input.to(torch.promote_types(input.dtype, torch.float32)).reshape(-1, V)
    flat = target.reshape(-1).long()
    logits = cap_reference(logits, softcap)
    weight = weight if weight is None else weight.to(logits.dtype)
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = torch.nn.functional.cross_entropy(logits, flat, reduction="none", **options)
    counts = flat != ignore_index
    losses = losses + torch.where(counts, z_loss_cpu(logsumexp_reference(logits), z_loss), 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (counts.sum() if weight is None else torch.where(counts, weight[flat * counts], 0.0).sum())


def _forward(
    rows: RowLoss, input: Tensor, target: Tensor, options: CrossEntropyOptions, reduction: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, `[...]` or `[]`, the denominator of a mean, `[]` or else nothing `[0]`, and each row's maximum and sum.

    "total" is the sum, with the denominator of the mean: what processes with some rows each add up first.
    """
    loss, count, stats = rows.losses(input, target, options)
    if reduction == "mean":
        return *rows.mean(loss, count), stats
    if reduction == "total":
        return rows.sum(loss), rows.sum(count), stats
    nothing = empty((0,), torch.float32, input.device)
    return loss if reduction == "none" else rows.sum(loss), nothing, stats


def _cross_entropy_fwd(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(
        KERNELS, input, target, CrossEntropyOptions(weight, ignore_index, label_smoothing, softcap, z_loss), reduction
    )


def _cross_entropy_bwd(
    grad: Tensor,
    denominator: Tensor | None,
    input: Tensor,
    target: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
) -> Tensor:
    options = CrossEntropyOptions(weight, ignore_index, label_smoothing, softcap, z_loss)
    return KERNELS.gradients(grad, denominator, input, target, stats, options)


cross_entropy_fwd = KernelOp(_cross_entropy_fwd, launch_cached=True)
cross_entropy_bwd = KernelOp(_cross_entropy_bwd, launch_cached=True)


@cross_entropy_fwd.register_kernel("cpu")
def _(input: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *options, reduction = rest
    return _forward(CPU, input, target, CrossEntropyOptions(*options), reduction)


@cross_entropy_bwd.register_kernel("cpu")
def _(grad: Tensor, denominator: Tensor | None, input: Tensor, target: Tensor, stats: Tensor, *options: Any) -> Tensor:
    return CPU.gradients(grad, denominator, input, target, stats, CrossEntropyOptions(*options))


@cross_entropy_fwd.register_fake
def _(input, target, reduction):
    loss = input.new_empty(target.shape if reduction == "none" else (), dtype=torch.float32)
    denominator = input.new_empty(() if reduction in ("mean", "total") else (0,), dtype=torch.float32)
    return loss, denominator, input.new_empty((2, *target.shape), dtype=torch.float32)


cross_entropy_fwd.register_backward(
    cross_entropy_bwd,
    outputs=("loss", "denominator", "stats"),
    depends_on=[["input"]],
    saved_if={"denominator": lambda reduction: reduction == "mean"},
)


@cross_entropy_fwd.register_sharding
def _(input, reduction):
    if reduction == "mean":
        return replicate_only()
    return [
        ([axis, REPLICATE, 1 + axis] if reduction == "none" else [PARTIAL, PARTIAL, 1 + axis], [axis, axis, REPLICATE])
        for axis in row_axes(input)
    ]


@cross_entropy_bwd.register_sharding
def _(grad, input):
    return [
        ([axis], [axis if grad.ndim else REPLICATE, REPLICATE, axis, axis, 1 + axis, REPLICATE])
        for axis in row_axes(input)
    ]


def cross_entropy_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def logits(*shape: int) -> Tensor:
        return 3 * torch.randn(shape, device=device, dtype=dtype)

    def classes(V: int, *shape: int) -> Tensor:
        return torch.randint(0, V, shape, device=device)

    def ignoring(target: Tensor, ignore_index: int = -100) -> Tensor:
        return target.masked_fill(
            torch.arange(target.numel(), device=device, dtype=torch.int64).view(target.shape) % 3 == 1, ignore_index
        )

    everything = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2}
    yield Sample((logits(8, 32), classes(32, 8)), why="powers of two")
    yield Sample((logits(2, 5, 37), ignoring(classes(37, 2, 5))), why="ignored targets")
    for reduction in ("none", "sum", "mean"):
        weight = torch.rand(37, device=device, dtype=dtype) + 0.5
        kwargs = {"weight": weight, "reduction": reduction, "ignore_index": 5, **everything}
        yield Sample((logits(11, 37), ignoring(classes(37, 11), 5)), kwargs, why=f"every option, {reduction}")
        yield Sample((logits(9, 21), ignoring(classes(21, 9))), {"reduction": reduction}, why=f"no option, {reduction}")
    for V in (LONGEST_SHORT - 1, LONGEST_SHORT, LONGEST_SHORT + 1, LONGEST_SHORT + 16):
        yield Sample((logits(19, V), ignoring(classes(V, 19))), why=f"no option, {V} classes")
        weight = torch.rand(V, device=device, dtype=dtype) + 0.5
        kwargs = {"weight": weight, "ignore_index": 5, **everything}
        yield Sample((logits(5, V), ignoring(classes(V, 5), 5)), kwargs, why=f"every option, {V} classes")
    yield Sample((logits(7, 19), classes(19, 7)), {"label_smoothing": 0.2}, why="label smoothing")
    yield Sample((logits(7, 19), classes(19, 7)), {"softcap": 30.0}, why="softcap")
    yield Sample((logits(7, 19), classes(19, 7)), {"z_loss": 1e-3}, why="z-loss")
    yield Sample(
        (logits(5, 16), torch.full((5,), -100, device=device, dtype=torch.int64)), why="every target ignored: NaN"
    )
    yield Sample((logits(0, 16), classes(16, 0)), {"reduction": "sum"}, why="no rows")
    yield Sample((logits(3, 1), classes(1, 3)), why="one class")
    yield Sample((logits(20), classes(20)), why="one dimension")
    yield Sample((logits(24, 6).t(), classes(24, 6)), why="classes strided")
    yield Sample((logits(6, 80)[:, 16:48], classes(32, 12)[::2]), why="slices of logits and targets")
    yield Sample((logits(6, 32), classes(32, 6).int()), why="int32 targets")
    yield Sample((1e4 * logits(4, 50), classes(50, 4)), {"label_smoothing": 0.1}, why="large values")
    masked = logits(4, 40).masked_fill(torch.arange(40, device=device, dtype=torch.int64) < 20, float("-inf"))
    yield Sample((masked, torch.randint(20, 40, (4,), device=device)), why="half the classes at -inf")
    lowest = torch.full((3, 19), torch.finfo(dtype).min, device=device, dtype=dtype)
    yield Sample((lowest, classes(19, 3)), why="every class at the lowest number, as masks put it")
    yield Sample((logits(3, 12_304), ignoring(classes(12_304, 3))), why="12,304 classes: whole blocks and a part")
    yield Sample((logits(2, 100_003), classes(100_003, 2)), {"label_smoothing": 0.1}, why="100,003 classes")


def cross_entropy_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    target = torch.randint(0, 48, (rows,), device=device)
    return Sample((torch.randn(rows, 48, device=device, dtype=dtype), target), why="resized")


def cross_entropy_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, classes in [(8192, 32000), (8192, 128256), (4096, 256000), (8192, 50257)]:
        logits = torch.randn(rows, classes, device=device, dtype=dtype)
        yield Sample((logits, torch.randint(0, classes, (rows,), device=device)), why=f"{rows}x{classes}")


@public_op(
    reference=cross_entropy_reference,
    differentiable=("input",),
    kernel_ops=(cross_entropy_fwd, cross_entropy_bwd),
    samples=cross_entropy_samples,
    resized=cross_entropy_resized,
    workloads=cross_entropy_workloads,
    cost=Cost.passes(1, 3),
    patterns=CROSS_ENTROPY,
)
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of logits over their last axis, as `torch.nn.functional.cross_entropy` with class indices.

    Args:
        input: Logits `[..., V]`, float32, float16 or bfloat16, any strides.
        target: Class indices `[...]`, int64 or int32.
        weight: `[V]`, a weight for each class; None for 1.
        ignore_index: Rows with this target have loss 0 and gradient 0, and do not count in the mean, whatever their
            logits are.
        reduction: "none", "sum", or "mean": the sum over the rows divided by the sum of their targets' weights.
        label_smoothing: The share of the target, 0 to 1, that is spread evenly over all classes.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        z_loss: `z_loss * logsumexp(logits)**2` is added to the loss of every row that counts; 0 is off. It has no class
            weight, but the mean divides the whole sum by the weights, where Liger divides z_loss by the number of rows.

    Returns:
        float32: a scalar, or `[...]` with reduction "none". The mean over no row is NaN.
        Where the weights of all rows that count are 0, neither the mean nor its gradients are finite.

    Raises:
        TypeError: `input` is not a float32, float16 or bfloat16 tensor, or `target` not an integer one.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU such a row's loss and gradient
            are NaN, since looking would make the host wait.
        NotImplementedError: `weight` requires a gradient.

    Sources: `torch.nn.functional.cross_entropy`; softcap: Gemma 2, https://arxiv.org/abs/2408.00118; z-loss: PaLM,
    https://arxiv.org/abs/2204.02311.
    """
    check_rows("input", input, "V")
    check_loss_options(input.shape[-1], input, target, weight, reduction, label_smoothing, z_loss)
    check_switch("softcap", softcap)
    options = (weight, ignore_index, label_smoothing, softcap, z_loss)
    if reduction == "mean" and is_sharded(input, target):
        total, denominator, _ = cross_entropy_fwd(input, target, *options, "total")
        return total / denominator.detach()
    loss, _, _ = cross_entropy_fwd(input, target, *options, reduction)
    return loss
