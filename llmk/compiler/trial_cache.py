"""Asks if a replacement computes the same as the nodes it was matched with, and keeps the answers.

An answer depends on the two computations, their dtypes and small sizes alone. It is found once a process, and kept in a
file beside Inductor's cache for others, under a key that changes with llmk's and PyTorch's own code.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

import llmk.accuracy
from llmk.compiler.patterns import Match, RewritePattern, cast_of, is_view, value_of
from llmk.compiler.sizes import symbol_hints
from llmk.compiler.trial import Comparison, Untried, difference
from llmk.registry.private.compilers import cache_folder, hint_of

_known: dict[str, tuple[str, str]] = {}
"""The outcomes of comparisons by key: the difference, and why it could not be tried; both may be empty."""


def cached_difference(
    pattern: RewritePattern, match: Match, made: Sequence[Node], results: Sequence[Node], news: Sequence[Node]
) -> str | None:
    """Return how the replacement differs from the matched nodes; None where it computes the same.

    Raises:
        Untried: They cannot be run with small inputs.
    """
    comparison = _comparison(pattern, match, made, results, news)
    key = _key(comparison)
    if key not in _known:
        _known[key] = _from_file(key) or _tried(comparison, key)
    differs, untried = _known[key]
    if untried:
        raise Untried(untried)
    return differs or None


def _tried(comparison: Comparison, key: str) -> tuple[str, str]:
    try:
        result = difference(comparison) or "", ""
    except Untried as why:
        result = "", str(why)
    if (path := _file(key)) is not None:
        _write(path, json.dumps(result))
    return result


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, as other processes read it; a full disk only costs another trial."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        os.replace(partial, path)


def _from_file(key: str) -> tuple[str, str] | None:
    path = _file(key)
    if path is None:
        return None
    try:
        differs, untried = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return differs, untried


def _file(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else Path(folder) / "llmk-trials" / f"{key}.json"


def _comparison(
    pattern: RewritePattern, match: Match, made: Sequence[Node], results: Sequence[Node], news: Sequence[Node]
) -> Comparison:
    order = {node: i for i, node in enumerate(made[0].graph.nodes)} if made else {}
    matched = sorted(_with_what_lies_between(set(match.nodes), made), key=order.__getitem__)
    inputs = [*_inputs_of(matched), *(x for x in _inputs_of(made) if x not in set(matched))]
    inputs = [node for node in dict.fromkeys(inputs) if node not in set(made)]
    indices = {}
    for name, (of, axis) in pattern.indices.items():
        if isinstance(node := match.values.get(name), Node):
            indices[node] = match.values[of], axis
    device = next((value_of(x).device.type for x in inputs if isinstance(value_of(x), Tensor)), "cpu")
    return Comparison(
        matched=tuple(matched),
        made=tuple(made),
        results=(tuple(results), tuple(news)),
        inputs=tuple(inputs),
        indices=indices,
        tried_as=pattern.tried_as,
        ignored=match.values.get("ignore_index"),
        autocast=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        default_dtype=torch.get_default_dtype(),
        same=match.same,
        sizes=match.sizes,
    )


def _inputs_of(nodes: Collection[Node]) -> list[Node]:
    inside = set(nodes)
    return [x for node in nodes for x in node.all_input_nodes if x not in inside]


def _with_what_lies_between(matched: set[Node], made: Sequence[Node]) -> set[Node]:
    """Add the views and casts that lead from the operator's own inputs to the match, as for packed halves."""
    taken = set(_inputs_of(made)) - matched
    for node in list(_inputs_of(matched)):
        way: list[Node] = []
        while node not in taken and (is_view(node) or cast_of(node) is not None) and node.all_input_nodes:
            way.append(node)
            node = node.all_input_nodes[0]
        if node in taken:
            matched = matched.union(way)
    return matched


def _key(comparison: Comparison) -> str:
    """Return a hash of everything that the answer depends on."""
    numbers: dict[Node, int] = {}
    lines: list[str] = []

    def show(x: Any) -> str:
        if isinstance(x, Node):
            return f"%{numbers[x]}"
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(show, x))}]"
        return f"{type(x).__name__} {x}"

    for node in (*comparison.inputs, *comparison.matched, *comparison.made):
        numbers[node] = len(numbers)
        value = value_of(node)
        values = [_described(x) for x in (value if isinstance(value, tuple | list) else [value])]
        call = (
            "" if node in comparison.inputs else f"{node.target} {show(node.args)} {show(sorted(node.kwargs.items()))}"
        )
        lines.append(f"{call} {values} {node.meta.get('needs_grad')} {node.meta.get('made', '')}")
    lines.append(
        show(
            [
                *comparison.results[0],
                *comparison.results[1],
                comparison.ignored,
                str(comparison.autocast),
                *comparison.sizes,
            ]
        )
    )
    lines += [f"{numbers.get(a)} among {numbers.get(b)} {axis}" for a, (b, axis) in comparison.indices.items()]
    lines.append(str(sorted(symbol_hints(list(numbers)).items())))
    lines.append(str([numbers.get(comparison.same(node), node.name) for node in comparison.inputs]))
    lines += [str(comparison.default_dtype), torch.__version__, torch.compiler.config.cache_key_tag, _own_code()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Return a hash of the code that tries and judges; operators are in the key of PyTorch's own caches."""
    digest = hashlib.sha256()
    for file in (__file__, llmk.accuracy.__file__):
        for path in sorted(Path(file).parent.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device.type}"
    if isinstance(value, torch.SymFloat):
        return f"SymFloat {hint_of(value)}"
    return f"{type(value).__name__} {value}"
