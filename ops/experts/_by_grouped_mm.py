"""How experts are written in plain PyTorch by grouped products, as transformers has written them since its version 5.

The N = T * K pairs of a token and one of its experts, numbered token by token, are sorted by expert: `perm` has the
number of the pair that is at each place. Row by row stand the token, the products up to `offsets`, which say where each
expert's rows end, and the routing weight; then the rows go back by the inverse of `perm` and are added up, K by K.

What masks the rows of pairs with no expert, and keeps the indices of such rows among the experts, may be there: to
`moe_experts` they are none as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmk.registry.patterns import (
    Call,
    Cast,
    Either,
    Emit,
    EveryOther,
    Found,
    Half,
    Left,
    Named,
    Number,
    Pattern,
    Plain,
    Reshaped,
    Value,
    Var,
    With,
    arguments,
    find,
    item_of,
    name_of,
    value_of,
)

PRODUCTS = "_grouped_mm", "transformers::grouped_mm_fallback"
WHOLE = torch.int32, torch.int64
EXACT = *WHOLE, torch.float32, torch.float64
"""Operators that the numbers of experts, and of their rows, pass through."""


@dataclass(frozen=True)
class _Result(Pattern):
    """One of the results of what the pattern finds."""

    index: int
    pattern: Pattern

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        item = item_of(value)
        if item is not None and item[1] == self.index:
            yield from find(self.pattern, item[0], found.over(value))


@dataclass(frozen=True)
class _Whole(Pattern):
    """The pattern, or its numbers in other dtypes that can hold them."""

    pattern: Any

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        while name_of(value) in ("to", "_to_copy") and value_of(value).dtype in EXACT:
            given = arguments(value, "self", "dtype")
            if given is None or value_of(given["self"]).is_floating_point():
                break
            found, value = found.over(value), given["self"]
        yield from find(self.pattern, value, found)


@dataclass(frozen=True)
class _Then(Pattern):
    """The pattern, and another where that has found `name`."""

    pattern: Pattern
    name: str
    other: Pattern

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        for inner in find(self.pattern, value, found):
            yield from find(self.other, inner.values[self.name], inner)


@dataclass(frozen=True)
class _Matrices(Pattern):
    """Weights [E, D, H], transposed for the product, or [E, H, D], as they are."""

    name: str

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        given = (arguments(value, "self", "dim0", "dim1") if name_of(value) == "transpose" else None) or {}
        turned = bool(given) and {given["dim0"] % 3, given["dim1"] % 3} == {1, 2}
        for inner in found.over(value).bind("transposed", False) if turned else found.bind("transposed", True):
            yield from find(Var(self.name), given["self"] if turned else value, inner)


def _counts(node: Any) -> bool:
    """Return True if it is 0, 1, 2, ..."""
    if name_of(node) != "arange" or value_of(node).dtype not in WHOLE:
        return False
    given = arguments(node, "start", "end", "step", "dtype", "layout", "device", "pin_memory")
    return given is not None and (given.get("start", 0), given.get("step", 1)) == (0, 1)


def _same_shape(a: Any, b: Any) -> bool:
    return str(value_of(a).shape) == str(value_of(b).shape)  # of symbolic sizes: no guard


class _TokenOfPair(Pattern):
    """The token of each pair, [N], by repeating each K times."""

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        for inner in find(Reshaped(Named("tokens", Call("expand", Var("token"), Value("sizes")))), value, found):
            wide, token = inner.values["tokens"], inner.values["token"]
            column = arguments(token, "self", "dim") if name_of(token) == "unsqueeze" else None
            if column is None or column["dim"] not in (1, -1) or not _counts(column["self"]):
                continue
            if value_of(wide).dim() == 2:
                yield from inner.over(token).over(column["self"]).bind("top_k", value_of(wide).shape[1])


class _Inverse(Pattern):
    """Where each pair went: the inverse of `perm`, by sorting it, or by putting there where each came from."""

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        yield from find(_order(PERM, "stable_back"), value, found)
        given = arguments(value, "self", "indices", "values") if name_of(value) in ("index_put", "index_put_") else None
        if given is None:
            return
        memory, indices, places = given["self"], given["indices"], given["values"]
        if name_of(memory) in ("empty_like", "zeros_like", "empty", "zeros") and _counts(places):
            for inner in find([PERM], indices, found.over(value).over(memory).over(places)):
                if all(_same_shape(x, indices[0]) for x in (memory, places)):
                    yield inner


def _sorted(keys: Pattern, stable: str) -> Pattern:
    return Call("sort", keys) | Call("sort", keys, stable=Value(stable))


def _order(keys: Pattern, stable: str) -> Pattern:
    return _Result(1, _sorted(keys, stable)) | Call("argsort", keys) | Call("argsort", keys, stable=Value(stable))


IDS = Var("ids", lambda ids: ids.dim() == 1)
PERM = Named("perm", _order(IDS, "stable"))
SORTED_IDS = _Whole(_Result(0, _sorted(IDS, "stable")) | Call("index", IDS, [PERM]))
WITHIN = SORTED_IDS | Call("clamp", SORTED_IDS, max=Number("last")) | Call("clamp_", SORTED_IDS, max=Number("last"))
PAIRS_OF = _Whole(Call("histc", SORTED_IDS, Number("experts"), 0, Number("last")))
ENDS = Call("cumsum", PAIRS_OF, Either(0, -1), dtype=Either(*WHOLE))
OFFSETS = Named("offsets", _Whole(ENDS))
NO_EXPERT = Call("unsqueeze", Call("ge", SORTED_IDS, Number("experts")), Either(1, -1))


def _masked(rows: Pattern) -> Pattern:
    return rows | Call("masked_fill", rows, NO_EXPERT, 0) | Call("masked_fill_", rows, NO_EXPERT, 0)


def _linear(rows: Pattern, name: str) -> Pattern:
    y = Either(*(Call(product, rows, _Matrices(name), OFFSETS) for product in PRODUCTS))
    bias = Cast(Call("index", Var(f"{name}_bias"), [WITHIN]))
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
    rows = Var("rows")
    for interleaved, parts in ((False, Half), (True, EveryOther)):
        gate, up = Cast(parts(rows, False)), Cast(parts(rows, True))
        yield With("interleaved", interleaved, _gated_unit(gate, up))
        gate = Cast(Call("clamp", gate, max=Number("limit")))
        up = Cast(Call("clamp", up, Number("least"), Number("limit")))
        yield With("interleaved", interleaved, _gated_unit(gate, up))


def _experts() -> Pattern:
    x, top_k = Var("input"), Number("top_k")
    by_pair = Call("index", x, [_TokenOfPair()]) | Call("repeat_interleave", x, top_k, 0)
    token = Call("floor_divide", PERM, top_k) | Call("div", PERM, top_k, rounding_mode="floor")
    x_rows = Call("index", x, [token]) | Call("index", by_pair, [PERM])
    rows = _linear(Cast(_masked(Cast(x_rows))), "gate_up")
    y = _linear(Cast(_Then(Either(*_gated_units()), "rows", rows)), "down")
    flat = Cast(Call("index", Var("weights", lambda weights: weights.dim() == 1), [PERM]))
    column = Call("index", Var("weights", lambda weights: weights.dim() == 2 and weights.shape[1] == 1), [PERM])
    weights = Cast(Call("unsqueeze", flat, Either(1, -1)) | column)
    pairs = Call("index", Cast(_masked(Call("mul", y, weights))), [_Inverse()])
    return Cast(Call("sum", Cast(Named("by_token", Reshaped(pairs))), Either([1], [-2])))


def _build(emit: Emit, values: Mapping[str, Any]) -> Any:
    E, K = value_of(values["gate_up"]).shape[0], values["top_k"]
    if (values["experts"], values["last"]) != (E, E - 1):
        raise Left("its offsets are not where the rows of all its experts end")
    by_token = value_of(values["by_token"])
    if by_token.dim() != 3 or not isinstance(by_token.shape[1], int) or by_token.shape[1] != K:
        raise Left("what it adds up is not what the experts of a token give")
    limit = values.get("limit", 0.0)
    if "limit" in values and (limit <= 0 or values["least"] != -limit):
        raise Left("gates and ups have another limit")
    indices, weights = (emit(torch.ops.aten.reshape.default, values[name], [-1, K]) for name in ("ids", "weights"))
    options = {name: values[name] for name in ("alpha", "up_offset", "gate_up_bias", "down_bias") if name in values}
    return emit(
        torch.ops.llmk.moe_experts.default, values["input"], values["gate_up"], values["down"], indices, weights,
        activation=values["activation"], interleaved=values["interleaved"], transposed=values["transposed"],
        limit=limit, **options,
    )  # fmt: skip


EXPERTS = (Plain(results=(_experts(),), signs=PRODUCTS, build=_build, indices={"ids": ("gate_up", 0)}),)
