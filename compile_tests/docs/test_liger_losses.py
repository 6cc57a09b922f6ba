"""The calls that docs/liger-losses.md has side by side give the same loss and gradients, where Liger is installed."""

import re
from typing import Any

import pytest
import torch

from compile_tests.helpers.pages import ROOT

pytest.importorskip("liger_kernel.chunked_loss")

PAGE = (ROOT / "docs" / "liger-losses.md").read_text()
SETUP, *PAIRS = re.split(r"^(?=```py\n)", PAGE, flags=re.MULTILINE)


def run(text: str, language: str, names: dict[str, Any]) -> None:
    for code in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(code, names)


def test_calls_side_by_side_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    names: dict[str, Any] = {}
    run(SETUP, "python", names)
    assert len(PAIRS) == 12
    for pair in PAIRS:
        run(pair, "py", names)
        run(pair, "python", names)
        given = names["hidden"], names["weight"]
        torch.testing.assert_close(names["loss"], names["theirs"])
        gradients = [torch.autograd.grad(names[loss], given) for loss in ("loss", "theirs")]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6, msg=lambda text, pair=pair: f"{pair}\n{text}")
