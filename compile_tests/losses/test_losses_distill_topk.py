"""`llmk.losses.distill` from teachers with hidden states and teachers by their top-k, in one call."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.helpers.loss_calls import numbers
from compile_tests.helpers.loss_references import batch
from compile_tests.helpers.right_calls import require_call
from compile_tests.helpers.supervised_references import SEVERAL_TEACHERS, several_teachers
from llmk import losses
from llmk.functional import fused_linear_distill, linear_topk
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.objectives.preference import log1mexp
from llmk.ops.linear_loss.objectives.topk_divergence import topk_divergence
from llmk.registry import Sample, gradient_of
from llmk.registry.devices import INTERPRET

LENGTHS = [5, 1, 7, 0, 4]
V = 37


def topk(tokens: torch.Size, K: int) -> tuple[Tensor, Tensor]:
    """Classes and log-probabilities `[B, S, K]`, some absent, in both ways, and all of one sequence's."""
    logprobs, ids = (2 * numbers(*tokens, V + K)[..., K:]).log_softmax(-1).topk(K)
    ids[0, :, K // 2 :], logprobs[2, :, -1], ids[4] = -1, float("-inf"), -100
    return ids, logprobs


def given(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Student, target, two teachers with hidden states, and two by classes."""
    x, weight, target = batch(LENGTHS, device, dtype)
    hidden = numbers(*target.shape, 5), numbers(V, 5), None, numbers(*target.shape, 9), numbers(V, 9), None
    first, second = topk(target.shape, 4), topk(target.shape, 7)
    moved = [each if each is None else each.to(device, dtype) for each in hidden]
    moved += [each.to(device) for each in (*first, *second)]
    return x, weight, target, *moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_teachers_of_both_kinds(device: torch.device, beta: float, add_tail: bool, dtype: torch.dtype) -> None:
    args = given(device, dtype)
    tokens = args[2].shape
    weights = torch.rand(*tokens, 4).to(device)
    kwargs: dict[str, Any] = {"beta": beta, "add_tail": add_tail, "teacher_weight": weights, "chunk_size": 7}
    more = {"ce_weight": 0.4, "temperature": 1.7, "softcap": 5.0, "logit_scale": 0.7, "skip_ignored": True}
    require_accurate(
        SEVERAL_TEACHERS,
        sample := Sample(args, kwargs | more, why="with cross entropy"),
        call(SEVERAL_TEACHERS, sample),
    )
    more = {"token_weights": torch.rand(tokens).to(device), "ce_weight": 0.4}
    require_call(SEVERAL_TEACHERS, Sample(args, kwargs | more, why="weights"))
    more |= {"num_items_in_batch": 41.0}
    require_call(SEVERAL_TEACHERS, Sample(args, kwargs | more, why="items of a step"))


def test_one_of_each_kind(device: torch.device) -> None:
    """The loss is the sum of one without lists and one by the classes that `linear_topk` finds."""
    x, weight, target, x1, w1, _, x2, w2, *_ = given(device)
    logprobs, ids, _ = linear_topk(x2, w2, 6)
    loss, metrics = losses.distill(x, weight, target, x1, w1, teacher_ids=ids.int(), teacher_logprobs=logprobs)
    first, _ = losses.distill(x, weight, target, x1, w1)
    second, _ = losses.distill_topk(x, weight, target, ids, logprobs)
    torch.testing.assert_close(loss, first + second)
    torch.testing.assert_close([metrics[f"divergence/teacher_{i}"] for i in range(2)], [first.detach(), second])


def test_products(device: torch.device) -> None:
    """Three, and one for each teacher with hidden states."""
    x, target = numbers(6, 16).to(device).requires_grad_(), torch.arange(6, device=device)
    weight = numbers(V, 16).to(device).requires_grad_()
    inputs, heads = ([numbers(n, 16).to(device) + i for i in range(2)] for n in (6, V))
    logprobs, ids = (each.to(device) for each in numbers(6, V).log_softmax(-1).topk(5))

    def products(D: int) -> float:
        with FlopCounterMode(display=False) as counter:
            classes = [ids, ids + 0], [logprobs, logprobs + 0]
            lists = inputs[:D], heads[:D], [], [], *classes
            fused_linear_distill(x, weight, *lists, labels=target, ce_weight=1.0)[0].backward()
        return counter.get_total_flops() / (2 * 6 * 16 * V)

    assert [products(D) for D in range(3)] == [3, 4, 5]


def divergence(student: Tensor, teacher: Tensor, present: Tensor, beta: float, add_tail: bool) -> Tensor:
    """Compute the divergence with what the student's classes leave for its tail."""
    total = torch.where(present, student, -1e4).clamp(min=-1e4).logsumexp(-1)
    return topk_divergence(student, teacher, present, beta, log1mexp(total) if add_tail else None)


def slope(student: Tensor, *rest: Any) -> Tensor:
    _, (grad,) = gradient_of(lambda student: divergence(student, *rest).sum(), student)
    assert grad is not None
    return grad


@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.3, 1 - 1e-6])
def test_a_beta_near_an_end_keeps_the_digits(beta: float, add_tail: bool) -> None:
    """A divergence is near 0 there, and the logarithm of the mixture near that of the larger part."""
    student, teacher = (numbers(50, 9 + n).log_softmax(-1)[:, :5] for n in range(2))
    present = torch.ones(50, 5, dtype=torch.bool)
    found, exact = (
        [fn(each[0], each[1], present, beta, add_tail) for fn in (divergence, slope)]
        for each in ((student, teacher), (student.double(), teacher.double()))
    )
    # A unit in the last place of the probabilities is as large a part of the tail as this is small.
    smallest = float(min((1 - each.exp().sum(-1)).min() for each in (student, teacher))) if add_tail else 1.0
    bound = 8 * torch.finfo(torch.float32).eps / smallest
    for ours, right in zip(found, exact, strict=True):
        assert (ours - right).abs().max() <= bound * right.abs().max()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_absent_classes_beside_rare_ones(beta: float) -> None:
    """Normalized over the classes that are there, whatever is left of their probabilities, they have all of it."""
    student, teacher = (numbers(2, 3 + n).double()[:, :3] for n in range(2))
    present = torch.tensor([True, False, True])
    right = divergence(student, teacher, present.expand(2, 3), beta, False)
    found = divergence(student - 300, teacher - 200, present.expand(2, 3), beta, False)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_a_class_that_the_student_rules_out(beta: float, add_tail: bool) -> None:
    """The divergence is finite, and so is its gradient."""
    student, teacher = (numbers(1, 3 + n)[:, :3].log_softmax(-1) - 1 for n in range(2))
    student[0, 1] = float("-inf")
    present = torch.ones(1, 3, dtype=torch.bool)
    loss = divergence(student, teacher, present, beta, add_tail)
    almost = divergence(student.clamp(min=-60), teacher, present, beta, add_tail)
    if beta < 1.0:  # of a class without probability it is 0 * log(0), and where the mixture has the teacher alone
        torch.testing.assert_close(loss, almost)
    assert loss.isfinite().all()
    assert slope(student, teacher, present, beta, add_tail).isfinite().all()


