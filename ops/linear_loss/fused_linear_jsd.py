r"""Distillation from hidden states: the divergence of a student's and a teacher's next-token distributions.

Sources: Agarwal et al., "On-Policy Distillation of Language Models", 2023, https://arxiv.org/abs/2306.13649, for the
divergence; Hsu et al., "Liger Kernel", 2024, https://arxiv.org/abs/2410.10989, for making the gradients in the forward
pass, chunk by chunk.

Forward, for student x [N, H], W [V, H] and teacher x' [N, H'], W' [V, H'], a chunk of tokens at a time:

    logits  = x_chunk @ W^T + b            [C, V], and the teacher's beside them: the only buffers of that width
    losses  = divergence of each row       three passes over both, see `_divergence_rows.py`
    G       = the student's logits' gradient, in place
    dx      = G @ W                        rows of the chunk
    dW     += G^T @ x_chunk                and db += the column sums of G

The teacher gets no gradient. A mean needs no more of the upstream gradient than one factor, so the backward pass only
multiplies by it and divides by what the mean divided by, as in `fused_linear_ce.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.scaling import scale_op
from llmk.ops.linear_loss._call import CallOp, LinearCall, product_flops, saved_dtypes
from llmk.ops.linear_loss._chunked_linear import ChunkedLinear, LinearGradients
from llmk.ops.linear_loss._divergence_rows import CPU, KERNELS, DivergenceRows, Softmaxes, losses
from llmk.ops.linear_loss._ignored import Kept
from llmk.ops.linear_loss._ranks import group_size
from llmk.ops.linear_loss._scaled import differentiate_by_scaling, fake_loss, mean_of_all
from llmk.ops.linear_loss.checks import check_chunk_size, check_temperature, checked_linear
from llmk.ops.loss.divergence_math import Mixture
from llmk.ops.loss.jsd import jsd_terms
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    Sample,
    cdiv,
    check_dtype,
    check_number,
    check_same,
    check_shape,
    check_switch,
    is_sharded,
    public_op,
    replicate_only,
    row_axes,
)
from llmk.registry.eager.bypass import PLAIN_TENSORS
from llmk.registry.record import FLOAT_DTYPES


def fused_linear_jsd_reference(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, *,
    labels: Tensor | None = None, linear_bias: Tensor | None = None, teacher_linear_bias: Tensor | None = None,
    beta: float = 0.5, temperature: float = 1.0, softcap: float = 0.0, teacher_softcap: float = 0.0,
    row_weight: Tensor | None = None, ignore_index: int = -100, skip_ignored: bool = False, chunk_size: int = 0,
) -> Tensor:  # fmt: skip
    def log_probabilities(input: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
        logits = torch.nn.functional.linear(input, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return (logits / temperature).log_softmax(-1)

    x = log_probabilities(input, linear_weight, linear_bias, softcap)
    t = log_probabilities(teacher_input, teacher_linear_weight, teacher_linear_bias, teacher_softcap)
    each = jsd_terms(x, t, beta).sum(-1)
    weights = torch.ones_like(each) if row_weight is None else row_weight.to(each.dtype)
    if labels is not None:
        counts = labels != ignore_index
        each, weights = (torch.where(counts, a, 0.0) for a in (each, weights))
    return (each * weights).sum() / weights.sum()


@dataclass(frozen=True)
class DistillCall(LinearCall):
    """Both have the same classes, which on the ranks of a group are slices of all."""

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
    skip_ignored: bool
    chunk_size: int
    num_classes: int
    group_name: str  # "" where there is none
    dx_group_name: str  # over which the gradient of the input is summed

    @property
    def dtypes(self) -> list[torch.dtype]:
        return saved_dtypes(self.input.dtype, self.dx_group_name)

    def linears(self, kept: Kept | None) -> tuple[ChunkedLinear, ChunkedLinear]:
        """The student's and the teacher's, in the same chunks, whose logits together fit the budget."""
        classes = 2 * cdiv(self.num_classes, group_size(self.group_name))  # on all ranks the same chunks
        count = Kept.count_of(kept)
        student = ChunkedLinear(self.input, self.linear_weight, self.linear_bias, self.chunk_size, classes, count=count)
        teacher = ChunkedLinear(
            self.teacher_input, self.teacher_linear_weight, self.teacher_linear_bias, student.chunk_rows, count=count
        )
        return student, teacher

    def softmaxes(self, student: ChunkedLinear) -> Softmaxes:
        return Softmaxes(
            Mixture(self.beta), self.temperature, self.softcap, self.teacher_softcap, student.leaves_rows_past_count
        )

    def counts(self) -> Tensor:
        """Which tokens count, `[N]`."""
        if self.labels is None:
            return torch.ones((self.tokens.numel(),), dtype=torch.bool, device=self.input.device)
        return self.labels.reshape(-1).long() != self.ignore_index  # int32 would wrap an index that it does not hold

    def kept(self, rows: DivergenceRows) -> Kept | None:
        """The tokens that count, where that is asked for and can be made use of."""
        if not self.skip_ignored or self.labels is None:
            return None
        linears = (self.input, self.linear_weight), (self.teacher_input, self.teacher_linear_weight)
        return Kept.of(self.counts().view(self.tokens), *linears, on_host=rows is CPU)


def _fwd(
    rows: DivergenceRows, call: DistillCall, total: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The mean of the losses, or with `total` their sum, what the gradients are still to be divided by, and these."""
    kept = call.kept(rows)
    if kept is not None:
        call = kept.call(call, "input", "teacher_input", "labels", "row_weight")
    counts = call.counts()
    count = counts.float()
    weights = count if call.row_weight is None else torch.where(counts, call.row_weight.reshape(-1).float(), 0.0)
    divisor = weights.sum()
    # Mostly the gradients of the rows are divided here. Where weights make the divisor 0 the rows that count get some
    # that are not finite, as is the loss; without weights no row counts then, and all gradients are 0.
    of_rows, left = weights, divisor
    if not total and call.input.dtype != torch.float16:  # whose range does not hold what is divided
        of_rows, left = weights / divisor, torch.ones_like(divisor)
    elif not total and call.row_weight is not None:
        of_rows = torch.where(divisor == 0, float("inf"), weights)
    student, teacher = call.linears(kept)
    gradients = LinearGradients(student, (need_dx, need_dw, need_db), call.dtypes[0])
    softmaxes, parts = call.softmaxes(student), []
    for (chunk, z), (_, w) in zip(student.chunks(), teacher.chunks(), strict=True):
        loss, stats, sums = losses(rows, z, w, count[chunk], softmaxes, call.group_name)
        parts.append(torch.where(counts[chunk], loss * weights[chunk], 0.0))
        if any(gradients.need):
            if z.shape[1] > 0:
                rows.gradients(z, w, count[chunk], of_rows[chunk], stats, sums, softmaxes)
            gradients.add(chunk, z)
    loss = torch.cat(parts).sum()
    dx = gradients.dx if kept is None or not need_dx else kept.spread(gradients.dx)
    return loss if total else loss / divisor, left, dx, gradients.dw.to(call.dtypes[1]), gradients.db


