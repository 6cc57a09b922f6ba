"""`llmk.losses.distill` from several teachers, against compositions in float64 and TRL's code."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_calls import numbers
from compile_tests.helpers.loss_references import batch, logps_of
from compile_tests.helpers.right_calls import require_call
from compile_tests.helpers.supervised_references import SEVERAL_TEACHERS, several_teachers_reference
from llmk import losses
from llmk.functional import fused_linear_distill
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import Sample
from llmk.registry.devices import INTERPRET

LENGTHS = [5, 1, 7, 0, 4]
V = 37


def given(device: torch.device, lengths: list[int] = LENGTHS, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Student, target, and two teachers of other sizes, the first of which has a bias."""
    x, weight, target = batch(lengths, device, dtype)
    first = numbers(*target.shape, 5), numbers(V, 5), numbers(V)
    second = numbers(*target.shape, 9), numbers(V, 9), None
    teachers = (None if each is None else each.to(device, dtype) for each in (*first, *second))
    return x, weight, target, *teachers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_two_teachers(device: torch.device, beta: float, dtype: torch.dtype) -> None:
    args = given(device, dtype=dtype)
    weights = torch.rand(*args[2].shape, 2).to(device, dtype)
    kwargs: dict[str, Any] = {"beta": beta, "teacher_weight": weights, "ce_weight": 0.4, "chunk_size": 7}
    caps = {"softcap": 4.0, "teacher_softcap": [3.0, 0.0], "temperature": 1.7, "teacher_temperature": [2.0, 0.5]}
    require_accurate(
        SEVERAL_TEACHERS,
        sample := Sample(args, kwargs | caps, why="heads of their own"),
        call(SEVERAL_TEACHERS, sample),
    )
    items = {"token_weights": torch.rand(args[2].shape).to(device), "num_items_in_batch": 41.0}
    scales = {"teacher_weight": weights[0, 0], "teacher_logit_scale": [1.0, 0.5]}
    sample = Sample(args, kwargs | items | scales, why="items of a step")
    require_call(SEVERAL_TEACHERS, sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_teacher_with_weights_and_items(device: torch.device, dtype: torch.dtype) -> None:
    """The divergence and the cross entropy have denominators of their own."""
    x, weight, target, *teacher = given(device, dtype=dtype)[:6]
    options: dict[str, Any] = {"ce_weight": 0.4, "num_items_in_batch": 41.0}
    tokens = torch.rand(target.shape).to(device)
    found, metrics = losses.distill(
        x, weight, target, *teacher[:2], teacher_linear_bias=teacher[2], token_weights=tokens, **options
    )
    double = [each.double() if each.is_floating_point() else each for each in (x, weight, target, *teacher)]
    right = several_teachers_reference(*double, token_weights=tokens, **options)
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["divergence"] + 0.4 * metrics["nll_loss"], found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_reduced_and_permuted_vocabularies(device: torch.device, beta: float) -> None:
    """The loss is that of the student with the rows of its head that a teacher has, in the teacher's order."""
    x, weight, target, x1, _, _, x2, w2, _ = given(device)
    reduced, permuted = torch.randperm(V, device=device)[:11], torch.randperm(V, device=device)
    w1 = numbers(11, 5).to(device)
    options: dict[str, Any] = {"beta": beta, "temperature": 1.4}

    def results(dtype: torch.dtype, loss: Any) -> list[Tensor]:
        a, b = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        found = loss(a, b)
        return [found.detach(), *torch.autograd.grad(found, (a, b))]

    def right(a: Tensor, b: Tensor) -> Tensor:
        teachers = ((x1, w1, reduced), (x2, w2, permuted), (x2, w2, torch.arange(V, device=device)))
        each = [
            several_teachers_reference(a, b[ids], target, t.to(a.dtype), w.to(a.dtype), None, **options)
            for t, w, ids in teachers
        ]
        return sum(each) - 0.3 * torch.cat(logps_of(a, b, target)).mean()  # type: ignore[return-value]

    def ours(a: Tensor, b: Tensor) -> Tensor:
        maps = [reduced, permuted, None]
        return losses.distill(a, b, target, [x1, x2, x2], [w1, w2, w2], vocab_map=maps, ce_weight=0.3, **options)[0]

    for found, exact in zip(results(torch.float32, ours), results(torch.float64, right), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6 * float(exact.abs().max()))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 5, 11], IndexError, r"vocab_map\[0\]: expected classes in \[0, 11\), got 0 to 11"),
        ([-1, 5, 3], IndexError, r"vocab_map\[0\]: expected classes in \[0, 11\), got -1 to 5"),
        ([4, 5, 4], ValueError, r"vocab_map\[0\]: expected different classes"),
    ],
)
def test_a_map_that_is_none(device: torch.device, ids: list[int], error: Any, message: str) -> None:
    """The host says so; on a GPU the loss is NaN."""
    x, weight = (tensor.clone().to(device).requires_grad_() for tensor in (X, W))
    teacher, head, ids_tensor = x.detach(), weight.detach()[:3], torch.tensor(ids, device=device)

    def loss() -> Tensor:
        return fused_linear_distill(x, weight, [teacher], [head], [], [ids_tensor], [], [])[0]

    if device.type == "cpu" and not INTERPRET:
        with pytest.raises(error, match=message):
            loss()
    else:
        found = loss()
        found.backward()
        assert found.isnan()


