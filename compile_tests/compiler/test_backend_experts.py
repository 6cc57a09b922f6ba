"""Experts by grouped products become `moe_experts`: those of transformers, other spellings, and no others."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_equal, results, rewritten
from compile_tests.helpers.backend_compare import require_unchanged
from compile_tests.helpers.breadth import some_of
from llmk.compiler import Report

pytest.importorskip("transformers")

import transformers.integrations.moe  # noqa: F401  its operator is what a CPU's graphs have

from compile_tests.helpers.families import assert_same_training, small_model, tokens

T, E, K, H, WIDTH = 7, 4, 2, 16, 8


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator) / 2).to(dtype).requires_grad_()


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tokens, two matrices and biases for each expert, and routing weights."""
    shapes = (T, H), (E, 2 * WIDTH, H), (E, H, WIDTH), (E, 2 * WIDTH), (E, H), (T, K)
    return [randn(*shape, dtype=dtype) for shape in shapes]


IDS = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1], [1, 3], [3, 4]])
"""Expert 2 has none, and 4 is no expert."""


@pytest.mark.parametrize("family", some_of(["Qwen3Moe", "Mixtral", "GptOss"], ["Qwen3Moe", "GptOss"]))
def test_models_of_transformers(family: str) -> None:
    """Plain ones, without a graph break; the length is symbolic for the last."""
    model, report, ids = small_model(family, use_cache=False, num_hidden_layers=1), Report(), tokens(2, 12)
    assert model.config._experts_implementation == "grouped_mm"
    if family == "GptOss":
        torch._dynamo.mark_dynamic(ids, 1)
    operators: list[str] = []

    def look(gm: torch.fx.GraphModule) -> None:
        operators.extend(str(node.target) for node in gm.graph.nodes)

    assert_same_training(model, copy.deepcopy(model), run=rewritten(model, report, look=look), input_ids=ids)
    assert report.replaced.get("moe_experts") == 1, str(report)
    assert report.graphs == 1
    assert operators.count("llmk.moe_experts.default") == 1
    assert not any(name in operator for operator in operators for name in ("grouped_mm", "sort", "histc", "index_put"))


def ends_of(ids: Tensor, last: int = E - 1) -> Tensor:
    """Return where the rows of each expert end."""
    return torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=last), 0, dtype=torch.int32)


def back(perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return inverse


def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight.transpose(-2, -1), ends)