def _products(call: DistillCall, total: bool, need_dx: bool, need_dw: bool, need_db: bool) -> float:
    return 1 + need_dx + need_dw + call.teacher_input.shape[-1] / call.input.shape[-1]


fused_linear_jsd_fwd = CallOp(
    "_fused_linear_jsd_fwd", DistillCall, _fwd, kernels=KERNELS, cpu=CPU, fake=fake_loss, products=_products
)
scale = scale_op("_fused_linear_jsd_scale")


@fused_linear_jsd_fwd.op.register_sharding
def _(input, *args):
    *_, total, need_dx, _, _ = args
    if not total:
        return replicate_only()
    return [
        (
            [PARTIAL, PARTIAL, axis if need_dx else REPLICATE, PARTIAL, PARTIAL],
            [axis, REPLICATE, REPLICATE, axis, REPLICATE, REPLICATE, axis, axis],
        )
        for axis in row_axes(input)
    ]


differentiate_by_scaling(fused_linear_jsd_fwd, scale, lambda total: total)


def fused_linear_jsd_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def both(V: int, *tokens: int, H: int = 12) -> tuple[Tensor, ...]:
        return randn(*tokens, H), randn(V, H), randn(*tokens, H + 8), randn(V, H + 8)

    def labels(*shape: int) -> Tensor:
        places = torch.arange(math.prod(shape), device=device, dtype=torch.int64).view(shape)
        return places.masked_fill(places % 4 == 3, -100)

    yield Sample(both(32, 8), why="powers of two")
    for beta in (0.0, 0.3, 1.0):
        kwargs = {"beta": beta, "labels": labels(2, 5), "chunk_size": 4}
        yield Sample(both(37, 2, 5), kwargs, why=f"beta {beta}, three chunks, ignored tokens")
        kwargs = {
            "beta": beta, "labels": labels(11), "linear_bias": randn(37), "teacher_linear_bias": randn(37),
            "temperature": 2.0, "softcap": 4.0, "teacher_softcap": 3.0, "chunk_size": 5,
            "row_weight": torch.rand(11, device=device, dtype=dtype),
        }  # fmt: skip
        yield Sample(both(37, 11), kwargs, why=f"beta {beta}, every option")
        yield Sample(both(37, 11, H=16), kwargs | {"skip_ignored": True}, why=f"beta {beta}, ignored tokens skipped")
    yield Sample(both(37, 11), {"chunk_size": 2}, why="six chunks: float32 sums")
    yield Sample(both(37, 5), {"labels": torch.full_like(labels(5), -100)}, why="every token ignored: NaN")
    yield Sample(both(37, 0), why="no tokens: NaN")
    yield Sample(both(1), why="one token, one dimension, one class")
    yield Sample(both(37, 5), {"labels": labels(5).int(), "ignore_index": 2}, why="int32 labels")
    strided = (randn(12, 9).t(), randn(12, 37).t(), randn(20, 9).t(), randn(20, 37).t())
    yield Sample(strided, why="everything strided")
    yield Sample(both(9_000, 2), {"beta": 0.9}, why="9,000 classes: whole blocks and a part")
    x, weight, teacher_x, teacher_weight = both(40, 6)
    yield Sample((3 * x, weight, 3 * teacher_x, teacher_weight), {"beta": 0.1, "temperature": 0.5}, why="peaked")


