"""Draws the charts, and writes the tables of the page about benchmarks, from the results in `benchmarks/results`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks.plot import charts, save  # noqa: E402 the path comes first
from benchmarks.step_report import losses_are_wrong, verdicts  # noqa: E402
from benchmarks.targets import PRODUCTS, TARGETS, judge, measured_ms, peers  # noqa: E402
from llmk.registry import OPS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TIMES, GROWTH = RESULTS / "ops-h200.json", RESULTS / "growth-h200.json"
LATER_TIMES = RESULTS / "hybrid-ops-h100.json"
"""Operators that are not in `TIMES`, in the same form."""
H100_TIMES = RESULTS / "ops-h100.json"
"""The first workload of every operator, in the same form."""
LOSS_TIMES = RESULTS / "linear-loss-ops-h200.json"
"""`fused_linear_ce` with products of its own, beside PyTorch and Liger Kernel alone, in the same form."""
RECURRENCES = RESULTS / "recurrences-h100.json"
STEPS, CHUNKS = RESULTS / "train-step-h200.json", RESULTS / "chunks-h200.json"
LATER_STEPS = {
    "on an H100": "train-step-h100.json",
    "with bfloat16 logits": "train-step-bfloat16-h200.json",
    "of a mixture of experts": "train-step-moe-h200.json",
    "of hybrids": "train-step-hybrids-h100.json",
}
"""Steps of other models and in other ways: what is said of them, and the file."""
SIDE_BY_SIDE = "Each variant had a process of its own; they compiled side by side and were timed one at a time."
IGNORED, EXPERTS = RESULTS / "ignored-h200.json", RESULTS / "moe-h200.json"
PLANS = RESULTS / "plans-h100.json"
LAUNCH_MS = 0.01  # a multiple of a floor below what a launch takes says nothing
AS_FAST = 0.02
"""Times within that of one another are the same."""
MUCH_SMALLER = 0.9
EARLIER_LOSSES = (
    "This run, and the charts and the table of chunks where there are any, are from before the losses over a "
    "vocabulary had products of their own, with bfloat16 logits; [the page of losses](../losses.md#speed-and-memory) "
    "has later times."
)
"""The note on losses that were measured before 28 November 2026."""
OVERWRITES = {("liger-kernel", op) for op in ("cross_entropy", "swiglu", "geglu", "rope")}
"""Ways and operators whose forward or backward pass works in the memory of its inputs."""
NAMES = {
    "torch compiled": "compiled PyTorch",
    "torch eager": "PyTorch",
    "liger-kernel": "Liger Kernel",
    "liger-kernel cute": "Liger Kernel's CuTe",
    "quack-kernels": "QuACK",
    "cut-cross-entropy": "Cut Cross-Entropy",
    "fla-core": "flash-linear-attention",
}
"""The names of ways in sentences."""

ELSEWHERE = {
    **dict.fromkeys(
        ("fused_linear_policy", "fused_linear_preference", "fused_linear_jsd", "fused_linear_jsd_ce"),
        "The functions of `llmk.losses` that call it are timed [beside TRL and Liger](../losses.md#speed-and-memory).",
    ),
    **dict.fromkeys(
        ("gated_delta_rule", "gated_linear_attention"),
        "Whole models with it are among the [training steps](../training-steps.md).",
    ),
    "vocab_parallel_linear_ce": "Losses over two GPUs are timed [on the page of benchmarks](../benchmarks.md"
    "#on-several-gpus).",
}
"""The places where an operator was measured that has no table of its own, or not only that."""
_CHUNKED = [
    "to generate one token at a time: the operator works on chunks of 64, that with `_step` after its name on one",
    "heads with more than 256 features for keys or values: the operator refuses them",
]
LIMITS = {
    "gated_delta_rule": _CHUNKED,
    "gated_linear_attention": _CHUNKED,
    "causal_conv1d": ["filters of more than 8 taps: the operator refuses them"],
    "fused_linear_distill": ["one teacher alone, given by hidden states: `fused_linear_jsd` is simpler to call"],
}
"""The uses to leave to other code, beyond what was measured."""

COLUMNS = "Forward and backward, in ms, and in brackets the peak memory above the inputs in MiB, gradients included."

Row = dict[str, Any]


def draw_plots(folder: Path) -> None:
    """`folder/NAME.svg` and `folder/NAME-*.svg` for every operator that was measured; others are removed."""
    drawn = set()
    for file in (TIMES, GROWTH, IGNORED, EXPERTS, PLANS, STEPS):
        if file.exists():
            for name, figure in charts(_read(file)).items():
                drawn.add(folder / f"{name}.svg")
                save(figure, folder / f"{name}.svg", file.name)
    for old in set(folder.glob("*.svg")) - drawn:
        old.unlink()


def benchmark_of(op: str, folder: Path, shown_from: str) -> Iterator[str]:
    """Yield an operator's tables and charts for its page, bars first."""
    rows = _rows_of(op)
    if rows:
        yield f"{COLUMNS}{_sizes(op)} {_where(_results_of(op))}"
        if ".linear_loss." in OPS[op].module:
            yield EARLIER_LOSSES
        yield _scrolling(_time_table(rows))
    own = _timed_both_ways(_read(LOSS_TIMES), op)
    if own:
        yield (
            "With products of its own and float32 logits, milliseconds and MiB as above. "
            f"{_where(_read(LOSS_TIMES))} Of other libraries Liger Kernel alone was timed."
        )
        yield _scrolling(_time_table(own))
    later = _h100_rows(op)
    if later:
        first = "Forward and backward, milliseconds and MiB as above. " if rows else f"{COLUMNS}{_sizes(op)} "
        yield f"{first}{_where(_read(H100_TIMES))}{_logits_are(op)}"
        yield _scrolling(_time_table(later))
    alone = list(_alone(op))
    yield from alone
    plots = list(_plots_of(op, folder, shown_from))
    if plots:
        yield (
            "In the charts 1.00 is [the floor](../benchmarks.md): the least time that the hardware allows, by the "
            "bytes that have to be moved and the products that have to be computed."
        )
    yield from plots
    if op == "fused_linear_ce" and CHUNKS.exists():
        yield from _chunks(_read(CHUNKS))
    if op in ELSEWHERE:
        yield ELSEWHERE[op]
    if not rows and not later and not plots and not alone:
        yield f"`python -m llmk.bench {op}` times it on your machine, beside plain PyTorch."


