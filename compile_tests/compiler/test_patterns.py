"""Patterns: one that could never match is refused where it is written, and an operator's two names are one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph

from llmk.compiler.patterns import Call, KeywordArg, Match, RewritePattern

x = KeywordArg("x")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda: x.sigmiod(), "name: expected an operator of ATen, or NAMESPACE::NAME, got 'sigmiod'"),
        (lambda: Call("mul", x, x, x), "mul: expected arguments that an overload in ATen takes, got 3 by position"),
        (lambda: x.sum(dims=1), "sum: expected arguments that an overload in ATen takes, got 1 by position, dims"),
        (lambda: RewritePattern(results=(x,), anchor_ops=("sillu",)), "anchor_ops: expected .* got 'sillu'"),
    ],
)
def test_a_name_that_no_operator_has(write: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write()


@pytest.mark.parametrize("written", ["div", "divide", "true_divide"])
@pytest.mark.parametrize("called", [torch.ops.aten.div.Tensor, torch.ops.aten.divide.Tensor])
def test_second_names(written: str, called: Any) -> None:
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "xy"]
    for node in nodes:
        node.meta["val"] = torch.ones(3, device="cpu")
    quotient = graph.call_function(called, tuple(nodes))
    (match,) = Call(written, x, KeywordArg("y")).find(quotient, Match())
    assert match.values == dict(zip("xy", nodes, strict=True))
