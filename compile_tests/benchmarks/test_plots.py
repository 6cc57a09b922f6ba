"""Benchmark results become charts, growth curves and verdicts; no chart or target outlives what it was made from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.targets import PRODUCTS, TARGETS, judge
from llmk.registry import OPS

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from benchmarks import growth, plot

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "NVIDIA H200", "torch": "2.11.0", "dtype": "torch.bfloat16", "date": "2026-11-20"}


def row(op: str, workload: str, way: str, **measured: Any) -> dict[str, Any]:
    same = {"op": op, "workload": workload, "way": way, "floor_forward_ms": 0.2, "floor_full_ms": 0.5}
    return same | {"bound": "memory", "forward_ms": 0.2, "full_ms": 9.0, "peak_mib": 100.0} | measured


def fused(way: str, sustained: float, mib: float | None = 2000.0) -> dict[str, Any]:
    return row("fused_linear_ce", "8192x4096x128256", way, bound="matrix", full_sustained_ms=sustained, peak_mib=mib)


ROWS = [
    row("softmax", "8192x4096", "llmk eager", replayed_ms=0.55),
    row("softmax", "8192x4096", "llmk compiled", replayed_ms=0.60),
    row("softmax", "8192x4096", "torch compiled", replayed_ms=0.59),
    {
        "op": "softmax",
        "workload": "8192x4096",
        "way": "liger-kernel",
        "floor_full_ms": 0.5,
        "bound": "memory",
        "error": "refused\nand more",
    },
    row("softmax", "8192x4096", "torch eager", full_ms=9.99),  # could not be captured
    fused("llmk eager", 41.0),
    fused("llmk compiled", 41.0, 3000.0),
    fused("quack-kernels", 41.5, 4072.0),
    fused(PRODUCTS, 40.0, None),
    row("fused_linear_ce", "8192x4096x128256", "cut-cross-entropy", bound="matrix", full_ms=150.0),  # not sustained
]


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg.read_text())


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "results.json"
    file.write_text(json.dumps({**ABOUT, "rows": rows}))
    return file


def test_bar_charts(tmp_path: Path) -> None:
    file = write(tmp_path, ROWS)
    assert plot.main([str(file), "--out", str(tmp_path / "a")]) == 0
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"softmax.svg", "fused_linear_ce.svg", "fused_linear_ce-memory.svg"}
    softmax = texts(tmp_path / "a" / "softmax.svg")
    assert {"1.10", "1.20", "1.18", "refused", "19.98*", "liger-kernel", "8192x4096: floor 0.5 ms"} <= set(softmax)
    assert {"82.00", "80.00"} <= set(texts(tmp_path / "a" / "fused_linear_ce.svg"))  # sustained
    memory = texts(tmp_path / "a" / "fused_linear_ce-memory.svg")
    assert {"2,000", "3,000", "4,072"} <= set(memory)
    assert PRODUCTS not in memory
    plot.main([str(file), "--out", str(tmp_path / "b")])
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other-kernels"):
        plot.charts({**ABOUT, "rows": [row("softmax", "8192x4096", "other-kernels")]})
    with pytest.raises(ValueError, match="expected rows"):
        plot.charts(ABOUT)
    file = write(tmp_path, ROWS)
    with pytest.raises(SystemExit, match="softmax"):
        plot.main([str(file), str(file)])
    with pytest.raises(SystemExit, match="no chart rope"):
        plot.main([str(file), "--charts", "rope"])


def test_targets_judge() -> None:
    eager, compiled = judge(ROWS[0], ROWS), judge(ROWS[1], ROWS)
    assert eager is not None
    assert eager.met
    assert eager.reached == pytest.approx(1.10)
    assert eager.over == pytest.approx(1.10 / 1.12 - 1)
    assert compiled is not None
    assert compiled.misses == ("7.1% over", "torch compiled 1.18")
    fused_eager, fused_compiled = judge(ROWS[5], ROWS), judge(ROWS[6], ROWS)
    assert fused_eager is not None
    assert fused_eager.met
    assert fused_eager.reached == pytest.approx(1.025)
    assert fused_compiled is not None
    assert fused_compiled.misses == ("3,000 MiB",)
    with pytest.raises(ValueError, match=PRODUCTS):
        judge(ROWS[5], ROWS[:8])


def test_other_units_judge() -> None:
    giou = judge(row("giou_loss", "32x256 boxes", "llmk eager", replayed_ms=0.02, full_ms=0.1), [])
    assert giou is not None
    assert giou.misses == ("25.0% over",)
    linear = row("linear_act", "8192x8192x8192 relu", "llmk eager", forward_ms=0.23, replayed_ms=0.55, bound="matrix")
    forward_only = row("linear_act", linear["workload"], "quack-kernels", forward_ms=0.21, error="forward only")
    verdict = judge(linear, [linear, forward_only])
    assert verdict is not None
    assert verdict.misses == ("forward 1.15", "forward of quack-kernels 1.05")
    failed = judge({**ROWS[3], "way": "llmk eager"}, ROWS)
    assert failed is not None
    assert not failed.met
    assert judge(row("softmax", "1x1", "llmk eager"), []) is None


def test_targets_are_of_workloads() -> None:
    names: set[tuple[str, str]] = set()
    with FakeTensorMode():
        for op in OPS.values():
            workloads = op.workloads(torch.device("cpu"), torch.bfloat16) if op.workloads else ()
            names |= {(op.name, sample.why) for sample in workloads}
    assert set(TARGETS) <= names


@pytest.mark.usefixtures("no_cpp")
def test_growth_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "growth.json"
    assert growth.main(["softmax", "--device", "cpu", "--repeats", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["way"], r["size"]) for r in rows] == [("llmk eager", 4), ("torch compiled", 4), ("llmk eager", 12)]
    assert all(r["full_ms"] > 0 and r["floor_full_ms"] > 0 for r in rows)
    assert plot.main([str(file), "--out", str(tmp_path)]) == 0
    assert {"llmk eager", "torch compiled", "columns"} <= set(texts(tmp_path / "softmax-columns.svg"))


@pytest.mark.parametrize("curve", growth.CURVES, ids=lambda curve: f"{curve.op}-{curve.against}")
def test_every_curve_grows(curve: growth.Curve) -> None:
    op = OPS[curve.op]
    assert op.cost is not None
    for _, sample, _ in growth.points(curve, torch.device("cpu")):
        op.overload(*sample.args, **sample.kwargs)
        assert op.cost(*sample.args, **sample.kwargs).bytes_full > 0
