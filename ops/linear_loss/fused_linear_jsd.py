r"""Distillation from hidden states: the divergence of a student's and a teacher's next-token distributions.

Sources: Agarwal et al., "On-Policy Distillation of Language Models", 2023, https://arxiv.org/abs/2306.13649, for the
divergence; Hsu et al., "Liger Kernel", 2024, https://arxiv.org/abs/2410.10989, for making the gradients in the forward
pass, chunk by chunk.

Forward, for student x [N, H], W [V, H] and teacher x' [N, H'], W' [V, H'], a chunk of tokens at a time:

    logits  = x_chunk @ W^T + b            [C, V], and the teacher's beside them: the only buffers of that width
    losses  = divergence of each row       three passes over both, see `kernels/_divergence.py`
    G       = the student's logits' gradient, rounded to the dtype of x for the products
    dx      = G @ W                        rows of the chunk
    dW     += G^T @ x_chunk                and db += the column sums of G

The teacher gets no gradient. A mean needs no more of the upstream gradient than one factor, so the backward pass only
multiplies by it, as in `fused_linear_ce.py`.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, one_rank, resized
from llmk.ops.linear_loss.drivers.distillation import DistillationOps
from llmk.ops.linear_loss.fused_linear_distill import fused_linear_distill_cost, fused_linear_distill_reference
from llmk.registry import Cost, Sample, public_op


def fused_linear_jsd_reference(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, **options: Any
) -> Tensor:
    return one_teacher_reference(input, linear_weight, teacher_input, teacher_linear_weight, **options)[0]


@one_rank
def one_teacher_reference(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, *,
    teacher_linear_bias: Tensor | None = None, teacher_softcap: float = 0.0, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss, the divergence and the cross entropy."""
    teacher = [teacher_input], [teacher_linear_weight], [] if teacher_linear_bias is None else [teacher_linear_bias]
    loss, divergences, nll = fused_linear_distill_reference(
        input, linear_weight, *teacher, [], [], [], teacher_softcap=[teacher_softcap], **options
    )
    return loss, divergences.squeeze(0), nll


KERNEL_OPS = DistillationOps("fused_linear_jsd", splits=True)