def _sizes(op: str) -> str:
    """Return what the numbers of a workload are, where they are not the input's shape."""
    return " A workload is tokens x hidden size x classes." if ".linear_loss." in OPS[op].module else ""


def when_not(op: str) -> str:
    """Return what other ways did better in the same run, and what holds for every operator."""
    rows = _rows_of(op)
    found = [text for workload in _workloads(rows) for text in _better(workload, _same(rows, workload))]
    found += LIMITS.get(op, [])
    general = (
        "For inference alone, or in eager mode with tensors so small that the host's time counts, plain PyTorch does "
        "as well. For double backward and forward-mode AD the operator raises an error."
    )
    if rows and _compiled_is_as_fast(rows):
        found.append("in a model that is compiled anyway, PyTorch's own code takes the same time and memory")
    if not found:
        return general
    return "\n".join([*(f"- {text[0].upper()}{text[1:]}." for text in found), f"- {general}"])


def _better(workload: str, same: list[Row]) -> Iterator[str]:
    """The fastest and the smallest other way of a workload, where it is faster or much smaller."""
    ours = [row for row in same if row["way"].startswith("llmk") and "error" not in row]
    fastest = min(peers(same), key=measured_ms, default=None)
    if not ours or fastest is None:
        return
    time = min(measured_ms(row) for row in ours)
    if measured_ms(fastest) < (1 - AS_FAST) * time:
        yield f"{workload}: {_name(fastest)} takes {_ms(measured_ms(fastest))} ms, llmk {_ms(time)}"
    memory = min(row["peak_mib"] or 0 for row in ours)
    smaller = [row for row in peers(same) if row["peak_mib"] is not None and row["peak_mib"] < MUCH_SMALLER * memory]
    if smaller:
        least = min(smaller, key=lambda row: row["peak_mib"])
        place = ", because it overwrites its inputs," if (least["way"], least["op"]) in OVERWRITES else ""
        yield (
            f"{workload}, where memory is short: {_name(least)} takes {least['peak_mib']:,.0f} MiB{place} in "
            f"{_ms(measured_ms(least))} ms, llmk {memory:,.0f} MiB in {_ms(time)} ms"
        )


