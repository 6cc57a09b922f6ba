"""Patterns of experts in plain PyTorch by grouped products, as transformers has written them since its version 5.

The N = T * K pairs of a token and one of its experts, numbered token by token, are sorted by expert: `perm` has the
number of the pair at each position. Row by row stand the token, the products up to `offsets`, which say where each
expert's rows end, and the routing weight; then the rows go back by the inverse of `perm` and are added up, K by K.

Masks of rows whose pair has no expert, and clamps of the indices of such rows, may be there: `moe_experts` gives these
pairs no expert either.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Call,
    Cast,
    Either,
    GraphBuilder,
    KeywordArg,
    Match,
    Named,
    NoMatch,
    Number,
    Pattern,
    Result,
    RewritePattern,
    Then,
    Through,
    View,
    With,
    arguments,
    name_of,
    pattern,
    reshape_of,
    same_shape,
    value_of,
)
from llmk.compiler.spellings import Half, Of, Where, silu, square, transposed_from

PRODUCTS = "_grouped_mm", "transformers::grouped_mm_fallback"
WHOLE = torch.int32, torch.int64
EXACT = *WHOLE, torch.float32, torch.float64
"""Dtypes that hold the numbers of experts and of their rows."""


def _whole_numbers_of(node: Any) -> Node | None:
    """Return the tensor whose whole numbers a node gives in another dtype that can hold them."""
    if name_of(node) not in ("to", "_to_copy") or value_of(node).dtype not in EXACT:
        return None
    given = arguments(node, "self", "dtype")
    return None if given is None or value_of(given["self"]).is_floating_point() else given["self"]


def _whole(pattern: Pattern) -> Pattern:
    return Through(_whole_numbers_of, pattern)


def _matrices(name: str) -> Pattern:
    """Match weights [E, D, H], transposed for the product, or [E, H, D], as they are."""
    x = KeywordArg(name)
    return With("transposed", False, View(transposed_from, x)) | With("transposed", True, x)


def _counts(node: Any) -> bool:
    """Return True if the node is 0, 1, 2, ..."""
    if name_of(node) != "arange" or value_of(node).dtype not in WHOLE:
        return False
    given = arguments(node, "start", "end", "step", "dtype", "layout", "device", "pin_memory")
    return given is not None and (given.get("start", 0), given.get("step", 1)) == (0, 1)


@pattern
def _Node(value: Any, match: Match, /, test: Callable[[Any], bool]) -> Iterator[Match]:
    """A node for which `test` is true, whatever it reads."""
    if test(value):
        yield match.with_nodes(value)


def _token_of_pair() -> Pattern:
    """Match the token of each pair, [N], by repeating each token K times."""
    table = Named("tokens", _Node(_counts).unsqueeze(Either(1, -1)).expand(Arg("sizes")))
    return Then(
        View(reshape_of, table), lambda _, match: match.bind("top_k", value_of(match.values["tokens"]).shape[-1])
    )


def _inverse() -> Pattern:
    """Match the inverse of `perm`, by sorting it, or by putting 0, 1, 2, ... at its indices."""
    memory = _Node(lambda node: name_of(node) in ("empty_like", "zeros_like", "empty", "zeros"))
    return _order(PERM, "stable_back") | Where(_fills, memory.index_put([PERM], _Node(_counts)))


def _fills(node: Node) -> bool:
    """Return True if a node gives each element of some memory a value at an index of its own."""
    given = arguments(node, "self", "indices", "values") or {}
    shape = value_of(given["indices"][0]).shape
    return all(same_shape(value_of(given[name]).shape, shape) for name in ("self", "values"))


def _sorted(keys: Pattern, stable: str) -> Pattern:
    return keys.sort() | keys.sort(stable=Arg(stable))


def _order(keys: Pattern, stable: str) -> Pattern:
    return Result(1, _sorted(keys, stable)) | keys.argsort() | keys.argsort(stable=Arg(stable))


IDS = KeywordArg("ids", lambda ids: ids.dim() == 1)
PERM = Named("perm", _order(IDS, "stable"))
SORTED_IDS = _whole(Result(0, _sorted(IDS, "stable")) | IDS.index([PERM]))
WITHIN = SORTED_IDS | SORTED_IDS.clamp(max=Number("last"))
PAIRS_OF = _whole(SORTED_IDS.histc(Number("experts"), 0, Number("last")))
OFFSETS = Named("offsets", _whole(PAIRS_OF.cumsum(Either(0, -1), dtype=Either(*WHOLE))))
NO_EXPERT = SORTED_IDS.ge(Number("experts")).unsqueeze(Either(1, -1))


def _masked(rows: Pattern) -> Pattern:
    return rows | rows.masked_fill(NO_EXPERT, 0)


def _linear(rows: Pattern, name: str) -> Pattern:
    y = Either(*(Call(product, rows, _matrices(name), OFFSETS) for product in PRODUCTS))
    return Cast(_masked(y | y + Cast(KeywordArg(f"{name}_bias").index([WITHIN]))))


def _gated_unit(gate: Pattern, up: Pattern) -> Pattern:
    activations = {
        "silu": silu(gate) | gate * (gate * Number("alpha")).sigmoid(),
        "gelu": gate.gelu(approximate="none"),
        "gelu_tanh": gate.gelu(approximate="tanh"),
        "relu": gate.relu(),
        "relu_squared": square(gate.relu()),
    }
    activated = Either(*(With("activation", name, result) for name, result in activations.items()))
    return Cast(activated) * Cast(up | up + Number("up_offset"))


def _gated_units() -> Iterator[Pattern]:
    rows = KeywordArg("rows")
    for interleaved in (False, True):
        gate, up = Cast(Half(rows, False, interleaved)), Cast(Half(rows, True, interleaved))
        yield With("interleaved", interleaved, _gated_unit(gate, up))
        gate, up = Cast(gate.clamp(max=Number("limit"))), Cast(up.clamp(Number("least"), Number("limit")))
        yield With("interleaved", interleaved, _gated_unit(gate, up))


def _experts() -> Pattern:
    x, top_k = KeywordArg("input"), Number("top_k")
    by_pair = x.index([_token_of_pair()]) | x.repeat_interleave(top_k, 0)
    token = PERM.floor_divide(top_k) | PERM.div(top_k, rounding_mode="floor")
    rows = _linear(Cast(_masked(Cast(x.index([token]) | by_pair.index([PERM])))), "gate_up")
    y = _linear(Cast(Of("rows", rows, Either(*_gated_units()))), "down")
    flat = Cast(KeywordArg("weights", lambda weights: weights.dim() == 1).index([PERM]))
    column = KeywordArg("weights", lambda weights: weights.dim() == 2 and weights.shape[1] == 1).index([PERM])
    weights = Cast(flat.unsqueeze(Either(1, -1)) | column)
    pairs = Cast(_masked(y * weights)).index([_inverse()])
    return Cast(Cast(Named("by_token", View(reshape_of, pairs))).sum(Either([1], [-2])))


def _build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    E, K = value_of(values["gate_up"]).shape[0], values["top_k"]
    if (values["experts"], values["last"]) != (E, E - 1):
        raise NoMatch("its offsets are not where the rows of all its experts end")
    by_token = value_of(values["by_token"])
    if by_token.dim() != 3 or not isinstance(by_token.shape[1], int) or by_token.shape[1] != K:
        raise NoMatch("what it adds up is not what the experts of a token give")
    limit = values.get("limit", 0.0)
    if "limit" in values and (limit <= 0 or values["least"] != -limit):
        raise NoMatch("gates and ups have another limit")
    indices, weights = (builder(torch.ops.aten.reshape.default, values[name], [-1, K]) for name in ("ids", "weights"))
    options = {name: values[name] for name in ("activation", "interleaved", "transposed")} | {"limit": limit}
    optional = "alpha", "up_offset", "gate_up_bias", "down_bias"
    options |= {name: values[name] for name in optional if name in values}
    inputs = values["input"], values["gate_up"], values["down"], indices, weights
    return builder(torch.ops.llmk.moe_experts.default, *inputs, **options)


EXPERTS = (RewritePattern(results=(_experts(),), anchor_ops=PRODUCTS, build=_build, indices={"ids": ("gate_up", 0)}),)
