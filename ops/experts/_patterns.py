"""Patterns of experts in plain PyTorch by grouped products, as transformers has written them since its version 5.

The N = T * K pairs of a token and one of its experts, numbered token by token, are sorted by expert: `perm` has the
number of the pair at each position. Row by row stand the token, the products up to `offsets`, which say where each
expert's rows end, and the routing weight; then the rows go back by the inverse of `perm` and are added up, K by K.

Masks of rows whose pair has no expert, and clamps of the indices of such rows, may be there: `moe_experts` gives these
pairs no expert either.
"""

from collections.abc import Iterator, Mapping
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
    Through,
    View,
    With,
    arguments,
    find,
    name_of,
    reshape_of,
    same_shape,
    value_of,
)
from llmk.compiler.spellings import Half, Of, transposed_from

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


class _TokenOfPair(Pattern):
    """The token of each pair, [N], by repeating each token K times."""

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        for inner in find(
            View(reshape_of, Named("tokens", Call("expand", KeywordArg("token"), Arg("sizes")))), value, match
        ):
            wide, token = inner.values["tokens"], inner.values["token"]
            column = arguments(token, "self", "dim") if name_of(token) == "unsqueeze" else None
            if column is None or column["dim"] not in (1, -1) or not _counts(column["self"]):
                continue
            if value_of(wide).dim() == 2:
                yield from inner.with_nodes(token, column["self"]).bind("top_k", value_of(wide).shape[1])


class _Inverse(Pattern):
    """The inverse of `perm`, by sorting it, or by putting 0, 1, 2, ... at its indices."""

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        yield from find(_order(PERM, "stable_back"), value, match)
        given = arguments(value, "self", "indices", "values") if name_of(value) in ("index_put", "index_put_") else None
        if given is None:
            return
        memory, indices, positions = given["self"], given["indices"], given["values"]
        if name_of(memory) in ("empty_like", "zeros_like", "empty", "zeros") and _counts(positions):
            for inner in find([PERM], indices, match.with_nodes(value, memory, positions)):
                if all(same_shape(value_of(x).shape, value_of(indices[0]).shape) for x in (memory, positions)):
                    yield inner


def _sorted(keys: Pattern, stable: str) -> Pattern:
    return Call("sort", keys) | Call("sort", keys, stable=Arg(stable))


def _order(keys: Pattern, stable: str) -> Pattern:
    return Result(1, _sorted(keys, stable)) | Call("argsort", keys) | Call("argsort", keys, stable=Arg(stable))


IDS = KeywordArg("ids", lambda ids: ids.dim() == 1)
PERM = Named("perm", _order(IDS, "stable"))
SORTED_IDS = _whole(Result(0, _sorted(IDS, "stable")) | Call("index", IDS, [PERM]))
WITHIN = SORTED_IDS | Call("clamp", SORTED_IDS, max=Number("last")) | Call("clamp_", SORTED_IDS, max=Number("last"))
PAIRS_OF = _whole(Call("histc", SORTED_IDS, Number("experts"), 0, Number("last")))
ENDS = Call("cumsum", PAIRS_OF, Either(0, -1), dtype=Either(*WHOLE))
OFFSETS = Named("offsets", _whole(ENDS))
NO_EXPERT = Call("unsqueeze", Call("ge", SORTED_IDS, Number("experts")), Either(1, -1))


def _masked(rows: Pattern) -> Pattern:
    return rows | Call("masked_fill", rows, NO_EXPERT, 0) | Call("masked_fill_", rows, NO_EXPERT, 0)


def _linear(rows: Pattern, name: str) -> Pattern:
    y = Either(*(Call(product, rows, _matrices(name), OFFSETS) for product in PRODUCTS))
    bias = Cast(Call("index", KeywordArg(f"{name}_bias"), [WITHIN]))
    return Cast(_masked(y | Call("add", y, bias) | Call("add_", y, bias)))


def _gated_unit(gate: Pattern, up: Pattern) -> Pattern:
    relu = Call("relu", gate)
    squared = Call("pow", relu, 2) | Call("square", relu) | Call("mul", relu, relu)
    scaled = Call("mul", gate, Call("sigmoid", Call("mul", gate, Number("alpha"))))
    silu = Call("silu", gate) | Call("mul", gate, Call("sigmoid", gate)) | scaled
    activated = (
        With("activation", "silu", silu)
        | With("activation", "gelu", Call("gelu", gate, approximate="none"))
        | With("activation", "gelu_tanh", Call("gelu", gate, approximate="tanh"))
        | With("activation", "relu", relu)
        | With("activation", "relu_squared", squared)
    )
    return Call("mul", Cast(activated), Cast(up | Call("add", up, Number("up_offset"))))


def _gated_units() -> Iterator[Pattern]:
    rows = KeywordArg("rows")
    for interleaved in (False, True):
        gate, up = Cast(Half(rows, False, interleaved)), Cast(Half(rows, True, interleaved))
        yield With("interleaved", interleaved, _gated_unit(gate, up))
        gate = Cast(Call("clamp", gate, max=Number("limit")))
        up = Cast(Call("clamp", up, Number("least"), Number("limit")))
        yield With("interleaved", interleaved, _gated_unit(gate, up))


def _experts() -> Pattern:
    x, top_k = KeywordArg("input"), Number("top_k")
    by_pair = Call("index", x, [_TokenOfPair()]) | Call("repeat_interleave", x, top_k, 0)
    token = Call("floor_divide", PERM, top_k) | Call("div", PERM, top_k, rounding_mode="floor")
    x_rows = Call("index", x, [token]) | Call("index", by_pair, [PERM])
    rows = _linear(Cast(_masked(Cast(x_rows))), "gate_up")
    y = _linear(Cast(Of("rows", rows, Either(*_gated_units()))), "down")
    flat = Cast(Call("index", KeywordArg("weights", lambda weights: weights.dim() == 1), [PERM]))
    column = Call("index", KeywordArg("weights", lambda weights: weights.dim() == 2 and weights.shape[1] == 1), [PERM])
    weights = Cast(Call("unsqueeze", flat, Either(1, -1)) | column)
    pairs = Call("index", Cast(_masked(Call("mul", y, weights))), [_Inverse()])
    return Cast(Call("sum", Cast(Named("by_token", View(reshape_of, pairs))), Either([1], [-2])))


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
