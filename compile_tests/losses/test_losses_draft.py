"""`llmk.losses.draft` against a composition in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_calls import numbers
from compile_tests.helpers.loss_references import LossOp, batch, loss_op, token_scores
from compile_tests.helpers.right_calls import require_call
from llmk import losses
from llmk.accuracy.rule import accuracy_violation
from llmk.registry import Sample

V, CLASSES = 37, 50


def three_steps(
    input: Tensor, linear_weight: Tensor, target: Tensor, second: Tensor, third: Tensor, teacher_input: Tensor,
    teacher_linear_weight: Tensor, **options: Any,
) -> Any:  # fmt: skip
    steps = [input, second, third]
    return losses.draft(steps, linear_weight, target, teacher_input, teacher_linear_weight, **options)


def three_steps_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, second: Tensor, third: Tensor, teacher_input: Tensor,
    teacher_linear_weight: Tensor, *, vocab_map: Tensor, position_decay: float = 1.0, temperature: float = 1.0,
    token_weights: Tensor | None = None, num_items_in_batch: float | None = None, sequence_ids: Tensor | None = None,
    teacher_linear_bias: Tensor | None = None, teacher_logit_scale: float = 1.0, softcap: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """A token and a step at a time."""
    bias = None if teacher_linear_bias is None else teacher_linear_bias[vocab_map].detach()
    t = token_scores(
        teacher_input.detach(), teacher_linear_weight[vocab_map].detach(), linear_bias=bias,
        logit_scale=teacher_logit_scale, temperature=temperature,
    ).exp()  # fmt: skip
    B, S = target.shape
    total = t.new_zeros(())
    for k, x in enumerate((input, second, third)):
        q = token_scores(x, linear_weight, softcap=softcap, temperature=temperature)
        each, weights = t.new_zeros(()), t.new_zeros(())
        for b in range(B):
            for s in range(S - k):
                apart = sequence_ids is not None and sequence_ids[b, s] != sequence_ids[b, s + k]
                if target[b, s + k] != -100 and not apart:
                    weight = 1.0 if token_weights is None else token_weights[b, s + k].to(t.dtype)
                    each, weights = each - weight * (t[b, s + k] * q[b, s]).sum(), weights + weight
        total = total + position_decay**k * each / (num_items_in_batch or weights)
    return total


FIELDS: dict[str, Any] = vars(loss_op(three_steps, three_steps_reference))
FIELDS["differentiable"] = ("input", "second", "third", "linear_weight")
DRAFT = LossOp(**FIELDS)


def given(device: torch.device, lengths: list[int], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    x, weight, target = batch(lengths, device, dtype)
    others = (0.5 * x + 1, -x, numbers(*target.shape, 9), numbers(CLASSES, 9))
    ids = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(0))[:V].sort().values
    return (x, weight, target, *(other.to(device, dtype) for other in others)), ids.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps(device: torch.device, dtype: torch.dtype) -> None:
    args, ids = given(device, [5, 3, 6, 4], dtype)
    kwargs: dict[str, Any] = {"vocab_map": ids, "position_decay": 0.8}
    require_call(DRAFT, Sample(args, kwargs, why="plain"))
    kwargs |= {"token_weights": torch.rand(args[2].shape).to(device), "num_items_in_batch": 23.0, "temperature": 1.5}
    kwargs |= {"teacher_linear_bias": numbers(CLASSES).to(device, dtype), "teacher_logit_scale": 0.5, "softcap": 5.0}
    require_call(DRAFT, Sample(args, kwargs, why="every option"))


def test_packed(device: torch.device) -> None:
    """No step leaves its sequence."""
    args, vocab_map = given(device, [9], torch.float32)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]], device=device)
    kwargs = {"vocab_map": vocab_map, "sequence_ids": ids, "skip_ignored": True}
    require_call(DRAFT, Sample(args, kwargs, why="packed"))


def test_steps_past_the_end_and_no_token(device: torch.device) -> None:
    (x, weight, target, *_, teacher, head), ids = given(device, [1, 1], torch.float32)
    x, weight = x[:, :1].clone().requires_grad_(), weight.requires_grad_()
    for labels in (target[:, :1], torch.full_like(target[:, :1], -100)):
        loss, metrics = losses.draft([x] * 3, weight, labels, teacher[:, :1], head, vocab_map=ids)
        assert loss == metrics["loss/step_0"]
        assert metrics["loss/step_1"] == metrics["loss/step_2"] == 0
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (x, weight)))
    assert loss == 0


def test_divergence_from_itself_is_none() -> None:
    """The cross entropy of a draft that is the target model is the entropy."""
    x, weight, target = batch([4, 3], torch.device("cpu"))
    loss, metrics = losses.draft(x, weight, target, x, weight)
    p = (x @ weight.t()).log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)[target != -100].mean()
    torch.testing.assert_close(loss, entropy)
    assert abs(float(metrics["divergence/step_0"])) < 1e-6


X, W, T, TX, TW = (
    numbers(2, 3, 8),
    numbers(4, 8),
    torch.tensor([[1, 2, -100], [0, 1, 3]]),
    numbers(2, 3, 5),
    numbers(9, 5),
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_map": torch.tensor([0, 3, 2, 5])}, "vocab_map: expected ascending classes, each once"),
        ({"vocab_map": torch.tensor([0, 3, 3, 5])}, "vocab_map: expected ascending classes, each once"),
        ({"vocab_map": torch.tensor([0, 3, 5, 9])}, r"vocab_map: expected classes in \[0, 9\), got 0 to 9"),
        ({}, "teacher_linear_weight: expected the classes of linear_weight, 4"),
        ({"input": []}, "input: expected the hidden states of at least one step"),
    ],
)
def test_a_wrong_call_names_the_argument(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"input": X, "teacher_input": TX} | wrong
    with pytest.raises(ValueError, match=message):
        losses.draft(linear_weight=W, target=T, teacher_linear_weight=TW, **arguments)


@pytest.mark.parametrize(
    ("ids", "is_valid"), [([0, 3, 5, 99], False), ([-1, 3, 4, 5], False), ([0, 3, 2, 5], False), ([0, 3, 5, 8], True)]
)
def test_a_map_that_the_host_does_not_look_at(ids: list[int], is_valid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is NaN in a graph, as on a GPU."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    loss, _ = losses.draft(X, W, T, TX, TW, vocab_map=torch.tensor(ids))
    assert loss.isfinite() == is_valid


def test_a_class_may_be_the_index_to_ignore() -> None:
    """Tokens count as with an index that no class has, in the target model's entropy too."""
    x, weight, target = numbers(2, 5, 8), numbers(11, 8), torch.arange(10).view(2, 5) % 4
    teacher = numbers(2, 5, 6), numbers(11, 6)
    found, metrics = losses.draft(x, weight, target, *teacher, ignore_index=0)
    masked = target.masked_fill(target == 0, -100)
    right, right_metrics = losses.draft(x, weight, masked, *teacher)
    assert torch.equal(found, right)
    assert torch.equal(metrics["loss/step_0"], right_metrics["loss/step_0"])

    def plain(dtype: torch.dtype) -> Tensor:
        log_q, log_p = (token_scores(*(x.to(dtype) for x in each)) for each in ((x, weight), teacher))
        return -(log_p.exp() * log_q).sum(-1)[target != 0].mean()

    assert accuracy_violation(found, plain(torch.float32), plain(torch.float64)) is None
