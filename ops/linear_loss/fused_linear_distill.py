r"""Distillation from several teachers, by their hidden states or their largest classes, with a cross entropy.

Sources: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, https://arxiv.org/abs/1503.02531, for
several teachers and the cross entropy; those of `fused_linear_jsd.py` for the divergence and for making the gradients
in the forward pass.

    loss = sum over teachers d of mean of a_d * divergence(softmax(z / T), softmax(z_d / T_d))
           + ce_weight * mean of -log softmax(z)[label]

with z the student's logits, z_d those of teacher d, and a_d its weight for each token. For a teacher with a map z are
the student's logits of the classes in it. A chunk's logits of the student are made once. Those of the teachers follow
one after the other in one buffer; the gradient

    dz = sum over teachers of that of a_d * divergence_d, + ce_weight / tokens * (softmax(z) - onehot(label))

is added up in float32 in another and rounded once, so that all have one dx, one dW and one db between them: D + 3
products for D teachers, where a call for each takes 4 D.

A teacher may be known by its log-probabilities of K classes of each token instead, which a disk can hold: it takes no
product. Its divergence on the classes c_k and the tail, in `objectives/topk_divergence.py`, is a function of the
student's log-probabilities of them, and with g_k its derivative by these and s = softmax(z / T)

    dz_j = 1 / T * (sum_k(g_k * [j = c_k]) - s_j * sum_k(g_k))

For several such teachers the sums go over the classes of all, so that one pass over z serves them together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, linear_cost, logits_reference
from llmk.ops.linear_loss.drivers.distillation import (
    DistillationOps,
    check_call,
    check_teacher_fits,
    checked_teacher,
)
from llmk.ops.linear_loss.drivers.distillation_call import (
    MOST_CLASSES,
    TEACHER,
    DistillationCall,
    Teacher,
    TopkTeachers,
)
from llmk.ops.linear_loss.objectives.topk_divergence import NOT_THERE
from llmk.ops.loss.jsd import jsd_terms
from llmk.registry import (
    LARGEST,
    Cost,
    Sample,
    check_dtype,
    check_number,
    check_parameter,
    check_positive,
    check_same,
    check_switch,
    public_op,
)


def fused_linear_distill_reference(
    input: Tensor, linear_weight: Tensor, teacher_input: Sequence[Tensor], teacher_linear_weight: Sequence[Tensor],
    teacher_linear_bias: Sequence[Tensor], vocab_map: Sequence[Tensor], teacher_ids: Sequence[Tensor],
    teacher_logprobs: Sequence[Tensor], *, labels: Tensor | None = None, linear_bias: Tensor | None = None,
    teacher_weight: Tensor | None = None, beta: float = 0.5, ce_weight: float = 0.0, temperature: float = 1.0,
    teacher_temperature: Sequence[float] | None = None, softcap: float = 0.0,
    teacher_softcap: Sequence[float] | None = None, add_tail: bool = True, row_weight: Tensor | None = None,
    ignore_index: int = -100, skip_ignored: bool = False, chunk_size: int = 0, logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    z = logits_reference(input, linear_weight, linear_bias, logits_dtype, softcap=softcap)
    D = len(teacher_input)
    counts = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device) if labels is None else labels != ignore_index
    weights = torch.ones_like(z[..., 0]) if row_weight is None else row_weight.to(z.dtype)
    weights = torch.where(counts, weights, 0.0)
    biases, maps = (each or [None] * D for each in (list(teacher_linear_bias), list(vocab_map)))
    divergences = []
    for i in range(D):
        cap = 0.0 if teacher_softcap is None else teacher_softcap[i]
        y = logits_reference(teacher_input[i], teacher_linear_weight[i], biases[i], logits_dtype, softcap=cap)
        t = (y / (temperature if teacher_temperature is None else teacher_temperature[i])).log_softmax(-1)
        ids = maps[i]
        x = ((z if ids is None or ids.numel() == 0 else z[..., ids]) / temperature).log_softmax(-1)
        divergences.append(jsd_terms(x, t, beta).sum(-1))
    log_softmax = (z / temperature).log_softmax(-1)
    for ids, logprobs in zip(teacher_ids, teacher_logprobs, strict=True):
        ids, present = ids.long(), (ids >= 0) & (logprobs > float("-inf")) & counts.unsqueeze(-1)
        classes = torch.arange(z.shape[-1], device=ids.device, dtype=torch.int64)
        is_present = ((ids.unsqueeze(-1) == classes) & present.unsqueeze(-1)).any(-2)
        others = log_softmax.masked_fill(is_present, float("-inf")).logsumexp(-1, keepdim=True)
        logprobs = logprobs.to(z.dtype)
        left = 1 - torch.where(present, logprobs, float("-inf")).exp().sum(-1, keepdim=True)
        left = left.clamp(min=torch.finfo(left.dtype).eps).log()
        x = _distribution_reference(log_softmax.gather(-1, torch.where(present, ids, 0)), present, add_tail, others)
        t = _distribution_reference(logprobs, present, add_tail, left)
        divergences.append(torch.where(present.any(-1), jsd_terms(x, t, beta).sum(-1), 0.0))
    each = torch.where(counts, torch.stack(divergences), 0.0)
    if teacher_weight is not None:
        each = each * torch.where(counts, teacher_weight.expand(*counts.shape, -1).movedim(-1, 0).to(each.dtype), 0.0)
    terms = (each * weights).reshape(len(divergences), -1).sum(-1) / weights.sum()
    loss = terms.sum()
    nll = torch.zeros_like(loss)
    if ce_weight > 0 and labels is not None:
        nll = torch.nn.functional.cross_entropy(
            z.reshape(-1, z.shape[-1]), labels.reshape(-1).long(), ignore_index=ignore_index
        )
        loss = loss + ce_weight * nll
    return loss, terms.detach(), nll.detach()


def _distribution_reference(logprobs: Tensor, present: Tensor, add_tail: bool, others: Tensor) -> Tensor:
    """The logarithms of the probabilities of classes, -inf of an absent one, and of the others, or normalized."""
    if not add_tail:
        some_are_present = present.any(-1, keepdim=True)
        logprobs = logprobs.masked_fill(~present & some_are_present, float("-inf")).log_softmax(-1)
        return logprobs.masked_fill(~present, float("-inf"))
    return torch.cat((logprobs.masked_fill(~present, float("-inf")), others), -1)


@dataclass(frozen=True, kw_only=True)
class TeachersCall(DistillationCall):
    """A call with D teachers, those with hidden states first."""

    token_tensors = (
        "input", "teacher_input", "teacher_ids", "teacher_logprobs", "labels", "row_weight", "teacher_weight"
    )  # fmt: skip
    teacher_weight: Tensor | None  # [..., D]
    teacher_input: Sequence[Tensor]  # [..., H'] each
    teacher_linear_weight: Sequence[Tensor]  # [V, H'] each
    teacher_linear_bias: Sequence[Tensor]  # [V] each, or none of any
    vocab_map: Sequence[Tensor]  # [V'] each, [0] where it has the student's classes, or none of any
    teacher_ids: Sequence[Tensor]  # [..., K] each
    teacher_logprobs: Sequence[Tensor]  # [..., K] each
    teacher_temperature: Sequence[float]
    teacher_softcap: Sequence[float]
    add_tail: bool

    @property
    def teachers(self) -> list[Teacher]:
        nothing = [None] * len(self.teacher_input)
        layers = self.teacher_input, self.teacher_linear_weight, self.teacher_linear_bias or nothing
        maps = [each if each.shape[0] > 0 else None for each in self.vocab_map] or nothing
        return [
            Teacher(*each) for each in zip(*layers, self.teacher_temperature, self.teacher_softcap, maps, strict=True)
        ]

    @property
    def has_topk_teachers(self) -> bool:
        return len(self.teacher_ids) > 0

    def topk_teachers(self, mask: Tensor, *, on_host: bool) -> TopkTeachers | None:
        if not self.has_topk_teachers:
            return None
        V, classes, logprobs = self.num_classes, [], []
        for i, (ids, given) in enumerate(zip(self.teacher_ids, self.teacher_logprobs, strict=True)):
            ids, given = ids.reshape(-1, ids.shape[-1]).long(), given.reshape(-1, given.shape[-1]).float()
            present = (ids >= 0) & (given != float("-inf")) & mask.unsqueeze(-1)
            wrong = present & (ids >= V)
            if on_host and wrong.any():
                expected = f"classes in [0, {V}), or -1 for none"
                raise IndexError(f"teacher_ids[{i}]: expected {expected}, got {int(ids[wrong][0])}")
            classes.append(ids.masked_fill(~present, NOT_THERE))
            logprobs.append(given)
        sizes = [each.shape[-1] for each in classes]
        return TopkTeachers(torch.cat(classes, -1), torch.cat(logprobs, -1), sizes, self.beta, self.add_tail)

    def teacher_weights(self, mask: Tensor) -> Tensor:
        if self.teacher_weight is None:
            return mask.float().repeat(self.num_teachers, 1)
        weights = self.teacher_weight.reshape(-1, self.num_teachers).t()
        return torch.where(mask, weights.float(), 0.0).contiguous()

    @property
    def num_teachers(self) -> int:
        return len(self.teacher_input) + len(self.teacher_ids)

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.num_teachers,), ()


KERNEL_OPS = DistillationOps("fused_linear_distill", call_type=TeachersCall)


def fused_linear_distill_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn

    def given(
        V: int, *tokens: int, H: int = 12, teachers: Sequence[int] = (20, 8), bias: bool = False
    ) -> tuple[Any, ...]:
        inputs, weights = [randn(*tokens, n) for n in teachers], [randn(V, n) for n in teachers]
        return randn(*tokens, H), randn(V, H), inputs, weights, [randn(V) for _ in teachers] if bias else [], [], [], []

    def mapped(V: int, *tokens: int, sizes: Sequence[int]) -> tuple[Any, ...]:
        """The map of a teacher with as many classes as the student is empty."""
        x, weight, inputs, *_ = given(V, *tokens, teachers=[8] * len(sizes))
        maps = [torch.randperm(V, device=device)[: n if n < V else 0] for n in sizes]
        return x, weight, inputs, [randn(n, 8) for n in sizes], [randn(n) for n in sizes], maps, [], []

    def with_topk(args: tuple[Any, ...], sizes: Sequence[int]) -> tuple[Any, ...]:
        """Add teachers by so many classes of a token; of the first some are absent, of the last all of a token's."""
        weight, (*tokens, _) = args[1], args[0].shape
        top = [randn(*tokens, weight.shape[0]).float().log_softmax(-1).topk(K) for K in sizes]
        ids, logprobs = [each.indices for each in top], [each.values.to(dtype) for each in top]
        ids[0].view(-1)[1::5], logprobs[0].view(-1)[2::5] = -1, float("-inf")
        ids[-1].view(-1, sizes[-1])[1] = -1
        return *args[:6], ids, logprobs

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
    weighted = kwargs | {"teacher_weight": make.rand(2, 5, 4)}
    for beta, add_tail in ((0.0, True), (0.3, False), (0.6, True), (1.0, True), (1.0, False)):
        both = with_topk(given(37, 2, 5, bias=True), (4, 6))
        given_both = weighted | {"beta": beta, "add_tail": add_tail}
        tail = "with" if add_tail else "without"
        yield Sample(both, given_both, why=f"beta {beta}, two more teachers of top-k {tail} a tail")
    both = with_topk(given(37, 2, 5, H=16, teachers=(16,)), (4,))
    skipped = {"labels": make.classes(37, 2, 5), "skip_ignored": True, "chunk_size": 4}
    yield Sample(both, skipped, why="a teacher of either kind, ignored tokens skipped")
    x, weight, *others = given(37, 5, teachers=())
    ids = torch.arange(4, device=device, dtype=torch.int64).expand(5, -1)
    likely = torch.tensor([0.4, 0.3, 0.1, 0.1], device=device, dtype=torch.float32).log().to(dtype).expand(5, -1)
    sure = {"linear_bias": 30.0 * (torch.arange(37, device=device, dtype=torch.int64) < 4).to(dtype)}
    for beta in (0.0, 0.5):
        args = x, weight, *others[:4], [ids], [likely]
        yield Sample(args, sure | {"beta": beta}, why=f"beta {beta}, a student that is sure of a teacher's classes")
    alone = with_topk(given(37, 6, teachers=()), (5, 3))
    yield Sample(alone, {"chunk_size": 2, "logits_dtype": dtype}, why="teachers of top-k alone")
    three = {"teacher_weight": make.rand(3), "labels": make.classes(37, 6), "chunk_size": 2}
    yield Sample(given(37, 6, teachers=(12, 8, 16)), three, why="three teachers with a weight each")
    yield Sample(given(37, 5, teachers=(8,)), {"beta": 0.9, "labels": make.classes(37, 5)}, why="one teacher")
    for sizes in ((9, 37), (20, 36)):
        kwargs = {"labels": make.classes(37, 5), "ce_weight": 0.4, "chunk_size": 2, "softcap": 4.0}
        yield Sample(mapped(37, 5, sizes=sizes), kwargs, why=f"{sizes} of 37 classes, in any order")
    yield Sample(mapped(37, 5, sizes=(30,)), {"beta": 1.0}, why="a reduced vocabulary")
    yield Sample(with_topk(mapped(37, 5, sizes=(30,)), (4,)), {"chunk_size": 2}, why="a reduced one, and top-k")
    yield Sample(given(37, 0), why="no tokens: NaN")
    yield Sample(given(37, 5), {"labels": make.ignored(5), "ce_weight": 1.0}, why="no token counts: NaN")
    heads = [randn(20, 37).t(), randn(37, 8)]
    ids, logprobs = (each.t() for each in randn(37, 5).float().log_softmax(0).topk(3, 0)[::-1])
    strided = randn(12, 5).t(), randn(12, 37).t(), [randn(20, 5).t(), randn(5, 8)], heads, [], []
    kwargs = {"labels": make.classes(37, 5).int()}
    yield Sample((*strided, [ids.int()], [logprobs]), kwargs, why="strided, int32")
    yield Sample(given(9_000, 2), {"beta": 0.9}, why="9,000 classes: whole blocks and a part")


