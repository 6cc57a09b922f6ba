"""Programs for the patterns of `llmk.compiler.spellings`, by the name of the pattern's class in small letters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from compile_tests.helpers.fuzz_program import Line, Ref

if TYPE_CHECKING:
    from compile_tests.helpers.fuzz_grammar import Grower


def _of(g: Grower, fields: Mapping[str, Any]) -> Any:
    g.named(fields["name"], lambda: g.grow(fields["source"]))
    return g.grow(fields["pattern"])


def _mean(g: Grower, fields: Mapping[str, Any]) -> Ref:
    x, keepdim = g.grow(fields["pattern"]), fields["keepdim"]
    dim = g.option("mean", [x], fields["dim"])
    if g.random.random() < 0.6:
        return g.call("mean", x, dim, keepdim)
    total, count = g.call("sum", x, dim, keepdim), g.shape(x)[-1]
    return g.call("div", total, count) if g.random.random() < 0.5 else g.call("mul", total, 1 / count)


def _axis_back(g: Grower, fields: Mapping[str, Any]) -> Ref:
    return g.call("unsqueeze", g.grow(fields["pattern"]), -1)


def _first_of_last(g: Grower, fields: Mapping[str, Any]) -> Ref:
    x = g.grow(fields["pattern"])
    return g.call("squeeze", x, -1) if g.random.random() < 0.5 else g.call("select", x, -1, 0)


def _result(g: Grower, fields: Mapping[str, Any]) -> Ref:
    parts = g.named(f"results of {id(fields['pattern'])}", lambda: g.grow(fields["pattern"]))
    return g.add(Line(f"v{len(g.lines)}", operator.getitem, (parts, fields["index"])))


def _transposed_matrix(g: Grower, fields: Mapping[str, Any]) -> Ref:
    x = g.grow(fields["pattern"])
    return g.call("t", x) if g.random.random() < 0.5 else g.call("permute", x, [1, 0])


def _einsum(g: Grower, fields: Mapping[str, Any]) -> Ref:
    x, way = g.grow(fields["input"]), g.random.choice(("rows", "columns"))
    equation = {"rows": "...d,vd->...v", "columns": "...d,dv->...v"}[way]
    return g.call("einsum", equation, [x, g.grow(fields[way])])


def _at_places(g: Grower, fields: Mapping[str, Any]) -> Ref:
    x = g.grow(fields["pattern"])
    *rows, classes = g.shape(x)
    index = g.named("index", lambda: g.input(*rows, dtype=torch.int64, kind="classes", high=classes))
    shapes = ([-1 if i == axis else 1 for i in range(len(rows))] for axis in range(len(rows)))
    ranges = [g.call("view", g.call("arange", n), shape) for n, shape in zip(rows, shapes, strict=True)]
    return g.call("index", x, [*ranges, index])


def _each_row(g: Grower, fields: Mapping[str, Any]) -> Ref:
    logits = g.bound["logits"]
    *rows, classes = g.shape(logits)
    g.named("index", lambda: g.input(*rows, 1, dtype=torch.int64, kind="classes", high=classes))

    def row(i: int) -> Callable[[str], Ref]:
        return lambda name: g.call("select", g.bound[name], 0, i)

    return g.call("stack", [g.grow(fields["of_row"](row(i))) for i in range(rows[0])])


SPELLINGS: dict[str, Callable[[Grower, Mapping[str, Any]], Any]] = {
    "of": _of,
    "mean": _mean,
    "axisback": _axis_back,
    "firstoflast": _first_of_last,
    "result": _result,
    "transposedmatrix": _transposed_matrix,
    "einsum": _einsum,
    "atplaces": _at_places,
    "eachrow": _each_row,
}
