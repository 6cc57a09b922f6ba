"""`F.linear_cross_entropy`, whole and in PyTorch's own chunks, becomes `fused_linear_ce`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_tests.helpers.backend_checks import (
    THROUGH_AUTOGRAD,
    require_equal,
    require_same,
    results,
    rewriting,
    rewritten,
)
from llmk.compiler import Report

if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("needs torch 2.13 or newer", allow_module_level=True)

N, H, V = 9, 16, 13
ONE = nn.LinearCrossEntropyOptions(allow_retain_graph=True)  # the default stops Dynamo with a warning
CHUNKED = nn.LinearCrossEntropyOptions(batch_chunk_size=4, chunking_method=None, allow_retain_graph=True)
ACCURATE = nn.LinearCrossEntropyOptions(batch_chunk_size=2, acc_policy="accurate", allow_retain_graph=True)
CHUNKS = {"whole": None, "one": ONE, "chunked": CHUNKED, "accurate": ACCURATE}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


def targets(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(0))


def tensors(dtype: torch.dtype = torch.float32, tokens: int = N) -> tuple[Tensor, ...]:
    """Input, weight and bias, and a target of which one is -100."""
    target = targets(tokens)
    target[3] = -100
    return randn(tokens, H, dtype=dtype), randn(V, H, dtype=dtype), randn(V, dtype=dtype), target


def loss(**options: Any) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor, b: Tensor | None, t: Tensor, class_weight: Tensor | None = None) -> Tensor:
        return F.linear_cross_entropy(x, w, t, linear_bias=b, weight=class_weight, **options)

    return fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_defaults(chunks: str, dtype: torch.dtype) -> None:
    """Results in bfloat16 are as right as without chunks, which on a CPU take the logits' gradients in float32."""
    x, w, _, t = tensors(dtype)
    report = Report()
    run = rewritten(loss(options=CHUNKS[chunks]), report)
    require_same(run, loss(options=None if dtype == torch.bfloat16 else CHUNKS[chunks]), [x, w, None, t])
    assert report.replaced == {"fused_linear_ce": 1}, str(report)
    assert not report.left, str(report)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_every_option(chunks: str, reduction: str) -> None:
    """PyTorch's chunks have no label smoothing: with it, it makes none."""
    smoothing = 0.1 if chunks == "whole" else 0.0
    fn = loss(options=CHUNKS[chunks], reduction=reduction, ignore_index=5, label_smoothing=smoothing)
    x, w, b, _ = tensors()
    report = require_equal(fn, [x, w, b, targets(N), torch.rand(V) + 0.5])
    assert report.replaced == {"fused_linear_ce": 1}, str(report)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_token_without_a_batch(chunks: str, reduction: str) -> None:
    report = require_equal(loss(options=CHUNKS[chunks], reduction=reduction), [randn(H), randn(V, H), None, targets()])
    assert report.replaced == {"fused_linear_ce": 1}, str(report)


def test_the_module() -> None:
    module = nn.LinearCrossEntropyLoss(H, V, bias=True, label_smoothing=0.1)

    def fn(x: Tensor, weight: Tensor, bias: Tensor, t: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"linear.weight": weight, "linear.bias": bias}, (x, t))

    report = require_equal(fn, tensors())
    assert report.replaced == {"fused_linear_ce": 1}, str(report)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_after_autograd_nothing_of_the_logits_is_left(chunks: str) -> None:
    x, w, b, t = tensors()
    report, graphs = Report(), list[str]()
    run = rewritten(
        loss(options=CHUNKS[chunks]), report, then=THROUGH_AUTOGRAD, look=lambda gm: graphs.append(str(gm.graph))
    )
    require_same(run, loss(options=CHUNKS[chunks]), [x, w, b, t])
    assert report.replaced == {"fused_linear_ce": 1}, str(report)
    assert all(
        "fused_linear_ce" in graph and "torch_nn" not in graph and "cross_entropy(" not in graph for graph in graphs
    )


@pytest.mark.parametrize("chunks", ["whole", "chunked"])
def test_any_number_of_tokens_is_one_graph(chunks: str) -> None:
    torch._dynamo.reset()
    report, fn = Report(), loss(options=CHUNKS[chunks])
    run = torch.compile(fn, backend=rewriting(report), dynamic=True, fullgraph=True)
    for tokens in (N, 21, 34):
        require_same(run, fn, tensors(tokens=tokens))
    assert report.replaced == {"fused_linear_ce": 1}, str(report)


def autocast(fn: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return fn()


LEFT = {
    "probabilities": (lambda x, w: F.linear_cross_entropy(x, w, torch.ones(N, V) / V), "its target is probabilities"),
    "many dimensions": (
        lambda x, w: F.linear_cross_entropy(x, w.view(13, 1, H).expand(13, 3, H), targets(N, 3)),
        "classes are on the second axis",
    ),
    "float64": (lambda x, w: F.linear_cross_entropy(x.double(), w.double(), targets(N)), "float64"),
    "float64 in chunks": (
        lambda x, w: F.linear_cross_entropy(x.double(), w.double(), targets(N), options=CHUNKED),
        "float64",
    ),
    "a class weight that learns": (
        lambda x, w: F.linear_cross_entropy(x, w, targets(N), weight=w.sum(1).exp(), reduction="none", options=CHUNKED),
        "weight wants a gradient",
    ),
    "under autocast, which PyTorch's chunks do not follow": (
        lambda x, w: autocast(lambda: F.linear_cross_entropy(x, w, targets(N), options=CHUNKED)),
        "tried with",
    ),
}
"""The function and words of the reason, by name."""


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_was(name: str) -> None:
    fn, reason = LEFT[name]
    report, args = Report(), (randn(N, H), randn(V, H))
    got = results(rewritten(fn, report), args)
    assert not report.replaced, str(report)
    assert any(reason in note.reason for note in report.left), str(report)
    for x, y in zip(got, results(fn, args), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