def fused_linear_jsd_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, weight = (torch.randn(n, 16, device=device, dtype=dtype) for n in (rows, 40))
    teacher_x, teacher_weight = (torch.randn(n, 24, device=device, dtype=dtype) for n in (rows, 40))
    return Sample((x, weight, teacher_x, teacher_weight), {"chunk_size": 32}, why="resized")


def fused_linear_jsd_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    N, H, V, teacher_H = 4096, 2048, 128256, 4096
    x, teacher_x = (torch.randn(N, n, device=device, dtype=dtype) for n in (H, teacher_H))
    weight, teacher_weight = (torch.randn(V, n, device=device, dtype=dtype) / n**0.5 for n in (H, teacher_H))
    for beta in (0.0, 0.5):
        yield Sample(
            (x, weight, teacher_x, teacher_weight), {"beta": beta}, why=f"{N}x{H}x{V}, teacher {teacher_H}, {beta}"
        )


def fused_linear_jsd_cost(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, **options: Any
) -> Cost:
    student = (input.numel() + linear_weight.numel()) * input.element_size()
    teacher = (teacher_input.numel() + teacher_linear_weight.numel()) * input.element_size()
    product, of_teacher = product_flops(input, linear_weight), product_flops(teacher_input, teacher_linear_weight)
    return Cost(student + teacher, 2 * student + teacher, product + of_teacher, 3 * product + of_teacher)


