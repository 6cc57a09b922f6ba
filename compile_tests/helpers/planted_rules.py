"""A backend whose only rule is a test's own, and why the backend leaves a match."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from llmk.compiler import Report, backend
from llmk.compiler.patterns import GraphBuilder, RewritePattern
from llmk.compiler.rules import RewriteRule

aten = torch.ops.aten
Built = Callable[[GraphBuilder, Mapping[str, Any]], Any]


def planted(monkeypatch: pytest.MonkeyPatch, build: Built, *results: Any) -> None:
    """Have the backend know this rule and no other."""
    rule = RewriteRule("planted", aten.mul.Tensor, ("self", "other"), RewritePattern(results=results, build=build))
    monkeypatch.setattr(backend, "all_rules", lambda: [rule])
    monkeypatch.setattr(backend.Backend, "rules", [rule])


def reasons(found: Report) -> str:
    return "; ".join(note.reason for note in found.left)