def _compiled_is_as_fast(rows: list[Row]) -> bool:
    """Return True if compiled PyTorch takes no more time and memory than llmk, compiled, at any workload."""
    for workload in _workloads(rows):
        ways = {row["way"]: row for row in _same(rows, workload) if "error" not in row}
        ours, other = ways.get("llmk compiled"), ways.get("torch compiled")
        if ours is None or other is None or measured_ms(other) > (1 + AS_FAST) * measured_ms(ours):
            return False
        if (other["peak_mib"] or 0) > (1 + AS_FAST) * (ours["peak_mib"] or 0):
            return False
    return True


def _workloads(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["workload"] for row in rows))


def _same(rows: list[Row], workload: str) -> list[Row]:
    return [row for row in rows if row["workload"] == workload]


def _name(row: Row) -> str:
    return NAMES.get(row["way"], row["way"])


def _plots_of(op: str, folder: Path, shown_from: str) -> Iterator[str]:
    alt = {
        op: f"{op}: time of every workload and way, as a multiple of the floor",
        f"{op}-memory": f"{op}: peak memory of every workload and way",
        f"{op}-plans": f"{op}: time and memory of other plans of chunks and blocks beside the chosen one's",
    }
    for path in sorted(folder.glob(f"{op}.svg")) + sorted(folder.glob(f"{op}-*.svg")):
        text = alt.get(path.stem, f"{op}: time and memory against {path.stem.removeprefix(f'{op}-').replace('-', ' ')}")
        yield f"![{text}]({shown_from}/{path.name})"


def _rows_of(op: str) -> list[Row]:
    return _timed_both_ways(_results_of(op), op)


def _results_of(op: str) -> Row:
    """The later results where they have the operator, else the table of all."""
    later = _read(LATER_TIMES)
    return later if any(row["op"] == op for row in later["rows"]) else _read(TIMES)


def _h100_rows(op: str) -> list[Row]:
    """The operator's rows on an H100, none where its own table is of one."""
    if any(row["op"] == op for row in _read(LATER_TIMES)["rows"]):
        return []
    return _timed_both_ways(_read(H100_TIMES), op)


def _timed_both_ways(results: Row, op: str) -> list[Row]:
    """The operator's rows, if its backward pass was timed too."""
    rows = [row for row in results["rows"] if row["op"] == op and row["floor_full_ms"]]
    return [row for row in rows if row.get("error") != "forward only"]


def _read(path: Path) -> Row:
    return json.loads(path.read_text())


def _logits_are(op: str) -> str:
    return " The logits were float32." if ".linear_loss." in OPS[op].module else ""


