"""`llmk.losses` of single tokens, against compositions in float64 written from the papers."""

import pytest
import torch

from compile_tests.helpers.loss_ops import DFT, DISTILL, HEADS, SFT, TOPK
from compile_tests.helpers.loss_references import batch
from llmk import losses
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import Op, Sample

LENGTHS = [5, 1, 7, 0, 4]


def require(op: Op, sample: Sample) -> None:
    """The rule of accuracy for the loss and its gradients."""
    require_accurate(op, sample, call(op, sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sft(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, target = batch(LENGTHS, device, dtype)
    require(SFT, Sample((x, weight, target), {}, why="plain"))
    kwargs = {"token_weights": torch.rand(target.shape).to(device), "entropy_coef": 0.2, "num_items_in_batch": 7.0}
    require(SFT, Sample((x, weight, target), kwargs, why="everything"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dft(device: torch.device, dtype: torch.dtype) -> None:
    require(DFT, Sample(batch(LENGTHS, device, dtype), {"temperature": 0.7}, why="dft"))


@pytest.mark.parametrize("add_tail", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distill_topk(device: torch.device, beta: float, add_tail: bool) -> None:
    x, weight, target = batch(LENGTHS, device)
    teacher = torch.randn(*target.shape, 37).log_softmax(-1).topk(4)
    ids, logprobs = teacher.indices.to(device), teacher.values.to(device)
    ids[0, :, 2:], logprobs[2, :, 3], ids[4] = -100, float("-inf"), -100
    kwargs = {"beta": beta, "add_tail": add_tail, "token_weights": torch.rand(target.shape).to(device)}
    require(TOPK, Sample((x, weight, target, ids, logprobs), kwargs, why="weights"))
    kwargs = {"beta": beta, "add_tail": add_tail, "ce_weight": 0.4, "temperature": 1.7}
    require(TOPK, Sample((x, weight, target, ids, logprobs), kwargs, why="with cross entropy"))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distill(device: torch.device, beta: float) -> None:
    x, weight, target = batch(LENGTHS, device)
    args = (x, weight, target, torch.randn(*target.shape, 7).to(device), torch.randn(37, 7).to(device))
    require(DISTILL, Sample(args, {"beta": beta, "ce_weight": 0.4, "temperature": 1.7}, why="with cross entropy"))
    weights = torch.rand(target.shape).to(device)
    require(DISTILL, Sample(args, {"beta": beta, "token_weights": weights}, why="weights"))


def test_several_heads(device: torch.device) -> None:
    x, weight, target = batch(LENGTHS, device)
    options = {"head_weights": [1.0, 0.3], "z_loss": 1e-2}
    y = torch.randn_like(x)
    require(HEADS, Sample((x, y, weight, target), options, why="two heads"))
    for num_items in (41.0, [41.0, torch.tensor(37, device=device)]):
        require(
            HEADS, Sample((x, y, weight, target), options | {"num_items_in_batch": num_items}, why="items of a step")
        )


def test_no_token_gives_zero(device: torch.device) -> None:
    x, weight, target = batch([0, 0], device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    ids = torch.zeros(*target.shape, 2, dtype=torch.int64, device=device)
    for loss, _ in (
        losses.sft(x, weight, target, entropy_coef=0.1),
        losses.dft(x, weight, target),
        losses.distill(x, weight, target, x.detach(), weight.detach() + 1, ce_weight=0.5),
        losses.distill_topk(x, weight, target, ids, ids - 1.0, ce_weight=0.5),
        losses.multi_token([x], weight, [target]),
    ):
        assert loss == 0
        assert not any(of.any() for of in torch.autograd.grad(loss, (x, weight)))