def test_a_teacher_may_rule_classes_out() -> None:
    """KL(s, t) grows with the logarithm of a probability that is 0 in any dtype; that of KL(t, s) is infinite."""
    student, present = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    rare = torch.tensor([[-1.0, -1e30]])
    right = (-2.0 + 1e30) * torch.tensor(-2.0).exp()
    torch.testing.assert_close(divergence(student, rare, present, 1.0, True), right.expand(1))
    ruled_out = torch.tensor([[-1.0, float("-inf")]])
    assert divergence(ruled_out, student, present, 0.0, True).isinf().all()


def test_what_is_absent_is_not_read(device: torch.device) -> None:
    """Log-probabilities of absent classes and of tokens that do not count, and such tokens' ids."""
    x, weight, target, *teachers = given(device)
    ids, logprobs = teachers[6:8]

    def results(ids: Tensor, logprobs: Tensor) -> list[Tensor]:
        a, b = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss, _ = several_teachers(a, b, target, *teachers[:6], ids, logprobs, *teachers[8:])
        return [loss.detach(), *torch.autograd.grad(loss, (a, b))]

    ignored = (target == -100).unsqueeze(-1)
    assert ignored.any()
    wrong = ids.masked_fill(ignored, 10**6), logprobs.masked_fill(ignored | (ids < 0), float("nan"))
    for found, right in zip(results(*wrong), results(ids, logprobs), strict=True):
        assert torch.equal(found, right)


X, W, T = numbers(2, 3, 8), numbers(11, 8), torch.tensor([[1, 2, -100], [0, 10, 4]])
IDS, LOGPROBS = T.unsqueeze(-1).repeat(1, 1, 2), numbers(2, 3, 2) - 9