def _alone(op: str) -> Iterator[str]:
    """The table of an operator that was timed without another way beside it."""
    results = _read(RECURRENCES)
    rows = [row for row in results["rows"] if row["call"].startswith(f"{op} ")]
    if not rows:
        return
    yield (
        "Milliseconds, replayed as CUDA graphs, and in brackets the peak memory above the inputs in MiB where it was "
        "measured, gradients included; rows x tokens, then the heads and their features. No other package was timed "
        f"beside it. {_where(results)}"
    )
    lines = ["| workload | forward | forward and backward |", "|---|---|---|"]
    for row in rows:
        memory = f" ({row['peak_mib']:,.0f})" if "peak_mib" in row else ""
        both = _ms(row["full_ms"]) + memory
        lines.append(f"| {row['call'].removeprefix(f'{op} ')} | {_ms(row['forward_ms'])} | {both} |")
    yield "\n".join(lines)


def overview() -> str:
    """Yield the parts of the page: where it was measured, and a line for the first workload of every operator."""
    results = _read(TIMES)
    names = dict.fromkeys(row["op"] for row in results["rows"] if row["floor_full_ms"])
    legend = (
        "The table has forward and backward passes: the floor in milliseconds, and the time of each way as a multiple "
        "of it, or in milliseconds where the floor is shorter than a launch takes."
    )
    h100 = _read(H100_TIMES)
    parts = [
        _about(results, TIMES),
        legend,
        _scrolling(_overview_table({op: _rows_of(op) for op in names})),
        f"## On an H100\n\n{_about(h100, H100_TIMES)} {h100['how']} The logits of losses were float32.",
        _scrolling(_overview_table({op: rows for op in OPS if (rows := _timed_both_ways(h100, op))})),
    ]
    return "\n\n".join(parts) + "\n"


def _overview_table(rows_of: dict[str, list[Row]]) -> Iterator[str]:
    yield "| operator, workload | floor ms | llmk | compiled | torch compiled | torch eager | best other |"
    yield "|---|---|---|---|---|---|---|"
    for op, rows in sorted(rows_of.items()):
        same = [row for row in rows if row["workload"] == rows[0]["workload"]]
        by_way, floor = {row["way"]: row for row in same}, same[0]["floor_full_ms"]
        best = min(peers(same), key=measured_ms, default=None)
        ways = ("llmk eager", "llmk compiled", "torch compiled", "torch eager")
        cells = [
            _ms(floor),
            *(_multiple(by_way[way]) if way in by_way else "" for way in ways),
            f"{_multiple(best)} {best['way']}" if best else "",
        ]
        yield f"| [{op}](ops/{op}.md#speed) {same[0]['workload']} | {' | '.join(cells)} |"


def _multiple(row: Row) -> str:
    if "error" in row:
        return "failed"
    time, floor = measured_ms(row), row["floor_full_ms"]
    return f"{time / floor:.2f}" if floor > LAUNCH_MS else f"{_ms(time)} ms"


def training_steps() -> str:
    """Return each model's table and the charts, for the page about training steps."""
    parts = [*_steps(_read(STEPS))]
    for what, file in LATER_STEPS.items():
        parts += _later_steps(_read(RESULTS / file), what, file)
    return "\n\n".join(parts) + "\n"


def _about(results: Row, file: Path) -> str:
    gemm, copy = results["ceilings"]["gemm_flops_per_s"], results["ceilings"]["copy_bytes_per_s"]
    others = ", ".join(f"{name} {version}" for name, version in results.get("peers", {}).items())
    return (
        f"{_where(results)} Triton {results['triton']}{others and f'; {others}'}. The same process "
        f"copied {copy / 1e12:.2f} TB/s and multiplied matrices of 8192 x 8192 at {gemm / 1e12:.0f} TFLOP/s: these are "
        f"the floors' ceilings. Every number is in `benchmarks/results/{file.name}`."
    )


def _where(results: Row) -> str:
    return (
        f"Measured on {results['date']} on one {results['device']}, torch {results['torch'].partition('+')[0]}, "
        f"{results['dtype'].removeprefix('torch.')}."
    )


