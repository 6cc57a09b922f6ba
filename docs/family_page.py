"""Writes the table of the families of Hugging Face models: what `patch` replaces in a small one of each."""

import sys
from collections import Counter
from pathlib import Path

import transformers

from llmk.transformers import Report, patch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # compile_tests/ is not installed

from compile_tests.helpers.families import FAMILIES, small_model

KINDS = ("norm", "residual", "mlp", "experts", "rope", "convolution", "recurrence", "mask", "loss")


def family_table() -> str:
    transformers.logging.set_verbosity_error()
    lines = [f"| family | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    lines += [f"| {family} | {' | '.join(_cells(patch(small_model(family))))} |" for family in sorted(FAMILIES)]
    table = [":::{container} families", "", *lines, "", ":::"]  # on a phone it scrolls
    return "\n".join([f"transformers {transformers.__version__}:", "", *table, ""])


def _cells(report: Report) -> list[str]:
    replaced = Counter((e.kind, e.text) for e in report.entries if e.replaced)
    cells = []
    for kind in KINDS:
        parts = [_words(text, n) for (of, text), n in sorted(replaced.items()) if of == kind]
        cells.append(", ".join(parts) or "-")
    return cells


def _words(text: str, count: int) -> str:
    plain = ("fused_linear_ce", "add_rms_norm", "omitted where", "rope")
    return str(count) if text.startswith(plain) and "," not in text else f"{count} {text.removeprefix('fused_linear_')}"
