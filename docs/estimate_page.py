"""Writes the form on the page about the estimate, and how far it was from the training steps that were measured."""

import html
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from markdown_parts import doc_parts  # noqa: E402

import llmk.estimate  # noqa: E402
from benchmarks.estimate_checks import Check, checks, sizes_of_model  # noqa: E402 the path comes first
from benchmarks.models import MODELS  # noqa: E402
from llmk.estimate import FIGURES, Sizes  # noqa: E402

LABELS = {
    "hidden": "hidden size",
    "kv_heads": "key and value heads",
    "head_dim": "features of a head",
    "intermediate": "intermediate size",
    "norms": "norms of a layer",
    "qk_norm": "norms of queries and keys",
    "offset_norms": "norms by 1 + weight, as Gemma's",
    "softcap": "softcap of the logits",
    "gelu": "GELU in place of SiLU",
    "tied": "embedding and projection share a weight",
    "experts_per_token": "experts of a token",
    "expert_intermediate": "width of an expert",
}
MEMORY, TIME = 0.10, 0.20
"""The largest differences of an estimate from what was measured that the table does not remark."""


def estimate_form() -> str:
    """Return the form, the figures and the script for the page to include, in HTML that needs no server."""
    models = {name: asdict(sizes_of_model(name)) for name in MODELS}
    switches = [field for field in fields(Sizes) if field.type is bool]
    numbers = [field for field in fields(Sizes) if field.type is not bool]
    parts = [
        '<form id="estimate">',
        _select("preset", "model", list(models)),
        _number("tokens", "tokens of a step", 16384),
        _number("sequence", "tokens of a sequence", 2048),
        _select("gpu", "GPU", list(FIGURES["gpus"])),
        _switch("checkpointing", "activation checkpointing: each layer is computed again in the backward pass"),
        '<details><summary>Sizes, or a config.json</summary><div class="fields">',
        '<label class="whole">config.json, pasted<textarea name="config" rows="3"></textarea></label>',
        *(_number(field.name, LABELS.get(field.name, field.name), 0) for field in numbers),
        *(_switch(field.name, LABELS[field.name]) for field in switches),
        "</div></details>",
        "</form>",
        '<div id="estimate-result" aria-live="polite"></div>',
        _data("estimate-figures", FIGURES),
        _data("estimate-models", models),
        '<script src="_static/estimate.js"></script>',
    ]
    return "\n".join(["```{raw} html", *parts, "```", ""])


def _number(name: str, label: str, value: int) -> str:
    return f'<label>{html.escape(label)}<input type="number" name="{name}" value="{value}" min="0" step="1"></label>'


def _switch(name: str, label: str) -> str:
    return f'<label class="switch"><input type="checkbox" name="{name}">{html.escape(label)}</label>'


def _select(name: str, label: str, options: list[str]) -> str:
    choices = "".join(f"<option>{text}</option>" for text in options)
    return f'<label>{label}<select name="{name}">{choices}</select></label>'


def _data(name: str, content: object) -> str:
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def estimate_checks() -> str:
    """Every measured step beside its estimate."""
    lines = [
        ":::{container} results",
        "",
        "| step | way | GiB, measured | estimate | off | ms, measured | estimate | off |",
        "|---|---|---|---|---|---|---|---|",
        *(_check(check) for check in checks()),
        "",
        ":::",
        "",
    ]
    return "\n".join(lines)


def _check(check: Check) -> str:
    memory, time = _off(check.memory_off, MEMORY), _off(check.time_off, TIME)
    return (
        f"| {check.model} | {check.way} | {check.measured_gib:.1f} | {check.gib:.1f} | {memory} | "
        f"{check.measured_ms:.0f} | {check.ms:.0f} | {time} |"
    )


def _off(off: float, limit: float) -> str:
    return f"{off:+.1%}" if abs(off) <= limit else f"**{off:+.1%}**"


def estimate_formula() -> str:
    """The docstring of `llmk.estimate`, but for the paragraph that says where it stands."""
    first, where, *formula = doc_parts(llmk.estimate.__doc__ or "")
    assert "figures.json" in where
    return "\n\n".join([first, *formula]) + "\n"
