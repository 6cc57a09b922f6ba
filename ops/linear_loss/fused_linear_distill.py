r"""Distillation from the hidden states of several teachers: their divergences from one student, and a cross entropy.

Sources: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, https://arxiv.org/abs/1503.02531, for
several teachers and the cross entropy; those of `fused_linear_jsd.py` for the divergence and for making the gradients
in the forward pass.

    loss = sum over teachers d of mean of a_d * divergence(softmax(z / T), softmax(z_d / T_d))
           + ce_weight * mean of -log softmax(z)[label]

with z the student's logits, z_d those of teacher d, and a_d its weight for each token. For a teacher with a map z are
the student's logits of the classes in it. A chunk's logits of the student
are made once. Those of the teachers follow one after the other in one buffer; the gradient

    dz = sum over teachers of that of a_d * divergence_d, + ce_weight / tokens * (softmax(z) - onehot(label))

is added up in float32 in another and rounded once, so that all have one dx, one dW and one db between them: D + 3
products for D teachers, where a call for each takes 4 D.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.math import cap_reference
from llmk.ops.linear_loss._records import Make, linear_cost, linear_reference
from llmk.ops.linear_loss.drivers.distillation import DistillationOps, TeachersCall, checked_teacher_weight
from llmk.ops.loss.jsd import jsd_terms
from llmk.registry import LARGEST, Cost, Sample, check_number, public_op


def fused_linear_distill_reference(
    input: Tensor, linear_weight: Tensor, teacher_input: Sequence[Tensor], teacher_linear_weight: Sequence[Tensor],
    teacher_linear_bias: Sequence[Tensor], vocab_map: Sequence[Tensor], *, labels: Tensor | None = None,
    linear_bias: Tensor | None = None,
    teacher_weight: Tensor | None = None, beta: float = 0.5, ce_weight: float = 0.0, temperature: float = 1.0,
    teacher_temperature: Sequence[float] | None = None, softcap: float = 0.0,
    teacher_softcap: Sequence[float] | None = None, row_weight: Tensor | None = None, ignore_index: int = -100,
    skip_ignored: bool = False, chunk_size: int = 0, logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def capped(input: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
        logits = linear_reference(input, weight, bias, logits_dtype)
        return cap_reference(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)

    z, D = capped(input, linear_weight, linear_bias, softcap), len(teacher_input)
    counts = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device) if labels is None else labels != ignore_index
    weights = torch.ones_like(z[..., 0]) if row_weight is None else row_weight.to(z.dtype)
    weights = torch.where(counts, weights, 0.0)
    biases, maps = (each or [None] * D for each in (list(teacher_linear_bias), list(vocab_map)))
    divergences = []
    for i in range(D):
        cap = 0.0 if teacher_softcap is None else teacher_softcap[i]
        y = capped(teacher_input[i], teacher_linear_weight[i], biases[i], cap)
        t = (y / (temperature if teacher_temperature is None else teacher_temperature[i])).log_softmax(-1)
        ids = maps[i]
        x = ((z if ids is None or ids.numel() == 0 else z[..., ids]) / temperature).log_softmax(-1)
        each = torch.where(counts, jsd_terms(x, t, beta).sum(-1), 0.0)
        if teacher_weight is not None:
            each = each * torch.where(counts, teacher_weight[..., i].to(x.dtype), 0.0)
        divergences.append((each * weights).sum() / weights.sum())
    loss = terms = torch.stack(divergences)
    loss = loss.sum()
    nll = torch.zeros_like(loss)
    if ce_weight > 0 and labels is not None:
        nll = torch.nn.functional.cross_entropy(
            z.reshape(-1, z.shape[-1]), labels.reshape(-1).long(), ignore_index=ignore_index
        )
        loss = loss + ce_weight * nll
    return loss, terms.detach(), nll.detach()


OPS = DistillationOps("fused_linear_distill", call_type=TeachersCall)


def fused_linear_distill_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn

    def given(
        V: int, *tokens: int, H: int = 12, teachers: Sequence[int] = (20, 8), bias: bool = False
    ) -> tuple[Any, ...]:
        inputs, weights = [randn(*tokens, n) for n in teachers], [randn(V, n) for n in teachers]
        return randn(*tokens, H), randn(V, H), inputs, weights, [randn(V) for _ in teachers] if bias else [], []

    def mapped(V: int, *tokens: int, sizes: Sequence[int]) -> tuple[Any, ...]:
        """The map of a teacher with as many classes as the student is empty."""
        x, weight, inputs, *_ = given(V, *tokens, teachers=[8] * len(sizes))
        maps = [torch.randperm(V, device=device)[: n if n < V else 0] for n in sizes]
        return x, weight, inputs, [randn(n, 8) for n in sizes], [randn(n) for n in sizes], maps

    yield Sample(given(32, 8), why="powers of two")
    kwargs = {
        "labels": make.classes(37, 2, 5),
        "linear_bias": randn(37),
        "teacher_weight": make.rand(2, 5, 2),
        "temperature": 2.0,
        "teacher_temperature": [1.5, 1.0],
        "softcap": 4.0,
        "teacher_softcap": [3.0, 0.0],
        "ce_weight": 0.4,
        "row_weight": make.rand(2, 5),
        "chunk_size": 4,
    }
    for beta in (0.0, 0.3, 1.0):
        yield Sample(given(37, 2, 5, bias=True), kwargs | {"beta": beta}, why=f"beta {beta}, every option")
    skipped = kwargs | {"skip_ignored": True}
    yield Sample(given(37, 2, 5, H=16, teachers=(16, 8), bias=True), skipped, why="ignored tokens skipped")
    yield Sample(given(37, 2, 5), {"logits_dtype": dtype, "chunk_size": 4}, why="logits of the input's dtype")
    three = {"teacher_weight": make.rand(3), "labels": make.classes(37, 6), "chunk_size": 2}
    yield Sample(given(37, 6, teachers=(12, 8, 16)), three, why="three teachers with a weight each")
    yield Sample(given(37, 5, teachers=(8,)), {"beta": 0.9, "labels": make.classes(37, 5)}, why="one teacher")
    for sizes in ((9, 37), (20, 36)):
        kwargs = {"labels": make.classes(37, 5), "ce_weight": 0.4, "chunk_size": 2, "softcap": 4.0}
        yield Sample(mapped(37, 5, sizes=sizes), kwargs, why=f"{sizes} of 37 classes, in any order")
    yield Sample(mapped(37, 5, sizes=(30,)), {"beta": 1.0}, why="a reduced vocabulary")
    yield Sample(given(37, 0), why="no tokens: NaN")
    yield Sample(given(37, 5), {"labels": make.ignored(5), "ce_weight": 1.0}, why="no token counts: NaN")
    heads = [randn(20, 37).t(), randn(37, 8)]
    strided = randn(12, 5).t(), randn(12, 37).t(), [randn(20, 5).t(), randn(5, 8)], heads, [], []
    yield Sample(strided, {"labels": make.classes(37, 5).int()}, why="strided, int32")
    yield Sample(given(9_000, 2), {"beta": 0.9}, why="9,000 classes: whole blocks and a part")


def fused_linear_distill_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    make = Make(device, dtype)
    teachers = [make.randn(rows, n) for n in (24, 8)], [make.randn(40, n) for n in (24, 8)], [], []
    return Sample((make.randn(rows, 16), make.randn(40, 16), *teachers), {"chunk_size": 32}, why="resized")


def fused_linear_distill_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    (N, H, V), make = (4096, 4096, 128256), Make(device, dtype)
    for D in (2, 3):
        x, *teachers = (make.randn(N, H) for _ in range(1 + D))
        weight, *heads = (make.randn(V, H) / H**0.5 for _ in range(1 + D))
        yield Sample((x, weight, teachers, heads, [], []), why=f"{N}x{H}x{V}, {D} teachers")


def fused_linear_distill_cost(
    input: Tensor, linear_weight: Tensor, teacher_input: Sequence[Tensor], teacher_linear_weight: Sequence[Tensor],
    *others: Any, **options: Any,
) -> Cost:  # fmt: skip
    student = linear_cost(input, linear_weight)
    teachers = [linear_cost(*each) for each in zip(teacher_input, teacher_linear_weight, strict=True)]
    read, flops = sum(each.bytes_forward for each in teachers), sum(each.flops_forward for each in teachers)
    return Cost(
        student.bytes_forward + read,
        student.bytes_full + read,
        student.flops_forward + flops,
        student.flops_full + flops,
    )


@public_op(
    reference=fused_linear_distill_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=OPS.kernel_ops,
    samples=fused_linear_distill_samples,
    resized=fused_linear_distill_resized,
    workloads=fused_linear_distill_workloads,
    cost=fused_linear_distill_cost,
)
def fused_linear_distill(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Sequence[Tensor],
    teacher_linear_weight: Sequence[Tensor],
    teacher_linear_bias: Sequence[Tensor],
    vocab_map: Sequence[Tensor],
    *,
    labels: Tensor | None = None,
    linear_bias: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    beta: float = 0.5,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    teacher_temperature: Sequence[float] | None = None,
    softcap: float = 0.0,
    teacher_softcap: Sequence[float] | None = None,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    skip_ignored: bool = False,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_linear_jsd` from D teachers to one student, whose logits are made once, with its cross entropy if wanted.

    No model's logits are ever held whole, and those of one teacher at a time. The gradients that are wanted are made in
    the forward pass, in D + 3 products; no teacher gets one. Under autocast all linear layers run in its dtype.

    Args:
        input: The student's hidden states `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        teacher_input: The hidden states `[..., H']` of each teacher, dtype of `input`; each has its own H'.
        teacher_linear_weight: `[V', H']` of each teacher, dtype of `input`. V' is V without a map.
        teacher_linear_bias: `[V']` of each teacher, dtype of `input`; an empty list for none of any.
        vocab_map: The student's class of each of a teacher's, int64 `[V']`, all different and in any order, for a
            vocabulary that is reduced or permuted; `[0]` for a teacher that has the student's, an empty list where all
            have. The student's softmax for that teacher is over these classes.
        labels: `[...]`, int64 or int32; tokens whose label is not `ignore_index` count. None for all. With a
            `ce_weight` they are the targets of the cross entropy.
        linear_bias: `[V]`, dtype of `input`.
        teacher_weight: The factor of each teacher's divergence, `[D]`, or `[..., D]` for one of each token; None for 1.
        beta: From 0 to 1, as in `jsd`: 0 is KL(teacher || student), 1 KL(student || teacher).
        ce_weight: Weight of the cross entropy, at temperature 1, the mean over the tokens that count; 0 for none.
        temperature: Divides the student's logits, after the cap; positive. The loss is not multiplied by its square.
        teacher_temperature: The same for each teacher's logits; None for the student's.
        softcap: The student's logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        teacher_softcap: The same for each teacher's logits; None for none of any.
        row_weight: Weight `[...]` of each token's divergences; the means divide by their sum. None for 1.
        ignore_index: See `labels`.
        skip_ignored, chunk_size, logits_dtype: As in `fused_linear_jsd`.

    Returns:
        The loss, a float32 scalar: the sum of the teachers' mean divergences, each times its weight, and of `ce_weight`
        times the cross entropy. And detached: these divergences `[D]`, and the cross entropy, 0 without a `ce_weight`.
        Over no token all of it is NaN.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device, the length of a list or an option does not fit.
        IndexError: On the CPU, with a `ce_weight`, a label is neither a class nor `ignore_index`, or an id of a map is
            no class. On a GPU it makes the loss NaN, as do ids that are not different.
        NotImplementedError: A tensor of a teacher, or a weight of tokens or teachers, requires a gradient.

    Sources: Hinton et al., 2015, https://arxiv.org/abs/1503.02531; Agarwal et al., 2023,
    https://arxiv.org/abs/2306.13649; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    check_number("ce_weight", ce_weight, 0.0, LARGEST, "a finite number that is not negative")
    if ce_weight > 0 and labels is None:
        raise ValueError(f"labels: expected class indices for a ce_weight of {ce_weight}, got None")
    D = len(teacher_input)
    loss, divergences, nll = OPS.with_teachers(
        input=input,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        teacher_input=teacher_input,
        teacher_linear_weight=teacher_linear_weight,
        teacher_linear_bias=teacher_linear_bias,
        vocab_map=vocab_map,
        teacher_weight=checked_teacher_weight(teacher_weight, input, D),
        labels=labels,
        row_weight=row_weight,
        beta=beta,
        temperature=temperature,
        teacher_temperature=[temperature] * D if teacher_temperature is None else teacher_temperature,
        softcap=softcap,
        teacher_softcap=[0.0] * D if teacher_softcap is None else teacher_softcap,
        ignore_index=ignore_index,
        skip_ignored=skip_ignored and labels is not None,
        logits_dtype=logits_dtype,
        chunk_size=chunk_size,
        ce_weight=ce_weight,
        shard=None,
    )
    return loss, divergences, nll