def targets() -> str:
    """Return every target, and what the last run reached, for the contributors' page."""
    rows = [row for op in sorted({op for op, _ in TARGETS}) for row in _rows_of(op)]
    parts = [_legend(), _scrolling(_target_table(rows)), "## Training steps", *_step_verdicts()]
    return "\n\n".join(parts) + "\n"


def _step_verdicts() -> Iterator[str]:
    for path in (STEPS, *(RESULTS / file for file in LATER_STEPS.values())):
        results = _read(path)
        rows = results["rows"] if "H200" in results["device"] else []  # targets are of that GPU
        for model in dict.fromkeys(row["model"] for row in rows):
            for text in verdicts([row for row in rows if row["model"] == model]):
                yield f"{model}, `{path.name}`: {text}."


def _target_table(rows: list[Row]) -> Iterator[str]:
    yield "| operator, workload | target | reached | MiB allowed | MiB |"
    yield "|---|---|---|---|---|"
    for op, workload in dict.fromkeys((row["op"], row["workload"]) for row in rows):
        target = TARGETS.get((op, workload))
        if target is None:
            continue
        same = [row for row in rows if (row["op"], row["workload"]) == (op, workload)]
        by_way = {row["way"]: row for row in same}
        memory = [f"{target.mib:,.0f}", _mib(by_way["llmk eager"])] if target.mib else ["", ""]
        cells = [f"[{op}](ops/{op}.md#speed) {workload}", str(target), _verdict(by_way, same), *memory]
        yield f"| {' | '.join(cells)} |"


def _legend() -> str:
    return (
        "The target is judged on llmk's eager operator, and on the compiled one where that comes out differently. One "
        "in floors is of single calls, replayed; one in products is a multiple of the operator's own matrix products "
        "alone, both timed back to back; one in ms is of an eager call, the host included. None is met while another "
        "way is faster in the same run."
    )


def _scrolling(table: Iterator[str]) -> str:
    """A table whose cells do not break: on a phone it scrolls."""
    return "\n".join([":::{container} results", "", *table, "", ":::"])


def _time_table(rows: list[Row]) -> Iterator[str]:
    table = [["workload", "llmk", "llmk compiled", "PyTorch compiled", "PyTorch", "fastest other library"]]
    for workload in _workloads(rows):
        same = _same(rows, workload)
        by_way = {row["way"]: row for row in same}
        libraries = [row for row in peers(same) if not row["way"].startswith("torch")]
        best = min(libraries, key=measured_ms, default=None)
        ways = ("llmk eager", "llmk compiled", "torch compiled", "torch eager")
        cells = [_measured(by_way[way]) if way in by_way else "" for way in ways]
        cells.append(f"{_measured(best)} {_name(best)}" if best else "")
        table.append([workload, *cells])
    filled = [column for column in zip(*table, strict=True) if any(column[1:])]
    for number, line in enumerate(zip(*filled, strict=True)):
        yield f"| {' | '.join(line)} |"
        if number == 0:
            yield "|---" * len(line) + "|"


def _measured(row: Row) -> str:
    """Milliseconds, and MiB in brackets."""
    if "error" in row:
        return "failed"
    memory = f" ({row['peak_mib']:,.0f})" if row["peak_mib"] is not None else ""
    return _ms(measured_ms(row)) + memory