def fused_linear_distill_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    make = Make(device, dtype)
    top = make.randn(rows, 40).float().log_softmax(-1).topk(3)
    teachers = [make.randn(rows, n) for n in (24, 8)], [make.randn(40, n) for n in (24, 8)], [], [], [top[1]], [top[0]]
    return Sample((make.randn(rows, 16), make.randn(40, 16), *teachers), {"chunk_size": 32}, why="resized")


def fused_linear_distill_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    (N, H, V), make = (4096, 4096, 128256), Make(device, dtype)
    for D in (2, 3):
        x, *teachers = (make.randn(N, H) for _ in range(1 + D))
        weight, *heads = (make.randn(V, H) / H**0.5 for _ in range(1 + D))
        yield Sample((x, weight, teachers, heads, [], [], [], []), why=f"{N}x{H}x{V}, {D} teachers")


def fused_linear_distill_cost(
    input: Tensor, linear_weight: Tensor, teacher_input: Sequence[Tensor], teacher_linear_weight: Sequence[Tensor],
    teacher_linear_bias: Sequence[Tensor], vocab_map: Sequence[Tensor], teacher_ids: Sequence[Tensor],
    teacher_logprobs: Sequence[Tensor], **options: Any,
) -> Cost:  # fmt: skip
    student = linear_cost(input, linear_weight)
    teachers = [linear_cost(*each) for each in zip(teacher_input, teacher_linear_weight, strict=True)]
    read, flops = sum(each.bytes_forward for each in teachers), sum(each.flops_forward for each in teachers)
    read += sum(each.numel() * each.element_size() for each in (*teacher_ids, *teacher_logprobs))
    return Cost(
        student.bytes_forward + read,
        student.bytes_full + read,
        student.flops_forward + flops,
        student.flops_full + flops,
    )


