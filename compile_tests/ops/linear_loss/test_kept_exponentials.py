"""Exponentials that are kept for a second pass over the tokens, or logits: those of all of them, or none."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.helpers.right_calls import require_call
from llmk.ops.linear_loss.chunked import VocabShard, plan
from llmk.ops.linear_loss.chunked.plan import KEPT_BUDGET, kept_rows
from llmk.ops.linear_loss.drivers._rows_call import RowsCall
from llmk.ops.linear_loss.drivers.logprobs import LogprobsCall
from llmk.registry import OPS, Sample

H, V = 16, 37
ON_HOST = 4
"""Bytes of an exponential on a CPU."""


def head(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((tokens, H), (V, H)))
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (tokens,), generator=generator)


def rows_fit(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Let the exponentials of so many rows fit."""
    monkeypatch.setattr(plan, "KEPT_BUDGET", rows * V * ON_HOST)


def products(x: Tensor, weight: Tensor, target: Tensor, *, of: int = 0, **options: Any) -> float:
    """Count the products of a step on one of the results, in units of the one that makes the logits."""
    with FlopCounterMode(display=False) as counter:
        torch.ops.llmk.linear_logprobs(x, weight, target, **options)[of].sum().backward()
    return counter.get_total_flops() / (2 * x.numel() * V)


def test_a_step_takes_three_products_where_they_are_kept_and_else_four(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_fit(monkeypatch, 16)
    assert products(*head(1)) == products(*head(16)) == products(*head(16), chunk_size=4) == 3
    assert products(*head(17)) == 4


def test_the_gradient_of_an_entropy_takes_three_products_without_a_cap() -> None:
    x, weight, target = head(8)
    assert products(x, weight, target, of=1) == 3
    assert products(x, weight, target, of=1, softcap=5.0) == 4


def test_gradients_that_exponentials_do_not_give_take_four_products() -> None:
    x, weight, target = head(8)
    assert products(x, weight, torch.stack((target, target.flip(0)), -1)) == 4
    assert products(x, weight, target, support=target.unsqueeze(-1)) == 4
    assert products(x.detach().half().requires_grad_(), weight.detach().half().requires_grad_(), target) == 4


def test_largest_logits_take_three_products_where_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(tokens: int, **options: Any) -> float:
        x, weight, _ = head(tokens)
        with FlopCounterMode(display=False) as counter:
            torch.ops.llmk.linear_topk(x, weight, 5, **options)[0].sum().backward()
        return counter.get_total_flops() / (2 * x.numel() * V)

    rows_fit(monkeypatch, 16)
    assert products(16) == products(16, chunk_size=4) == 3
    assert products(17) == products(16, softcap=5.0) == 4


@pytest.mark.parametrize(("tokens", "kept"), [(0, 0), (512, 512), (7061, 7061), (7062, 0), (65536, 0)])
def test_all_rows_or_none(tokens: int, kept: int) -> None:
    assert kept_rows(tokens, 152064, 2) == kept
    assert kept_rows(tokens, 152064, 2) * 152064 * 2 <= KEPT_BUDGET
    assert kept_rows(tokens, 0, 2) == tokens  # a rank without classes


def test_ranks_with_unequal_parts_of_the_classes_keep_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocabShard, "ranks", 3)
    for tokens, kept in ((9000, True), (12000, False)):
        x = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="meta")
        target = torch.empty(tokens, dtype=torch.int64, device="meta")
        for first, classes in ((0, 200_000), (200_000, 100_000), (300_000, 0)):
            call = LogprobsCall(
                input=x,
                linear_weight=torch.empty(classes, 8192, dtype=torch.bfloat16, device="meta"),
                linear_bias=None,
                float32_logits=True,
                skip_ignored=False,
                chunk_size=0,
                shard=VocabShard(first, 300_000, "ranks", ""),
                target=target,
                support=None,
                ignore_index=-100,
                logit_scale=1.0,
                softcap=0.0,
                temperature=1.0,
            )
            found = call.kept_matrix(call.kept_buffer(True))
            assert (found is not None) == kept
            assert found is None or found.shape == (tokens, classes)