def product_of_pytorch(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.dtype != torch.bfloat16:  # as transformers has it, and float64 it does not take
        return product(rows, weight.transpose(-2, -1), ends)
    return F.grouped_mm(rows, weight, offs=ends)


def gated(rows: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return act(gate) * up


def with_masks(x: Tensor, gate_up: Tensor, down: Tensor, b1: Tensor, b2: Tensor, weights: Tensor) -> Tensor:
    """Pairs of no expert come last, and their rows are emptied in place."""
    ids, perm = torch.sort(IDS.reshape(-1))
    ends, nowhere = ends_of(ids), (ids >= E).unsqueeze(-1)
    ids.clamp_(max=E - 1)
    rows = x[perm // K].masked_fill_(nowhere, 0.0)
    rows = gated(product(rows, gate_up, ends).add_(b1[ids]), partial(F.gelu, approximate="tanh"))
    rows = product(rows, down, ends).add_(b2[ids]) * weights.reshape(-1)[perm].unsqueeze(-1)
    return rows.masked_fill_(nowhere, 0.0)[back(perm)].view(T, K, H).sum(dim=1)


def with_more_masks(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """Compute transformers 5.17's experts: both products' results are masked, and nobody reads the clamped indices."""
    ids, perm = torch.sort(IDS.reshape(-1))
    rows, factor = x[perm // K], weights.reshape(-1)[perm]
    ends, nowhere = ends_of(ids), (ids >= E).unsqueeze(-1)
    ids.clamp_(max=E - 1)
    rows.masked_fill_(nowhere, 0.0)
    rows = gated(product_of_pytorch(rows, gate_up.transpose(-2, -1), ends).masked_fill(nowhere, 0.0))
    rows = product_of_pytorch(rows, down.transpose(-2, -1), ends).masked_fill(nowhere, 0.0) * factor.unsqueeze(-1)
    return rows[back(perm)].view(T, K, H).sum(dim=1).to(x.dtype)


def by_sorting_twice(x: Tensor, gate_up: Tensor, down: Tensor, b1: Tensor, b2: Tensor, weights: Tensor) -> Tensor:
    flat = IDS.clamp(max=E - 1).reshape(-1)
    token = torch.arange(T).unsqueeze(1).expand(-1, K).reshape(-1)
    perm = torch.argsort(flat)
    ids = flat[perm]
    ends = ends_of(ids)
    rows = product(x[token][perm], gate_up, ends) + b1[ids]
    rows = product(gated(rows, F.relu), down, ends) + b2[ids]
    return (rows * weights.reshape(-1, 1)[perm])[torch.argsort(perm)].view(T, K, H).sum(dim=1)


def by_pytorch(x: Tensor, gate_up: Tensor, down: Tensor, b1: Tensor, b2: Tensor, weights: Tensor) -> Tensor:
    """PyTorch's own product, of weights that lie the other way round, and repeated tokens."""
    ids, perm = torch.sort(IDS.clamp(max=E - 1).view(-1))
    ends = ends_of(ids)
    gate_up, down = (weight.transpose(1, 2).contiguous() for weight in (gate_up, down))
    rows = gated(product_of_pytorch(x.repeat_interleave(K, dim=0)[perm], gate_up, ends))
    rows = product_of_pytorch(rows, down, ends) * weights.view(-1)[perm].unsqueeze(-1)
    return rows[back(perm)].view(T, K, H).sum(dim=1).to(x.dtype)


@pytest.mark.parametrize("fn", [with_masks, by_sorting_twice])
def test_spellings(fn: Callable[..., Tensor]) -> None:
    assert require_equal(fn, tensors()).replaced == {"moe_experts": 1}


def test_spelling_in_bfloat16() -> None:
    x, gate_up, down, b1, b2, weights = tensors(torch.bfloat16)
    args = [x, gate_up, down, b1.detach(), b2.detach(), weights]
    assert require_equal(by_pytorch, args).replaced == {"moe_experts": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spelling_of_5_17(dtype: torch.dtype) -> None:
    x, gate_up, down, _, _, weights = tensors(dtype)
    assert require_equal(with_more_masks, [x, gate_up, down, weights]).replaced == {"moe_experts": 1}


def test_other_writes_stay() -> None:
    """Into memory that is somebody else's, or that a view made before still shows."""
    x, gate_up, down, _, _, weights = tensors()
    seen, args = torch.zeros(T), [x, gate_up, down, weights]

    def fn(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        seen.fill_(1)
        twice = x.detach() + 0
        part = twice[0]
        twice.mul_(2)
        return with_more_masks(x, gate_up, down, weights) + part

    assert require_equal(fn, args).replaced == {"moe_experts": 1}
    seen.zero_()
    rewritten(fn, Report())(*args)
    assert seen.tolist() == [1] * T


def alike(
    x: Tensor, gate_up: Tensor, down: Tensor, b1: Tensor, b2: Tensor, weights: Tensor, *, other: str = ""
) -> Tensor:
    """The experts, but for one thing."""
    ids, perm = torch.sort(IDS.clamp(max=E - 1).view(-1))
    if other == "indices that were changed":
        ids.clamp_(max=E - 1)
    ends = ends_of(ids, E if other == "bounds" else E - 1)
    ends_of_down = ends_of(ids, E) if other == "offsets" else ends
    weights = weights + 0
    tokens = perm % T if other == "tokens" else perm // K
    rows = product(x[tokens], gate_up, ends)
    if other == "a late bias":
        gate, up = rows[:, :WIDTH], rows[:, WIDTH:]
        rows.add_(b1[ids])  # they are views of it
        rows = F.silu(gate) * up
    else:
        rows = gated(rows + b1[ids], F.elu if other == "activation" else F.silu)
    rows = product(rows, down, ends_of_down) + b2[ids.flip(0) if other == "biases" else ids]
    factor = weights.reshape(-1)[perm].unsqueeze(-1)
    if other == "weights that change":
        weights.add_(1)
    rows = rows * factor * factor if other == "weights, twice" else rows * factor
    rows = rows[perm if other == "order" else back(perm)]
    rows = rows.view(K, T, H).sum(dim=0) if other == "sums" else rows.view(T, K, H).sum(dim=1)
    if other == "weights that change":
        rows = rows + weights.sum()
    return rows + ends.sum() if other == "a reader" else rows


OTHERS = (
    "offsets",
    "tokens",
    "activation",
    "biases",
    "weights, twice",
    "order",
    "sums",
    "a reader",
    "indices that were changed",
    "a late bias",
    "bounds",
    "weights that change",
)


def test_what_is_changed_below_is_found() -> None:
    assert require_equal(alike, tensors()).replaced == {"moe_experts": 1}


@pytest.mark.parametrize("other", OTHERS)
def test_left_as_it_was(other: str) -> None:
    fn, args, report = partial(alike, other=other), tensors(), Report()
    got = results(rewritten(fn, report, without=["swiglu"]), args)
    assert report.replaced == {}, str(report)
    assert report.left
    for x, y in zip(got, results(fn, args), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_autocast_and_float64_are_left() -> None:
    """The operator is not put in where plain products are in another dtype than its own."""
    report, args = Report(), tensors()
    run = rewritten(by_sorting_twice, report)
    with torch.autocast("cpu", torch.bfloat16):
        run(*args)
    run(*(x.detach().double() for x in args))
    assert report.replaced == {}, str(report)
    assert {"bfloat16", "float64"} <= {word.strip(",") for note in report.left for word in note.reason.split()}


def test_offsets_that_are_written_after_the_products_are_left() -> None:
    """Hugging Face's operator reads its offsets again in its backward pass, where nobody sees the write."""

    def fn(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        chosen, order = experts.reshape(-1).sort()
        offsets = torch.histc(chosen.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        gate, value = grouped(x[order // 2], up.transpose(-2, -1), offsets).chunk(2, -1)
        out = grouped(F.silu(gate) * value, down.transpose(-2, -1), offsets)
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        if clear:
            offsets.zero_()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(10)
        return out[inverse].view(5, 2, 8).sum(1)

    args = [randn(5, 8), randn(3, 16, 8), randn(3, 8, 8), randn(5, 2), torch.randint(3, (5, 2))]
    clear = False
    assert require_unchanged(fn, args).replaced == {"moe_experts": 1}
    clear = True
    assert "moe_experts" not in require_unchanged(fn, args).replaced