def student_and_teacher(make: Make, V: int, *tokens: int, H: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    randn = make.randn
    return randn(*tokens, H), randn(V, H), randn(*tokens, H + 8), randn(V, H + 8)


def fused_linear_jsd_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn

    both = partial(student_and_teacher, make)

    def labels(*shape: int) -> Tensor:
        positions = torch.arange(math.prod(shape), device=device, dtype=torch.int64).view(shape)
        return positions.masked_fill(positions % 4 == 3, -100)

    yield Sample(both(32, 8), why="powers of two")
    for beta in (0.0, 0.3, 1.0):
        kwargs = {"beta": beta, "labels": labels(2, 5), "chunk_size": 4}
        yield Sample(both(37, 2, 5), kwargs, why=f"beta {beta}, three chunks, ignored tokens")
        kwargs = {
            "beta": beta,
            "labels": labels(11),
            "linear_bias": randn(37),
            "teacher_linear_bias": randn(37),
            "temperature": 2.0,
            "softcap": 4.0,
            "teacher_softcap": 3.0,
            "chunk_size": 5,
            "row_weight": make.rand(11),
        }
        yield Sample(both(37, 11), kwargs, why=f"beta {beta}, every option")
        yield Sample(both(37, 11, H=16), kwargs | {"skip_ignored": True}, why=f"beta {beta}, ignored tokens skipped")
    yield Sample(both(37, 11), {"chunk_size": 2}, why="six chunks: float32 sums")
    yield Sample(both(37, 11), {"logits_dtype": dtype, "chunk_size": 5}, why="logits of the input's dtype")
    yield Sample(both(37, 5), {"labels": torch.full_like(labels(5), -100)}, why="every token ignored: NaN")
    yield Sample(both(37, 0), why="no tokens: NaN")
    yield Sample(both(1), why="one token, one dimension, one class")
    yield Sample(both(37, 5), {"labels": labels(5).int(), "ignore_index": 2}, why="int32 labels")
    strided = (randn(12, 9).t(), randn(12, 37).t(), randn(20, 9).t(), randn(20, 37).t())
    yield Sample(strided, why="everything strided")
    yield Sample(both(9_000, 2), {"beta": 0.9}, why="9,000 classes: whole blocks and a part")
    x, weight, teacher_x, teacher_weight = both(40, 6)
    yield Sample((3 * x, weight, 3 * teacher_x, teacher_weight), {"beta": 0.1, "temperature": 0.5}, why="peaked")


def teacher_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of N tokens, H features, V classes and H' features of the teacher, the sizes."""
    make, (N, H, V, teacher_H) = Make(device, dtype), sizes
    x, teacher_x = (make.randn(N, n) for n in (H, teacher_H))
    weight, teacher_weight = (make.randn(V, n) / n**0.5 for n in (H, teacher_H))
    return Sample((x, weight, teacher_x, teacher_weight), why=f"{N}x{H}x{V}, teacher {teacher_H}")


def fused_linear_jsd_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for beta in (0.0, 0.5):
        made = teacher_workload((4096, 2048, 128256, 4096), device, dtype)
        yield Sample(made.args, {"beta": beta}, why=f"{made.why}, {beta}")


def fused_linear_jsd_cost(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, *args: Tensor,
    **options: Any,
) -> Cost:  # fmt: skip
    return fused_linear_distill_cost(input, linear_weight, [teacher_input], [teacher_linear_weight], [], [], [], [])


@public_op(
    reference=fused_linear_jsd_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=fused_linear_jsd_samples,
    resized=resized(teacher_workload, 16, 40, 24),
    workloads=fused_linear_jsd_workloads,
    cost=fused_linear_jsd_cost,
)
def fused_linear_jsd(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_linear_weight: Tensor,
    *,
    labels: Tensor | None = None,
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
) -> Tensor:
    """`jsd` of the next-token distributions of a student and a teacher, from the hidden states of both.

    Neither model's logits are ever held whole. The gradients that are wanted are made in the forward pass, chunk by
    chunk, and scaled in the backward pass; the teacher gets none. Under autocast both linear layers run in its dtype.

    Where both weights are DTensors whose classes are sharded alike, `Shard(0)`, over one dimension of their mesh, each
    rank keeps its own, and the ranks gather six float32 numbers of each token, eight in float32; see `fused_linear_ce`.
    So they do where each rank has the same rows of both in plain tensors, as in `linear_logprobs`.

    Args:
        input: The student's hidden states `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        teacher_input: The teacher's hidden states `[..., H']`, dtype of `input`.
        teacher_linear_weight: `[V, H']`, dtype of `input`.
        labels: `[...]`, int64 or int32; tokens whose label is not `ignore_index` count. None for all.
        linear_bias: `[V]`, dtype of `input`.
        teacher_linear_bias: `[V]`, dtype of `input`.
        beta: From 0 to 1, as in `jsd`: 0 is KL(teacher || student), 1 KL(student || teacher).
        temperature: Divides the logits of both, after the cap; positive. The loss is not multiplied by its square.
        softcap: The student's logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        teacher_softcap: The same for the teacher's logits.
        row_weight: Weight `[...]` of each token's loss; the mean divides by their sum. None for 1.
        ignore_index: See `labels`.
        skip_ignored: As in `fused_linear_ce`. It takes memory for a copy of the hidden states of both.
        chunk_size: As in `fused_linear_ce`; 0 chooses for both logits together.
        logits_dtype: As in `fused_linear_ce`.
        vocab_start, num_classes, group_name: As in `linear_logprobs`; both weights have the same classes on a rank.

    Returns:
        float32 scalar, in nats: the mean over the tokens that count; over none it is NaN.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, such as two weights of different numbers of classes.
        NotImplementedError: A tensor of the teacher, or `row_weight`, requires a gradient.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    (loss,) = KERNEL_OPS({**locals(), "skip_ignored": skip_ignored and labels is not None})
    return loss