def _ms(value: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{value:#.3g}".rstrip(".")


def _verdict(by_way: dict[str, Row], same: list[Row]) -> str:
    """Met, or what it misses by."""
    target = TARGETS.get((same[0]["op"], same[0]["workload"]))
    if target is None:
        return ""
    if target.unit == "products" and PRODUCTS not in by_way:
        return "not judged: this run did not time the products alone"
    eager, compiled = (judge(by_way[way], same) for way in ("llmk eager", "llmk compiled"))
    assert eager is not None
    assert compiled is not None
    number = "{:.3f} ms" if target.unit == "ms" else "{:.3f}"
    text = ", ".join(["**met**" if eager.met else "missed", number.format(eager.reached), *eager.misses])
    if eager.met == compiled.met:
        return text
    return f"{text}; compiled {'met' if compiled.met else 'missed'}, {number.format(compiled.reached)}"


def _mib(row: Row) -> str:
    return row["error"] if "error" in row else f"{row['peak_mib']:,.0f}"


def _chunks(results: Row) -> Iterator[str]:
    N, H, V = results["shape"]
    yield (
        f"What `chunk_size` trades in `fused_linear_ce`, {N:,} tokens, hidden size {H:,}, {V:,} classes: forward and "
        "backward back to back, beside the products alone in the same chunks. Past two chunks the weight's gradient "
        "is summed in float32, which takes more memory here than smaller chunks save. "
        f"`python -m benchmarks.chunks`, {results['date']}, one {results['device']}."
    )
    lines = ["| tokens in a chunk | ms | products ms | ratio | MiB |", "|---|---|---|---|---|"]
    for row in sorted(results["rows"], key=lambda row: row["chunk_rows"]):
        chosen = "" if row["chunk_size"] else " (chosen by default)"
        cells = [f"{row['chunk_rows']:,}{chosen}", _ms(row["ms"]), _ms(row["products_ms"])]
        lines.append(f"| {' | '.join(cells)} | {row['ms'] / row['products_ms']:.3f} | {row['mib']:,.0f} |")
    yield _scrolling(iter(lines))


def _steps(results: Row) -> Iterator[str]:
    """Each model's table, then the charts."""
    versions = ", ".join(f"{name} {version}" for name, version in results["peers"].items())
    yield (
        "The tables have one training step of Hugging Face models made from a configuration: forward, backward and "
        "fused AdamW on one repeated batch. The variants of a model ran in one process, from the same weights. `eager` "
        "and `compiled` are plain transformers, `llmk` is the patched model, `llmk backend` is `llmk.compile`. Peak "
        "memory includes weights and optimizer. All variants have the same first loss; later ones differ by rounding. "
        f"Measured on {results['date']} on one {results['device']}: torch "
        f"{results['torch']}, {versions}, "
        f"{results['dtype'].removeprefix('torch.')}. Every number is in `benchmarks/results/{STEPS.name}`."
    )
    yield from _models(results)
    for name, what in (("train-step", "time"), ("train-step-memory", "peak memory")):
        yield f"![{what} of a training step of every model and variant](ops/plots/{name}.svg)"


def _later_steps(results: Row, what: str, file: str) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results["peers"].items())
    yield (
        f"These are steps {what}, measured on {results['date']} on one {results['device']}: torch {results['torch']}, "
        f"{versions}. "
        f"{results.get('how', SIDE_BY_SIDE)} Every number is in `benchmarks/results/{file}`."
    )
    yield from _models(results, f", {what}" if what.startswith(("with", "on")) else "")


def _models(results: Row, what: str = "") -> Iterator[str]:
    for model in dict.fromkeys(row["model"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["model"] == model]
        yield f"## {model}, {rows[0]['batch_size']} x {rows[0]['seq_len']} tokens{what}"
        yield _scrolling(_step_table(rows))
        yield from (f"{row['variant']} failed: `{row['error']}` ..." for row in rows if "error" in row)


def _step_table(rows: list[Row]) -> Iterator[str]:
    yield "| variant | ms | tokens/s | peak GiB | graphs | breaks | recompiles | first loss | last loss |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if "error" in row:
            yield f"| {row['variant']} | failed | | | | | | | |"
            continue
        counts = [str(row[key]) if row["compiled"] else "" for key in ("graphs", "breaks", "recompiles")]
        last = f"{row['losses'][-1]:.4f}" + (" **wrong**" if losses_are_wrong(row, rows) else "")
        measured = [f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.1f}"]
        cells = [row["variant"], *measured, *counts, f"{row['losses'][0]:.3f}", last]
        yield f"| {' | '.join(cells)} |"
