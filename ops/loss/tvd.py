r"""The total variation distance of probabilities.

Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", 2023,
https://arxiv.org/abs/2307.15190, for its use in distillation.

Of each token, with q the student's probabilities and p the teacher's,

    loss = sum_c(|q_c - p_c|) / 2        dq_c = g * sign(q_c - p_c) / 2

The terms of one class are in `divergence_math.py`, the kernels in `_divergence_kernels.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmk.ops.loss._divergence_kernels import DivergenceOps, divergence_resized, divergence_workloads
from llmk.ops.loss.divergence_math import TOTAL_VARIATION
from llmk.registry import Cost, Sample, check_option, is_sharded, public_op

KERNEL_OPS = DivergenceOps("tvd")


def tvd_reference(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    losses = 0.5 * (input.to(wide) - target.to(wide)).abs().sum(-1)
    counts = torch.ones_like(losses, dtype=torch.bool) if labels is None else labels != ignore_index
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def tvd_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def probabilities(*shape: int) -> Tensor:
        return (2 * torch.randn(shape, device=device, dtype=torch.float32)).softmax(-1).to(dtype)

    labels = torch.tensor([3, -100, 0, 5, -100], device=device, dtype=torch.int64)
    for reduction in ("none", "sum", "mean"):
        yield Sample((probabilities(8, 32), probabilities(8, 32)), {"reduction": reduction}, why=reduction)
        kwargs = {"reduction": reduction, "labels": labels}
        yield Sample((probabilities(5, 37), probabilities(5, 37)), kwargs, why=f"{reduction}, ignored tokens")
    yield Sample((probabilities(2, 3, 19), probabilities(2, 3, 19)), why="three dimensions")
    yield Sample((probabilities(17), probabilities(17)), why="one token, one dimension")
    yield Sample((probabilities(3, 1), probabilities(3, 1)), why="one class")
    yield Sample((probabilities(0, 16), probabilities(0, 16)), {"reduction": "sum"}, why="no tokens")
    yield Sample((probabilities(21, 6).t(), probabilities(6, 42)[:, ::2]), why="strided")
    ignored = {"labels": torch.full_like(labels, -100)}
    yield Sample((probabilities(5, 16), probabilities(5, 16)), ignored, why="every token ignored: NaN")
    kwargs = {"labels": labels.int(), "ignore_index": 3}
    yield Sample((probabilities(5, 16), probabilities(5, 16)), kwargs, why="int32 labels")
    same = probabilities(4, 40)
    yield Sample((same, same.clone()), why="student and teacher the same: the gradient is 0")
    yield Sample((probabilities(2, 9_000), probabilities(2, 9_000)), why="9,000 classes: whole blocks and a part")
    yield Sample((probabilities(2, 100_003), probabilities(2, 100_003)), why="100,003 classes")


@public_op(
    reference=tvd_reference,
    differentiable=("input",),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=tvd_samples,
    resized=divergence_resized(torch.softmax),
    workloads=divergence_workloads(torch.softmax),
    cost=Cost.passes(2, 5),
)
def tvd(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """Total variation distance of a student's probabilities and a teacher's: half the sum of their differences.

    Args:
        input: The student's probabilities `[..., V]`, float32, float16 or bfloat16, any strides.
        target: The teacher's, the shape and dtype of `input`. It gets no gradient.
        labels: `[...]`, int64 or int32: which tokens count, those whose label is not `ignore_index`. None for all.
        reduction: "none", one number a token; "sum"; or "mean" over the tokens that count.
        ignore_index: See `labels`.

    Returns:
        float32: a scalar, or `[...]` with reduction "none", 0 for tokens that do not count. The mean over none is NaN.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or `reduction` does not fit.
        NotImplementedError: `target` requires a gradient.

    Sources: Wen et al., 2023, https://arxiv.org/abs/2307.15190; Liger Kernel's `LigerTVDLoss`,
    https://github.com/linkedin/Liger-Kernel, whose "mean" divides by the number of elements.
    """
    check_option("reduction", reduction, ("none", "mean", "sum"))
    return KERNEL_OPS(input, target, labels, TOTAL_VARIATION.value, ignore_index, reduction, is_sharded(input, target))
