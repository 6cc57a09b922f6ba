"""Programs of `tools/`: what they see, and that they do not see what is not there."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmk.registry.devices import INTERPRET
from tools import snapshot
from tools.release import release_text

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: a snapshot is of plain PyTorch")


def snapshotted(action: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["snapshot", action, str(file), "--only", "relu_squared", "sft"])
    return snapshot.main()


def test_a_snapshot_sees_one_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    assert snapshotted("write", before, monkeypatch) == 0
    names = list(json.loads(before.read_text())["results"])
    assert {name.partition("[")[0] for name in names} == {"relu_squared", "losses.sft"}
    assert snapshotted("compare", before, monkeypatch) == 0
    assert capsys.readouterr().out == f"0 differences, {len(names)} results\n"
    loss, make = snapshot.LOSSES["sft"]

    def planted(input: Tensor, *args: Tensor, **options: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = loss(input, *args, **options)
        return value, metrics | {name: torch.nextafter(each, each + 1) for name, each in list(metrics.items())[-1:]}

    monkeypatch.setitem(snapshot.LOSSES, "sft", (planted, make))
    assert snapshotted("compare", before, monkeypatch) == 1
    out = capsys.readouterr().out
    assert out.count("results: losses.sft") == 2
    assert out.endswith(f"2 differences, {len(names)} results\n")


@pytest.mark.parametrize("part", ["signatures", "schemas", "promises"])
def test_a_snapshot_sees_what_has_gone(part: str) -> None:
    now: dict[str, dict[str, str]] = {
        "signatures": {"f": "(x)"},
        "schemas": {"g": "g(Tensor x) -> Tensor"},
        "promises": {"h": "It returns."},
        "results": {},
    }
    before = now | {part: now[part] | {"gone": "()"}, "results": {"not asked for": "1"}}
    assert list(snapshot.differences(before, now)) == [f"{part}: gone\n  before ()\n  after  not there"]
    assert list(snapshot.differences(before | {part: now[part]}, now)) == []


CHANGES = """# Changelog

## Unreleased

- Next.

## 1.2.0 (2026-11-28)

- This one.

## 1.1.0 (2026-10-01)

- Older.
"""


def test_the_text_of_a_release_is_its_section() -> None:
    citation = "title: llmk\nversion: 1.2.0\nlicense: Apache-2.0\n"
    assert release_text("v1.2.0", "1.2.0", CHANGES, citation) == "- This one."
    assert release_text("v1.1.0", "1.1.0", CHANGES, "a: b\nversion: 1.1.0\n") == "- Older."
    with pytest.raises(ValueError, match=r"^tag: expected v1.2.0, as llmk.__version__ has it, got v1.2.1$"):
        release_text("v1.2.1", "1.2.0", CHANGES, citation)
    with pytest.raises(ValueError, match=r"^CITATION.cff: expected version: 1.1.0$"):
        release_text("v1.1.0", "1.1.0", CHANGES, citation)
    with pytest.raises(ValueError, match=r"^CHANGELOG.md: expected one section '## 2.0.0 \(YYYY-MM-DD\)', got 0$"):
        release_text("v2.0.0", "2.0.0", CHANGES, "a: b\nversion: 2.0.0\n")
