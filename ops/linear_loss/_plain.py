"""How a projection to the vocabulary and what is made of its logits are written in plain PyTorch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from llmk.ops.loss.plain import capped, cross_entropy_of, loss_options
from llmk.registry.patterns import (
    Call,
    Cast,
    Emit,
    Found,
    Left,
    Named,
    Pattern,
    Plain,
    Value,
    Var,
    With,
    as_dtype,
    find,
    name_of,
    value_of,
)

aten = torch.ops.aten
ROWS = frozenset({"view", "reshape", "_unsafe_view", "slice", "flatten", "contiguous", "alias"})


class _Rows(Pattern):
    """The pattern, or its rows: what keeps the last axis and chooses or arranges what is before it."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        while _keeps_last_axis(value):
            rows = (*found.values.get("rows", ()), value)
            found = replace(found, values={**found.values, "rows": rows}).over(value)
            value = value.args[0]
        yield from find(self.pattern, value, found)


def _keeps_last_axis(node: Any) -> bool:
    if name_of(node) not in ROWS:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    if not isinstance(before, Tensor) or not before.dim() or not after.dim():
        return False
    if name_of(node) == "slice" and node.args[1] in (-1, before.dim() - 1):
        return False
    width = before.shape[-1]
    return isinstance(width, int) and isinstance(after.shape[-1], int) and width == after.shape[-1]


class _Scaled(Pattern):
    """The pattern, or it times a number, or divided by one: `scale` is their product."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        yield from find(self.pattern, value, found)
        if name_of(value) in ("mul", "div") and isinstance(number := value.args[1], int | float):
            factor = number if name_of(value) == "mul" else 1 / number
            scale = found.values.get("scale", 1.0) * factor
            yield from self.find(value.args[0], replace(found, values={**found.values, "scale": scale}).over(value))


def _logits() -> Pattern:
    """A product with its bias, and what may be done to it on the way."""
    x, weight = Var("input"), Var("linear_weight")
    product = Call("linear", x, weight, None)
    for turned in (Call("t", weight), Call("numpy_T", weight), Call("transpose", weight, Value("a"), Value("b"))):
        product = product | Call("matmul", x, turned)
    linear = product | Call("linear", x, weight, Var("linear_bias")) | Call("add", product, Var("linear_bias"))
    inner = Cast(_Scaled(Cast(_Rows(Cast(_Scaled(Cast(linear)))))))
    return Cast(_Rows(capped(inner)))


def _rows_of(emit: Emit, x: Node, rows: tuple[Node, ...]) -> Node:
    """What became of the logits' rows, of the rows of x."""
    for node in reversed(rows):
        if name_of(node) in ("view", "reshape", "_unsafe_view"):
            sizes = [*node.args[1][:-1], value_of(x).shape[-1]]  # type: ignore[index]
            x = emit(aten.reshape.default, x, sizes)
        elif name_of(node) in ("slice", "flatten"):
            x = emit(node.target, x, *node.args[1:], **node.kwargs)
    return x


def _bias(emit: Emit, values: Mapping[str, Any]) -> Node | None:
    """The bias as [V], if there is one.

    Raises:
        Left: What is added to the logits is not the same for all rows.
    """
    bias = values.get("linear_bias")
    if bias is None or value_of(bias).dim() == 1:
        return bias
    if any(not isinstance(size, int) or size != 1 for size in value_of(bias).shape[:-1]):
        raise Left("what is added to the logits is not the same for all rows")
    return emit(aten.reshape.default, bias, [-1])


def _build(emit: Emit, values: Mapping[str, Any]) -> Any:
    options, scale = loss_options(values), values.get("scale", 1.0)
    bias, x = _bias(emit, values), values["input"]
    if scale != 1 and bias is not None:
        raise Left("the logits have a bias and are scaled after it")
    x = _rows_of(emit, x, values.get("rows", ()))
    if scale != 1:
        x = emit(aten.mul.Tensor, x, scale)
    loss = emit(
        torch.ops.llmk.fused_linear_ce.default,
        x,
        values["linear_weight"],
        values["target"],
        linear_bias=bias,
        **options,
    )
    return as_dtype(emit, loss, emit.wanted.dtype)


def _no_width(emit: Emit, values: Mapping[str, Any], logits: Node) -> Node:
    """A tensor like the logits, but of no classes."""
    x = values["input"]
    if value_of(x).dim() != value_of(logits).dim():
        raise Left(f"{name_of(logits)} on the way is returned in another shape")
    empty = emit(aten.slice.Tensor, x, value_of(x).dim() - 1, 0, 0)
    return emit(aten.clone.default, as_dtype(emit, empty, value_of(logits).dtype))


FUSED_LINEAR_CE = (
    Plain(results=(cross_entropy_of(_logits()),), signs=("llmk::cross_entropy",), build=_build, stand_in=_no_width),
)


def _log_probabilities() -> Pattern:
    """The entries of `F.log_softmax` at some classes, or the logits there less their `logsumexp`."""
    index, dim = Value("index"), Value("dim")
    whole = Call("gather", Cast(Call("log_softmax", _logits(), dim, dtype=Value("dtype"))), Value("axis"), index)
    chosen = Call("gather", Named("logits", _logits()), Value("axis"), index)
    less = Call("sub", chosen, Call("logsumexp", Var("logits"), [dim], True))
    squeezed = Call("sub", Call("squeeze", chosen, -1), Call("logsumexp", Var("logits"), [dim]))
    return Cast(whole) | Cast(less) | With("squeezed", True, Cast(squeezed))


NO_CLASS = -(2**31)
"""`gather` has no target to ignore."""


def _build_logprobs(emit: Emit, values: Mapping[str, Any]) -> Any:
    index, last = values["index"], value_of(values["index"]).dim() - 1
    if any(values[name] not in (-1, last) for name in ("dim", "axis")):
        raise Left("its softmax, or the choice of classes, is not over the last axis")
    if values.get("dtype") == torch.float64:
        raise Left("its softmax is float64, and the operator's float32")
    logprobs, _ = emit(
        torch.ops.llmk.linear_logprobs.default,
        _rows_of(emit, values["input"], values.get("rows", ())),
        values["linear_weight"],
        index,
        linear_bias=_bias(emit, values),
        logit_scale=values.get("scale", 1.0),
        softcap=values.get("softcap", 0.0),
        ignore_index=NO_CLASS,
    )
    if values.get("squeezed"):
        logprobs = emit(aten.squeeze.dim, logprobs, -1)
    return as_dtype(emit, logprobs, emit.wanted.dtype)


LINEAR_LOGPROBS = (Plain(results=(_log_probabilities(),), build=_build_logprobs, stand_in=_no_width),)