def test_masks_drawn(device: torch.device) -> None:
    """One row, several, packed into one, any tokens masked; skipped or not, in chunks of any size."""
    pytest.importorskip("hypothesis")
    from hypothesis import given as drawn
    from hypothesis import settings
    from hypothesis import strategies as st

    @settings(max_examples=15, deadline=None)
    @drawn(
        st.lists(st.booleans(), min_size=1, max_size=12), st.booleans(), st.booleans(), st.integers(1, 3),
        st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 5),
    )  # fmt: skip
    def check(counts: list[bool], packed: bool, skip: bool, teachers: int, beta: float, chunk_size: int) -> None:
        shape = (1, len(counts)) if packed else (len(counts), 1)
        target = torch.where(torch.tensor(counts).view(shape), 3, -100).to(device)
        models = [each for i in range(teachers) for each in (numbers(*shape, 8 + i), numbers(11, 8 + i), None)]
        moved = [None if each is None else each.to(device) for each in (numbers(*shape, 8), numbers(11, 8), *models)]
        options = {"beta": beta, "skip_ignored": skip, "chunk_size": chunk_size, "ce_weight": 0.5}
        sample = Sample((*moved[:2], target, *moved[2:]), options, why="drawn")
        if any(counts):
            require_call(SEVERAL_TEACHERS, sample)
        else:
            outcome = call(SEVERAL_TEACHERS, sample)
            assert outcome.outputs[0] == 0
            assert not any(grad is None or grad.any() for grad in outcome.gradients.values())

    check()


X, W, T = numbers(2, 3, 8), numbers(11, 8), torch.tensor([[1, 2, -100], [0, 10, 4]])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"teacher_input": [], "teacher_linear_weight": []}, ValueError, "teacher_input: .* at least one teacher"),
        ({"teacher_linear_weight": [W, W[:9]]}, ValueError, r"teacher_linear_weight\[1\]: expected .*, got 9"),
        ({"teacher_input": [X, X.half()]}, TypeError, r"teacher_(input|linear_weight)\[1\]: expected dtype"),
        ({"teacher_temperature": [1.0, 0.0]}, ValueError, r"teacher_temperature\[1\]: expected a finite pos"),
        ({"teacher_softcap": [1.0, -1.0]}, ValueError, r"teacher_softcap\[1\]: expected"),
        ({"vocab_map": [None, T[0]]}, ValueError, r"vocab_map\[1\]: expected shape \(11,\)"),
        ({"vocab_map": [None, W[:, 0]]}, TypeError, r"vocab_map\[1\]: expected a tensor of dtype int64"),
        ({"ce_weight": -1.0}, ValueError, "ce_weight: expected"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_wrong_call_names_the_argument(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"teacher_input": [X, X], "teacher_linear_weight": [W, W]} | wrong
    with pytest.raises(error, match=message):
        losses.distill(X, W, T, **arguments)


def test_an_operator_refuses() -> None:
    with pytest.raises(NotImplementedError, match="teacher_linear_weight"):
        fused_linear_distill(X, W, [X], [W.clone().requires_grad_()], [], [], [], [])
    with pytest.raises(ValueError, match="labels: expected class indices for a ce_weight"):
        fused_linear_distill(X, W, [X], [W], [], [], [], [], ce_weight=1.0)