@public_op(
    reference=fused_linear_distill_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS.kernel_ops,
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
    teacher_ids: Sequence[Tensor],
    teacher_logprobs: Sequence[Tensor],
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
    add_tail: bool = True,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    skip_ignored: bool = False,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_linear_jsd` from several teachers to one student, whose logits are made once, with its cross entropy.

    A teacher is given by its hidden states and projection, or by its log-probabilities of K classes of each token, as
    `linear_topk` returns them and a disk keeps them: the lists of either kind may be empty. The D teachers are those
    with hidden states, and then the others; weights and results have that order.

    No model's logits are ever held whole, and those of one teacher at a time. The gradients that are wanted are made in
    the forward pass, in three products and one for each teacher with hidden states; no teacher gets one. Under autocast
    all linear layers run in its dtype.

    Args:
        input: The student's hidden states `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        teacher_input: The hidden states `[..., H']` of each teacher, dtype of `input`; each has its own H'.
        teacher_linear_weight: `[V', H']` of each teacher, dtype of `input`. V' is V without a map.
        teacher_linear_bias: `[V']` of each teacher, dtype of `input`; an empty list for none of any.
        vocab_map: The student's class of each of a teacher's, int64 `[V']`, all different and in any order, for a
            vocabulary that is reduced or permuted; `[0]` for a teacher that has the student's, an empty list where all
            have. The student's softmax for that teacher is over these classes.
        teacher_ids: The student's classes `[..., K]` of each other teacher, int64 or int32, those of a token all
            different; each has its own K, and all at most 1024. A negative one, such as -1, is not there.
        teacher_logprobs: `[..., K]` of each, float32, float16 or bfloat16, at the student's `temperature`. That of a
            class that is not there is not read; -inf says the same.
        labels: `[...]`, int64 or int32; tokens whose label is not `ignore_index` count. None for all. With a
            `ce_weight` they are the targets of the cross entropy.
        linear_bias: `[V]`, dtype of `input`.
        teacher_weight: The factor of each teacher's divergence, `[D]`, or `[..., D]` for one of each token; None for 1.
            The means do not divide by it.
        beta: From 0 to 1, as in `jsd`: 0 is KL(teacher || student), 1 KL(student || teacher).
        ce_weight: Weight of the cross entropy, at temperature 1, the mean over the tokens that count; 0 for none.
        temperature: Divides the student's logits, after the cap; positive. The loss is not multiplied by its square.
        teacher_temperature: The same for each teacher's logits; None for the student's.
        softcap: The student's logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        teacher_softcap: The same for each teacher's logits; None for none of any.
        add_tail: A teacher's K classes, and the student's probabilities of them, are completed by a class more that has
            what they leave, 1 - their sum; False normalizes over the K classes.
        row_weight: Weight `[...]` of each token's divergences, of all teachers alike; the means divide by its sum over
            the tokens that count, whether or not a teacher has a class there. None for 1.
        ignore_index: See `labels`.
        skip_ignored, chunk_size, logits_dtype: As in `fused_linear_jsd`.

    Returns:
        The loss, a float32 scalar: the sum of the teachers' mean divergences, each times its weight, and of `ce_weight`
        times the cross entropy. And detached: these divergences `[D]`, and the cross entropy, 0 without a `ce_weight`.
        Over no token all of it is NaN. A token of which a top-k teacher has no class has the divergence 0 from it.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device, the length of a list or an option does not fit.
        IndexError: On the CPU, with a `ce_weight`, a label is neither a class nor `ignore_index`, or an id of a map or
            of a top-k teacher is no class. On a GPU it makes the loss NaN, as do a map's ids that are not different.
        NotImplementedError: A tensor of a teacher, or a weight of tokens or teachers, requires a gradient.

    Sources: Hinton et al., 2015, https://arxiv.org/abs/1503.02531; Agarwal et al., 2023,
    https://arxiv.org/abs/2306.13649; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    check_number("ce_weight", ce_weight, 0.0, LARGEST, "a finite number that is not negative")
    check_positive("temperature", temperature)  # before it is the teachers'
    if ce_weight > 0 and labels is None:
        raise ValueError(f"labels: expected class indices for a ce_weight of {ce_weight}, got None")
    D = len(teacher_input)
    call = _checked_call(
        {
            **locals(),
            "teacher_weight": _checked_teacher_weight(teacher_weight, input, D + len(teacher_ids)),
            "teacher_temperature": [temperature] * D if teacher_temperature is None else teacher_temperature,
            "teacher_softcap": [0.0] * D if teacher_softcap is None else teacher_softcap,
            "skip_ignored": skip_ignored and labels is not None,
        }
    )
    loss, divergences, nll, *_ = KERNEL_OPS.forward(call, False)
    return loss, divergences, nll


LISTS = {
    "teacher_linear_weight": "teacher_input",
    "teacher_linear_bias": "teacher_input",
    "vocab_map": "teacher_input",
    "teacher_temperature": "teacher_input",
    "teacher_softcap": "teacher_input",
    "teacher_logprobs": "teacher_ids",
}
"""The lists that have one entry for each of another list, by name."""
OR_NONE = ("teacher_linear_bias", "vocab_map")
"""Those that may be empty."""


def _checked_call(arguments: Mapping[str, Any]) -> TeachersCall:
    """Check the arguments and return the call.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device, a list's length or an option does not fit.
    """
    D = len(arguments["teacher_input"])
    if D == 0 and len(arguments["teacher_ids"]) == 0:
        raise ValueError("teacher_input: expected the hidden states of at least one teacher, or teacher_ids, got none")
    for name, other in LISTS.items():
        found, wanted, may_be_empty = len(arguments[name]), len(arguments[other]), name in OR_NONE
        if found != wanted and not (may_be_empty and found == 0):
            none = " or none" if may_be_empty else ""
            raise ValueError(f"{name}: expected {wanted}{none}, one for each of {other}, got {found}")
    teachers = [checked_teacher(_of_teacher(arguments, i), [f"{name}[{i}]" for name in TEACHER]) for i in range(D)]
    inputs, weights, biases = ([each[n] for each in teachers] for n in range(3))
    layers = dict(zip(TEACHER, (inputs, weights, biases if arguments["teacher_linear_bias"] else []), strict=True))
    call = TeachersCall.checked({**arguments, **layers})
    for i, teacher in enumerate(call.teachers):
        _check_teacher(call, i, teacher)
    for i, (ids, logprobs) in enumerate(zip(call.teacher_ids, call.teacher_logprobs, strict=True)):
        _check_topk(call, i, ids, logprobs)
    classes = sum(each.shape[-1] for each in call.teacher_ids)
    if classes > MOST_CLASSES:
        raise ValueError(f"teacher_ids: expected at most {MOST_CLASSES} classes of a token in all, got {classes}")
    check_call(call)
    return call


def _of_teacher(arguments: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the tensors of one of several teachers by their names; a bias may be None."""
    return {f"{name}[{i}]": arguments[name][i] if arguments[name] else None for name in TEACHER}


def _check_teacher(call: TeachersCall, i: int, teacher: Teacher) -> None:
    names = f"teacher_input[{i}]", f"teacher_linear_weight[{i}]"
    classes = teacher.linear_weight.shape[0]
    if teacher.vocab_map is not None:
        ids = teacher.vocab_map
        meaning = f"one for each class of {names[1]}"
        check_parameter(f"vocab_map[{i}]", ids, (classes,), meaning, "input", call.input, (torch.int64,))
        classes = call.num_classes
    check_teacher_fits(call, names[0], teacher.input, names[1], classes, call.num_classes)
    check_positive(f"teacher_temperature[{i}]", teacher.temperature)
    check_switch(f"teacher_softcap[{i}]", teacher.softcap)


def _check_topk(call: TeachersCall, i: int, ids: Tensor, logprobs: Tensor) -> None:
    names, tokens, shape = (f"teacher_ids[{i}]", f"teacher_logprobs[{i}]"), tuple(call.tokens), tuple(ids.shape)
    check_dtype(names[0], ids, (torch.int64, torch.int32))
    if len(shape) != len(tokens) + 1 or shape[:-1] != tokens or shape[-1] == 0:
        raise ValueError(f"{names[0]}: expected shape {tokens} and at least one class for each token, got {shape}")
    check_same(names[0], ids, "input", call.input)
    check_parameter(names[1], logprobs, shape, f"that of {names[0]}", "input", call.input)


def _checked_teacher_weight(teacher_weight: Tensor | None, input: Tensor, D: int) -> Tensor | None:
    """Check the weights `[D]` or `[..., D]` of D teachers and return the latter."""
    if teacher_weight is None:
        return None
    check_dtype("teacher_weight", teacher_weight)
    shape = (*input.shape[:-1], D)
    if teacher_weight.shape != shape and teacher_weight.shape != (D,):
        got = tuple(teacher_weight.shape)
        raise ValueError(f"teacher_weight: expected shape {(D,)} or {shape}, one for each teacher, got {got}")
    check_same("teacher_weight", teacher_weight, "input", input)
    return teacher_weight.expand(shape)