@pytest.mark.kernels
@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_an_index_to_ignore_may_be_a_class(device: torch.device, ce_weight: float) -> None:
    """Targets alone ignore it: 0 is the padding of many pipelines, and a class of the teacher's all the same."""
    x, weight, target = (tensor.clone().to(device) for tensor in (X, W, T))
    target[target == 0] = 5
    ids = torch.tensor([0, 3, -1, 7], device=device).expand(2, 3, 4)
    logprobs = torch.tensor([0.5, 0.2, float("nan"), 0.1], device=device).log().expand(2, 3, 4)

    def of_both(target: Tensor, ignore_index: int, absent: int) -> list[list[Tensor]]:
        given, options = ids.where(ids >= 0, absent), {"ignore_index": ignore_index, "ce_weight": ce_weight}
        calls: list[Callable[..., Any]] = [
            lambda x, w, t: losses.distill_topk(x, w, t, given, logprobs, **options),
            lambda x, w, t: losses.distill(x, w, t, [], [], teacher_ids=given, teacher_logprobs=logprobs, **options),
        ]
        return [loss_and_gradients(call, x, weight, target) for call in calls]

    want = of_both(target, -100, -1)
    assert all(loss > 0 for loss, *_ in want)
    for found in (of_both(target, -100, -100), of_both(target.where(target != -100, 0), 0, -1)):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def loss_and_gradients(call: Callable[..., Any], x: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    loss, _ = call(x, weight, target)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


@pytest.mark.kernels
@pytest.mark.parametrize("wrong", [11, 2**31])
def test_an_id_that_is_no_class(device: torch.device, wrong: int) -> None:
    """The host says so; on a GPU the loss is NaN."""
    x, weight = (tensor.clone().to(device).requires_grad_() for tensor in (X, W))
    ids = IDS.clone()
    ids[1, 2, 1] = wrong
    lists = [[each.to(device) for each in pair] for pair in ((IDS, ids), (LOGPROBS, LOGPROBS))]

    def loss() -> Tensor:
        return fused_linear_distill(x, weight, [], [], [], [], *lists)[0]

    if device.type == "cpu" and not INTERPRET:
        message = rf"teacher_ids\[1\]: expected classes in \[0, 11\), or -1 for none, got {wrong}"
        with pytest.raises(IndexError, match=message):
            loss()
    else:
        found = loss()
        found.backward()
        assert found.isnan()
        assert x.grad is not None
        assert x.grad[1, 2].isnan().all()
        assert not x.grad[0].isnan().any()


@pytest.mark.parametrize(
    ("ids", "logprobs", "error", "message"),
    [
        ([IDS.short()], [LOGPROBS], TypeError, r"teacher_ids\[0\]: expected a tensor of dtype int64, int32, got int16"),
        ([T], [LOGPROBS], ValueError, r"teacher_ids\[0\]: expected shape \(2, 3\) and at least one .*, got \(2, 3\)"),
        ([IDS[:1]], [LOGPROBS], ValueError, r"teacher_ids\[0\]: expected shape \(2, 3\) .*, got \(1, 3, 2\)"),
        ([IDS, IDS], [LOGPROBS, IDS], TypeError, r"teacher_logprobs\[1\]: expected a tensor of dtype float32, float16"),
        ([IDS], [LOGPROBS[..., :1]], ValueError, r"teacher_logprobs\[0\]: expected shape \(2, 3, 2\) \(that of"),
        (
            [IDS.repeat(1, 1, 400)] * 2, [LOGPROBS.repeat(1, 1, 400)] * 2, ValueError,
            "teacher_ids: expected at most 1024 classes of a token in all, got 1600",
        ),
        ([], [], ValueError, "teacher_input: .* at least one teacher, or teacher_ids, got none"),
    ],
)  # fmt: skip
def test_an_operator_refuses(ids: Any, logprobs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fused_linear_distill(X, W, [], [], [], [], ids, logprobs)


def test_a_teacher_gets_no_gradient() -> None:
    moving = LOGPROBS.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="teacher_logprobs"):
        fused_linear_distill(X, W, [], [], [], [], [IDS], [moving])
    loss, _ = losses.distill(X, W.clone().requires_grad_(), T, X, W, teacher_ids=IDS, teacher_logprobs=moving)
    loss.backward()
    assert moving.grad is None


def test_arguments_are_named_as_in_distill_topk() -> None:
    alone, both = (inspect.signature(loss).parameters for loss in (losses.distill_topk, losses.distill))
    assert set(alone) - set(both) == set()


@pytest.mark.parametrize(
    ("nats", "compiled"),
    [
        *((nats, False) for nats in (5.0, 20.0, 40.0)),
        *(pytest.param(nats, True, marks=pytest.mark.breadth) for nats in (5.0, 20.0)),
        (40.0, True),
    ],
)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_sure_of_the_classes(beta: float, nats: float, compiled: bool, device: torch.device) -> None:
    """The tail's probability, down to exp(-40), is made of the logits of its classes."""
    K, ids = 4, torch.arange(4, device=device).expand(1, 3, 4)
    given = torch.tensor([0.4, 0.3, 0.1, 0.1], device=device).log().expand(1, 3, K)
    weight, target = torch.eye(V, device=device), torch.ones(1, 3, device=device, dtype=torch.int64)
    z = numbers(1, 3, V).to(device)
    z[..., :K] += nats

    def ours(x: Tensor) -> Tensor:
        return losses.distill_topk(x, weight, target, ids, given, beta=beta)[0]

    def right(x: Tensor) -> Tensor:
        logprobs, t = x.log_softmax(-1), given.to(x.dtype)
        s = torch.cat((logprobs[..., :K], logprobs[..., K:].logsumexp(-1, keepdim=True)), -1)
        t = torch.cat((t, torch.log1p(-t.exp().sum(-1, keepdim=True))), -1)
        m = torch.log(beta * t.exp() + (1 - beta) * s.exp())
        if beta in (0.0, 1.0):
            p, q = (t, s) if beta == 0.0 else (s, t)
            return (p.exp() * (p - q)).sum(-1).mean()
        return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1).mean()

    x, y = z.clone().requires_grad_(), z.double().requires_grad_()
    loss, want = (torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours)(x), right(y)
    (dx,), (dy,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, y)
    assert abs(loss.double() - want) < 1e-6 * want.abs()
    assert (dx - dy).norm() < 1e-6 * dy.norm()
