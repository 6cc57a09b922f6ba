"""The output of `benchmarks.train_step`: a table for each model, and whether targets are met."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

LOSS_TOLERANCE = 0.05
"""The relative difference from the first and last loss of plain transformers, eager, above which losses are wrong."""


@dataclass(frozen=True)
class StepTarget:
    """The limits for a training step of a variant of a model; `peers`: what others reached when they were set."""

    batch_size: int
    seq_len: int
    ms: float
    gib: float
    breaks: int
    peers: str

    def __str__(self) -> str:
        return f"{self.ms:.0f} ms, {self.gib:.0f} GiB, {self.breaks} breaks"


STEP_TARGETS = {
    ("llama-3.2-1b", "llmk compiled"): StepTarget(
        8, 2048, ms=220, gib=23, breaks=0, peers="compiled 274 ms, 31.5 GiB; Liger 244 ms, 26.3 GiB"
    )
}
"""The targets on one NVIDIA H200 in bfloat16, by model and variant."""


def target_of(row: Row) -> StepTarget | None:
    target = STEP_TARGETS.get((row["model"], row["variant"]))
    same = target and (row["batch_size"], row["seq_len"]) == (target.batch_size, target.seq_len)
    return target if same else None


def misses(row: Row, rows: Sequence[Row]) -> list[str] | None:
    """Every way in which a row misses its target; None where it has none.

    Args:
        row: As `benchmarks.train_step` writes it.
        rows: All of the same run. A step that another library's or plain transformers' beats misses its target.
    """
    target = target_of(row)
    if target is None:
        return None
    if "error" in row:
        return [row["error"]]
    found = [f"{row['ms'] / target.ms - 1:.1%} over"] if row["ms"] > target.ms else []
    if row["peak_gib"] is not None and row["peak_gib"] > target.gib:
        found.append(f"{row['peak_gib']:.1f} GiB")
    if row["breaks"] > target.breaks:
        found.append(f"{row['breaks']} breaks")
    others = [other for other in same_model(row, rows) if "llmk" not in other["variant"] and "error" not in other]
    fastest = min(others, key=lambda other: other["ms"], default=row)
    if fastest["ms"] < row["ms"]:
        found.append(f"{fastest['variant']} {fastest['ms']:.0f} ms")
    if losses_are_wrong(row, rows):
        found.append(f"loss {row['losses'][-1]:.4f}")
    return found


def losses_are_wrong(row: Row, rows: Sequence[Row]) -> bool:
    """Return True if the first or the last loss is not that of plain transformers, eager, where the same run has it."""
    eager = next((other for other in same_model(row, rows) if other["variant"] == "eager"), row)
    if "error" in eager or "error" in row:
        return False
    pairs = [(row["losses"][i], eager["losses"][i]) for i in (0, -1)]
    return not all(math.isclose(loss, right, rel_tol=LOSS_TOLERANCE) for loss, right in pairs)


def same_model(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows of the same model with as many tokens in a step."""
    key = ("model", "batch_size", "seq_len")
    return [other for other in rows if all(other[name] == row[name] for name in key)]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One model: a line for each variant, at most 80 columns wide, then verdicts."""
    first = rows[0]
    yield f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step"
    yield _line("", "ms", "tokens/s", "GiB", "graphs", "breaks", "recomp", "loss 1", "last")
    for row in rows:
        yield f"  {row['variant']:<14}  {row['error']}" if "error" in row else _measured(row)
    wrong = [row["variant"] for row in rows if losses_are_wrong(row, rows)]
    if wrong:
        yield f"  wrong losses: {', '.join(wrong)}"
    yield from (f"  {text}" for text in verdicts(rows))


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Say of each row that has a target whether it meets it."""
    for row in rows:
        missed = misses(row, rows)
        if missed is not None:
            verdict = f"missed: {', '.join(missed)}" if missed else "met"
            yield f"target of {row['variant']}, {target_of(row)}: {verdict}"


def _measured(row: Row) -> str:
    counts = [str(row[key]) if row["compiled"] else "" for key in ("graphs", "breaks", "recompiles")]
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    losses = [f"{row['losses'][0]:.3f}", f"{row['losses'][-1]:.4f}"]
    return _line(row["variant"], f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", peak, *counts, *losses)


def _line(name: str, ms: str, tokens: str, gib: str, *others: str) -> str:
    return (
        f"  {name:<14}{ms:>8}{tokens:>10}{gib:>6}" + "".join(f"{text:>7}" for text in others[:-1]) + f"{others[-1]:>10}"
    )
