"""Distillation from hidden states together with the cross entropy of the student: one pass over its logits.

It is `fused_linear_distill` with one teacher, whose file has the sources and the math, for a vocabulary that may be
sharded: the cross entropy takes one pass more over the student's logits, and both have one dx, one dW and one db
between them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, resized, workloads
from llmk.ops.linear_loss.drivers.distillation import DistillationOps
from llmk.ops.linear_loss.fused_linear_jsd import (
    fused_linear_jsd_cost,
    one_teacher_reference,
    student_and_teacher,
    teacher_workload,
)
from llmk.registry import Sample, check_positive, public_op


def fused_linear_jsd_ce_reference(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, labels: Tensor, *,
    ce_weight: float = 1.0, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = {"labels": labels, "ce_weight": ce_weight, **options}
    return one_teacher_reference(input, linear_weight, teacher_input, teacher_linear_weight, **given)


KERNEL_OPS = DistillationOps("fused_linear_jsd_ce")


def fused_linear_jsd_ce_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn

    def given(V: int, *tokens: int, H: int = 12) -> tuple[Tensor, ...]:
        labels = make.classes(V, *tokens)
        return *student_and_teacher(make, V, *tokens, H=H), labels

    yield Sample(given(32, 8), why="powers of two")
    kwargs = {
        "linear_bias": randn(37),
        "teacher_linear_bias": randn(37),
        "temperature": 2.0,
        "softcap": 4.0,
        "teacher_softcap": 3.0,
        "ce_weight": 0.4,
        "row_weight": make.rand(2, 5),
    }
    for beta in (0.0, 0.3, 1.0):
        yield Sample(given(37, 2, 5), kwargs | {"beta": beta, "chunk_size": 8}, why=f"beta {beta}, every option")
    yield Sample(given(37, 2, 5, H=16), kwargs | {"skip_ignored": True}, why="ignored tokens skipped")
    yield Sample(given(37, 2, 5), kwargs | {"logits_dtype": dtype}, why="logits of the input's dtype")
    yield Sample(given(37, 0), why="no tokens: NaN")
    x, weight, teacher_x, teacher_weight, labels = given(37, 5)
    strided = randn(12, 5).t(), randn(12, 37).t(), teacher_x, teacher_weight, labels.int()
    yield Sample(strided, why="strided, int32")
    yield Sample((x, weight, teacher_x, teacher_weight, torch.full_like(labels, -100)), why="no token counts: NaN")


def fused_linear_jsd_ce_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    made, (N, _, V, _) = teacher_workload(sizes, device, dtype), sizes
    return Sample((*made.args, torch.randint(0, V, (N,), device=device)), why=made.why)


@public_op(
    reference=fused_linear_jsd_ce_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=fused_linear_jsd_ce_samples,
    resized=resized(fused_linear_jsd_ce_workload, 16, 40, 24),
    workloads=workloads(fused_linear_jsd_ce_workload, (4096, 2048, 128256, 4096)),
    cost=fused_linear_jsd_cost,
)
def fused_linear_jsd_ce(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_linear_weight: Tensor,
    labels: Tensor,
    *,
    ce_weight: float = 1.0,
    linear_bias: Tensor | None = None,
    teacher_linear_bias: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float = 0.0,
    teacher_softcap: float = 0.0,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    skip_ignored: bool = False,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_linear_jsd` and `ce_weight` times the cross entropy of the student's logits, which are made once for both.

    The cross entropy is at temperature 1, the mean over the tokens that count, whatever their weights.

    Args:
        input, linear_weight, teacher_input, teacher_linear_weight: As in `fused_linear_jsd`.
        labels: Class indices `[...]`, int64 or int32, `ignore_index` where a token does not count.
        ce_weight: Weight of the cross entropy; positive.
        linear_bias, teacher_linear_bias, beta, temperature, softcap, teacher_softcap: As in `fused_linear_jsd`.
        row_weight: As in `fused_linear_jsd`, for the divergence alone.
        ignore_index, skip_ignored, chunk_size, logits_dtype: As in `fused_linear_jsd`.
        vocab_start, num_classes, group_name: As in `fused_linear_jsd`; the ranks gather four float32 numbers of each
            token more.

    Returns:
        The sum of both, a float32 scalar; and detached the divergence and the cross entropy. Over no token: NaN.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, such as two weights of different numbers of classes.
        IndexError: On the CPU, a label is neither a class nor `ignore_index`. On a GPU it makes the loss NaN.
        NotImplementedError: A tensor of the teacher, or `row_weight`, requires a gradient.

    Sources: Hinton et al., 2015, https://arxiv.org/abs/1503.02531; Agarwal et al., 2023,
    https://arxiv.org/abs/2306.13649; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    check_positive("ce_weight", ce_weight)
    loss, divergence, nll = KERNEL_OPS(locals())
    return loss, divergence, nll