@public_op(
    "fused_linear_jsd(Tensor input, Tensor linear_weight, Tensor teacher_input, Tensor teacher_linear_weight, *, "
    "Tensor? labels=None, Tensor? linear_bias=None, Tensor? teacher_linear_bias=None, float beta=0.5, "
    "float temperature=1.0, float softcap=0.0, float teacher_softcap=0.0, Tensor? row_weight=None, "
    "int ignore_index=-100, bool skip_ignored=False, int chunk_size=0) -> Tensor",
    reference=fused_linear_jsd_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(fused_linear_jsd_fwd.op, scale),
    samples=fused_linear_jsd_samples,
    resized=fused_linear_jsd_resized,
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
) -> Tensor:
    """`jsd` of the next-token distributions of a student and a teacher, from the hidden states of both.

    Neither model's logits are ever held whole. The gradients that are wanted are made in the forward pass, chunk by
    chunk, and scaled in the backward pass; the teacher gets none. Under autocast both linear layers run in its dtype.

    Where both weights are DTensors whose classes are sharded alike, `Shard(0)`, over one dimension of their mesh, each
    rank keeps its own, and the ranks gather six float32 numbers of each token, eight in float32; see `fused_linear_ce`.

    Args:
        input: The student's hidden states `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        teacher_input: The teacher's hidden states `[..., H']`, dtype of `input`.
        teacher_linear_weight: `[V, H']`, dtype of `input`.
        labels: `[...]`, int64 or int32: which tokens count, those whose label is not `ignore_index`. None for all.
        linear_bias: `[V]`, dtype of `input`.
        teacher_linear_bias: `[V]`, dtype of `input`.
        beta: From 0 to 1, as in `jsd`: 0 is KL(teacher || student), 1 KL(student || teacher).
        temperature: What the logits of both are divided by, after the cap; positive. The loss is not multiplied by its
            square.
        softcap: The student's logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        teacher_softcap: The same of the teacher's.
        row_weight: `[...]`, what each token's loss is multiplied by; the mean divides by their sum. None for 1.
        ignore_index: See `labels`.
        skip_ignored: Do no work for tokens that do not count. On a CPU they are left out. On a GPU, where only the
            device knows how many count, the matrix products stop at that number on chips of compute capability 9 and 10
            in bfloat16, where H is a multiple of 8 and the weight's rows are contiguous; elsewhere they are those of
            all tokens. Where tokens are more than a chunk, it takes memory for dW once more.
        chunk_size: Tokens whose logits exist at a time; 0 chooses as `fused_linear_ce` does, for both logits together.

    Returns:
        float32 scalar, in nats: the mean over the tokens that count; over none it is NaN.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, such as two weights of different numbers of classes.
        NotImplementedError: A tensor of the teacher, or `row_weight`, requires a gradient.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_linear_weight, teacher_linear_bias)
    options = (beta, temperature, softcap, teacher_softcap, ignore_index, skip_ignored, chunk_size)
    classes, teacher_classes = linear_weight.shape[0], teacher_linear_weight.shape[0]
    if type(linear_weight) not in PLAIN_TENSORS:
        from llmk.ops.linear_loss._vocab_shards import mesh_dim_of_classes, slices_of  # which imports torch.distributed

        dim = mesh_dim_of_classes(input, linear_weight)
        if dim is not None and mesh_dim_of_classes(teacher_input, teacher_linear_weight) == dim:
            own, others = slices_of(dim, *student, labels, None, row_weight), slices_of(dim, *teacher)
            tensors = (*own[:3], *others[:3], own.target, own.row_weight)
            return own.whole(
                _divergence(tensors, options, (classes, own.group_name, own.dx_group_name), teacher_classes)
            )
    return _divergence((*student, *teacher, labels, row_weight), options, (classes, "", ""), teacher_classes)


def _divergence(
    tensors: tuple[Any, ...], options: tuple[Any, ...], slices: tuple[int, str, str], teacher_classes: int
) -> Tensor:
    of_both = *checked_linear(*tensors[:3], fewest_classes=0), *_checked_teacher(*tensors[3:6])
    arguments: tuple[Any, ...] = (*of_both, *tensors[6:], *options, *slices)
    call = DistillCall(*arguments)
    if call.num_classes == 0 or teacher_classes != call.num_classes:
        raise ValueError(
            f"teacher_linear_weight: expected the classes of linear_weight, {call.num_classes} and at least one, "
            f"got {teacher_classes}"
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
    if is_sharded(call.input, call.linear_weight):
        total, divisor, *_ = fused_linear_jsd_fwd(call, True)
        return mean_of_all(total, divisor.detach(), call.row_weight is not None)
    loss, *_ = fused_linear_jsd_fwd(call, False)
    return loss


def _checked_teacher(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    try:
        return checked_linear(input, weight, bias, fewest_classes=0)
    except (TypeError, ValueError) as error:  # it names input, linear_weight or linear_bias
        raise type(error)(f"teacher_{error}") from None
