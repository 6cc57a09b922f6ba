"""Logits that are kept for a second pass over the tokens, as many as the plan says."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.chunked._linear import ChunkedLinear
from llmk.ops.linear_loss.chunked._plan import KEPT_BUDGET, kept_rows
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard
from llmk.ops.linear_loss.drivers.logprobs import LogprobsCall
from llmk.registry import OPS, Sample

H, V = 16, 37


def head(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((tokens, H), (V, H)))
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (tokens,), generator=generator)


def products(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> float:
    """Count the products of a step, in units of the one that makes the logits."""
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = torch.ops.llmk.linear_logprobs(x, weight, target, **options)
        if logprobs.requires_grad:
            logprobs.sum().backward()
    return counter.get_total_flops() / (2 * x.numel() * V)


def test_a_small_batch_takes_three_products_and_a_large_one_four() -> None:
    assert products(*head(H)) == 3
    assert products(*head(2 * H)) == pytest.approx(4 - 10 / 32, abs=1e-3)  # (4 * 16 - 32) // 3 rows
    assert products(*head(4 * H)) == 4
    assert products(*head(H), chunk_size=4) == 4


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(512, 512), (3584, 3584), (6000, (4 * 3584 - 6000) // 3), (14336, 0), (65536, 0)],
)
def test_rows_by_sizes(tokens: int, rows: int) -> None:
    assert kept_rows(tokens, 3584, 152064, 4) == rows
    assert kept_rows(tokens, 3584, 152064, 4, chunk_size=512) == max(0, min(tokens, (4 * 512 - tokens) // 3))


def test_rows_within_the_budget() -> None:
    for tokens in range(1024, 65536, 1024):
        assert kept_rows(tokens, 16384, 262144, 4) * 262144 * 4 <= KEPT_BUDGET
    assert kept_rows(0, H, V, 4) == 0
    assert kept_rows(5, H, 0, 4) == 5  # a rank without classes


def test_ranks_with_unequal_parts_of_the_classes_keep_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange statistics block by block, and a block ends where the rows do that are kept."""
    monkeypatch.setattr(VocabShard, "ranks", 3)
    x, target = torch.empty(9000, 8192, dtype=torch.bfloat16, device="meta"), torch.empty(9000, device="meta").long()
    found = set()
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
        found.add(call.kept_rows)
    assert found == {kept_rows(9000, 8192, 100_000, 4)}


def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    blocks = ChunkedLinear.blocks

    def watched(self: ChunkedLinear, **options: Any) -> Iterator[tuple[slice, Tensor]]:
        found.append(self.kept_rows)
        return blocks(self, **options)

    monkeypatch.setattr(ChunkedLinear, "blocks", watched)
    x, weight, target = head(8)
    with torch.no_grad():
        torch.ops.llmk.linear_logprobs(x, weight, target)
    torch.ops.llmk.linear_logprobs(x.detach(), weight.detach(), target)
    torch.ops.llmk.linear_logprobs(x, weight, target)
    assert found == [0, 0, 8]


OPTIONS: list[dict[str, Any]] = [{}, {"chunk_size": 6}, {"logits_dtype": torch.bfloat16}, {"skip_ignored": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [8, 20, 37])
def test_a_second_backward_pass_finds_what_the_first_found(tokens: int, options: dict[str, Any]) -> None:
    x, weight, target = head(tokens)
    target[::3] = -100
    logprobs, entropy = torch.ops.llmk.linear_logprobs(x, weight, target, **options)
    loss = logprobs.square().sum() + entropy.square().sum()
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    for found, again in zip(first, second, strict=True):
        torch.testing.assert_close(again, found, rtol=0, atol=0)
    sample = Sample((x, weight, target), options, why="kept")
    require_accurate(OPS["linear_logprobs"], sample, call(OPS["linear_logprobs"], sample))


def test_gradients_written_over_kept_logits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where logits that are not kept are overwritten."""
    x, weight, target = (tensor.detach().float() if tensor.is_floating_point() else tensor for tensor in head(8))
    x.requires_grad_()
    monkeypatch.setattr(ChunkedLinear, "has_separate_gradients", property(lambda self: self.has_wider_logits))
    loss = torch.ops.llmk.linear_logprobs(x, weight, target)[0].square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_stale_logits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracy rule finds logits of another block of tokens."""
    op, sample = OPS["linear_logprobs"], Sample(head(20), {}, why="kept")
    require_accurate(op, sample, call(op, sample))
    blocks = ChunkedLinear.blocks

    def stale(self: ChunkedLinear, *, second: bool = False) -> Iterator[tuple[slice, Tensor]]:
        if second and self.kept is not None:
            self.kept = self.kept.roll(1, 0)
        return blocks(self, second=second)

    monkeypatch.setattr(ChunkedLinear, "blocks", stale)
    with pytest.raises(AssertionError):
        require_accurate(op, sample, call(op, sample))


def test_several_calls_before_a_backward_pass() -> None:
    (x, weight, target), (other, _, labels) = head(8), head(8, seed=1)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, weight, other)]
    exact = torch.cat(
        [
            (tokens @ doubles[1].t()).log_softmax(-1).gather(-1, classes.unsqueeze(-1))
            for tokens, classes in ((doubles[0], target), (doubles[2], labels))
        ]
    )
    calls = [torch.ops.llmk.linear_logprobs(*args)[0] for args in ((x, weight, target), (other, weight, labels))]
    found = torch.autograd.grad(torch.cat(calls).square().sum(), (x, weight, other))
    for grad, wanted in zip(found, torch.autograd.grad(exact.square().sum(), doubles), strict=True):
        assert (grad.double() - wanted).norm() <= 5e-3 * wanted.norm()


def test_one_graph_for_any_number_of_tokens() -> None:
    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return torch.ops.llmk.linear_logprobs(x, weight, target)[0].square().sum()

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (8, 20, 38, 70, 90):  # all are kept, some, fewer, none
        args = head(tokens)
        found, wanted = (torch.autograd.grad(function(*args), args[:2]) for function in (compiled, step))
        for grad, eager in zip(found, wanted, strict=True):
            torch.testing.assert_close(grad, eager, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("tokens", [4, 12, 30])
def test_ratios_of_sequences_that_fit_no_block(tokens: int) -> None:
    """Their coefficients are known after all logits: the second pass finds the first rows' in the same call."""
    x, weight, target = (
        tensor.view(2, tokens, *tensor.shape[1:]) if i != 1 else tensor for i, tensor in enumerate(head(2 * tokens))
    )
    options = {"importance_sampling_level": "sequence", "chunk_size": 3, "old_logps": -3.6 + torch.rand(2, tokens) / 4}
    sample = Sample((x.detach(), weight, target), options, why="kept")
    require_accurate(OPS["fused_linear_policy"], sample, call(OPS["fused_linear_policy"], sample))