def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found, buffer = [], RowsCall.kept_buffer

    def watched(self: RowsCall, keep: bool) -> Tensor:
        kept = self.kept_matrix(result := buffer(self, keep))
        found.append(0 if kept is None else len(kept))
        return result

    monkeypatch.setattr(RowsCall, "kept_buffer", watched)
    x, weight, target = head(8)
    with torch.no_grad():
        torch.ops.llmk.linear_logprobs(x, weight, target)
    torch.ops.llmk.linear_logprobs(x.detach(), weight.detach(), target)
    torch.ops.llmk.linear_logprobs(x, weight, target)
    assert found == [0, 0, 8]


OPTIONS: list[dict[str, Any]] = [{}, {"chunk_size": 6}, {"logits_dtype": torch.bfloat16}, {"softcap": 3.0}]
OPTIONS += [{"skip_ignored": True, "chunk_size": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.kernels
def test_a_second_backward_pass_finds_what_the_first_found(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Once with the exponentials as they were kept, once with what one pass makes of them for the entropy."""
    if dtype == torch.float32:
        options = {name: value for name, value in options.items() if name != "logits_dtype"}
    x, weight, target = (each.detach().to(dtype) if each.is_floating_point() else each for each in head(9))
    target[::3] = -100
    sample = Sample((x.requires_grad_(), weight.requires_grad_(), target), options, why="kept")
    logprobs, entropy = torch.ops.llmk.linear_logprobs(*sample.args, **options)
    for loss in (logprobs.square().sum(), logprobs.square().sum() + entropy.square().sum()):
        first, second = (torch.autograd.grad(loss, sample.args[:2], retain_graph=True) for _ in range(2))
        for found, again in zip(first, second, strict=True):
            assert torch.equal(found, again)
    op = OPS["linear_logprobs"]
    require_call(op, sample)
    require_call(op, sample, fn=without_entropy, grads=of_logprobs)


@pytest.mark.parametrize("fitting", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.kernels
def test_gradients_of_the_largest_are_those_of_logits_made_again(
    dtype: torch.dtype, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_fit(monkeypatch, fitting)
    x, weight = (each.detach().to(dtype).requires_grad_() for each in head(9)[:2])
    sample = Sample((x, weight, 5), {"temperature": 0.5, "chunk_size": 4}, why="kept")
    op = OPS["linear_topk"]
    require_call(op, sample)
    logprobs, _, logsumexp = torch.ops.llmk.linear_topk(*sample.args, **sample.kwargs)
    loss = logprobs.square().sum() + logsumexp.square().sum()
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    for found, again in zip(first, second, strict=True):
        assert torch.equal(found, again)


def of_logprobs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The incoming gradients, 0 of entropies."""
    first, *others = outputs
    grad = torch.linspace(-1, 1, first.numel(), dtype=torch.float64).to(first.dtype)
    return [grad, *map(torch.zeros_like, others)]


def without_entropy(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The operator with an entropy that has no gradient, so that kept exponentials serve."""
    logprobs, entropy = torch.ops.llmk.linear_logprobs(*args, **options)
    return logprobs, entropy.detach()


@pytest.mark.usefixtures("no_cpp")
def test_one_graph_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return torch.ops.llmk.linear_logprobs(x, weight, target)[0].square().sum()

    rows_fit(monkeypatch, 40)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (8, 38, 70):  # all are kept, or none
        args = head(tokens)
        found, wanted = (torch.autograd.grad(function(*args), args[:2]) for function in (compiled, step))
        for grad, eager in zip(found, wanted, strict=True):
            torch.testing.assert_close(grad, eager, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("fitting", [0, 24])
def test_ratios_of_sequences_that_fit_no_chunk(fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their coefficients are known after all logits: the second pass finds the exponentials in the same call."""
    rows_fit(monkeypatch, fitting)
    x, weight, target = (
        tensor.view(2, 12, *tensor.shape[1:]) if i != 1 else tensor for i, tensor in enumerate(head(24))
    )
    options = {"importance_sampling_level": "sequence", "chunk_size": 5, "old_logps": -3.6 + torch.rand(2, 12) / 4}
    sample = Sample((x.detach(), weight, target), options, why="kept")
    op = OPS["fused_linear_policy"]
    require_call(op, sample)
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        op.overload(x, weight, target, **options)[0].backward()
    assert counter.get_total_flops() == (4 - bool(fitting)) * 2 * x.numel() * V
