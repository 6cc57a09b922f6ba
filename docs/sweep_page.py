"""Writes what came out when `tools.families_sweep` patched every family of transformers."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "families.json"

NAMES = {
    "causal": "causal language models",
    "image-text": "images and text",
    "seq2seq": "sequence to sequence",
    "masked": "masked language models",
}

OUTCOMES = {
    "equal": "right: loss, logits and gradients as unpatched",
    "wrong": "wrong",
    "crashed": "raise once patched",
    "died": "time or memory ran out",
    "not run": "do not run unpatched from text alone",
    "not built": "do not build from a tiny configuration",
}


def sweep_tables() -> str:
    results: dict[str, Any] = json.loads(RESULT.read_text())
    mappings = [mapping for mapping in NAMES if mapping in results]
    of = {mapping: results[mapping]["families"] for mapping in mappings}
    lines = [f"| | {' | '.join(NAMES[m] for m in mappings)} |", "|---|" + "---|" * len(mappings)]
    lines.append(_row("model types", [len(of[m]) for m in mappings]))
    for outcome, words in OUTCOMES.items():
        lines.append(_row(words, [sum(one["outcome"] == outcome for one in of[m].values()) for m in mappings]))
    for kind in ("loss", "norm", "mlp", "experts", "rope", "residual", "recurrence"):
        lines.append(
            _row(f"{kind} replaced", [sum(kind in one.get("replaced", {}) for one in of[m].values()) for m in mappings])
        )
    lines.append(_row("transformers", [results[m]["versions"]["transformers"] for m in mappings]))
    lines.append(_row("torch", [results[m]["versions"]["torch"] for m in mappings]))
    lines.append(_row("run on", [results[m]["date"] for m in mappings]))
    return "\n".join([*lines, "", "Where the loss was left, and why:", "", *_left(of, "loss"), ""])


def _row(head: str, cells: list[Any]) -> str:
    return f"| {head} | {' | '.join(str(cell) for cell in cells)} |"


def _left(of: dict[str, Any], kind: str) -> list[str]:
    """The reasons, and the model types that were left for each."""
    reasons: dict[str, set[str]] = defaultdict(set)
    for families in of.values():
        for name, one in families.items():
            for text in one.get("left", []):
                if text.startswith(f"{kind}, "):
                    reasons[text.partition(": ")[2]].add(name)
    rows = [f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(reasons.items())]
    return ["| reason | model types |", "|---|---|", *rows]
