"""The results of a run: a table for the terminal, a plot and a JSON file."""

import contextlib
import json
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import torch
import triton
from meter import Measured
from tqdm import tqdm

import llmk

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

# The two models round differently and every update carries the difference on, so the losses of later steps agree to
# fewer digits than one step's rounding. Relative to the loss, or to 1 where it is smaller.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
ON_A_CPU = """
On a CPU llmk runs plain PyTorch too, so that this table shows two things: the
losses are equal, and the model compiles into one graph. Speed and memory say
nothing of a GPU, where llmk's kernels run; docs/training-steps.md has those."""
STEADY = 1.5  # the spread of step times up to which speeds are worth comparing
COLORS = {"llmk": "#1a4e8a", "backend": "#3a9a5b", "plain": "#f2a33a"}
LABELS = {"llmk": "llmk", "backend": 'plain PyTorch, backend="llmk"', "plain": "plain PyTorch"}


@dataclass
class Result:
    blocks: str
    losses: list[float]
    measured: Measured | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Result":
        return cls(values["blocks"], values["losses"], Measured(**values["measured"]))


@dataclass(frozen=True)
class Difference:
    """The largest difference between the losses of two runs, relative as the tolerances are."""

    largest: float
    step: int  # counted from 1
    tolerance: float

    @classmethod
    def of(cls, ours: Result, plain: Result, dtype: torch.dtype) -> "Difference":
        relative = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(ours.losses, plain.losses, strict=True)]
        relative = [math.inf if math.isnan(x) else x for x in relative]
        step = max(range(len(relative)), key=relative.__getitem__)
        return cls(relative[step], step + 1, TOLERANCES[dtype])

    @property
    def within(self) -> bool:
        return self.largest <= self.tolerance


def progress_bar(result: Result, steps: int, shown: bool = True) -> "tqdm[int]":
    """The steps that are still to do, in a bar that leaves its postfix the half of 80 columns."""
    done = len(result.losses)
    interval = 0.1 if sys.stderr.isatty() else 10.0  # a log needs fewer lines than a terminal
    return tqdm(
        range(done, steps),
        result.blocks,
        initial=done,
        total=steps,
        mininterval=interval,
        disable=not shown,
        bar_format="{desc:<5} {bar:16} {n_fmt}/{total_fmt} {elapsed}{postfix}",
    )


@contextlib.contextmanager
def compiling(bar: "tqdm[int]") -> Iterator[None]:
    """Say in the bar, as long as the first step takes, that it compiles and since when."""
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(bar.mininterval):
            seconds = time.monotonic() - start
            bar.set_postfix_str(f"the first step compiles: {seconds:.0f} s of 15 to 60")

    bar.set_postfix_str("the first step compiles, 15 to 60 s")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def summary(result: Result) -> str:
    measured = result.measured
    assert measured is not None
    speed, memory = measured.tokens_per_second, measured.peak_memory / 2**20
    return f"loss {result.losses[-1]:.3f}, {speed:,.0f} tokens/s, {memory:,.0f} MiB"


def compare(results: list[Result], dtype: torch.dtype) -> str:
    """A table of the runs side by side, at most 80 columns wide."""
    lines = ["", row("", [result.blocks for result in results], f"{results[0].blocks} / {results[-1].blocks}")]
    steps = len(results[0].losses)
    for step in sorted({round(1 + (steps - 1) * i / 6) for i in range(7)}):
        lines.append(row(f"loss at step {step}", [f"{result.losses[step - 1]:.6f}" for result in results]))
    for name, value, digits in MEASURES:
        values = [value(result.measured) for result in results if result.measured]
        ratio = f"{values[0] / values[1]:.2f}" if digits is not None and len(values) == 2 else ""
        lines.append(row(name, [f"{value:,.{digits or 0}f}" for value in values], ratio))
    spread = max(result.measured.spread for result in results if result.measured)
    if spread > STEADY:
        lines += ["", f"step times varied {spread:.1f}-fold: the machine was busy, so the speeds say little"]
    for result in results[:-1]:
        name = [f"{result.blocks}:"] if len(results) > 2 else []
        lines += ["", *name, verdict(Difference.of(result, results[-1], dtype), dtype)]
    return "\n".join(line.rstrip() for line in lines)


MEASURES: list[tuple[str, Callable[[Measured], float], int | None]] = [  # name, value, digits if a ratio makes sense
    ("tokens/s", lambda m: m.tokens_per_second, 0),
    ("peak memory, MiB", lambda m: m.peak_memory / 2**20, 0),
    ("first step (compiles), s", lambda m: m.first_step_seconds, 1),
    ("graph breaks", lambda m: m.graph_breaks, None),
    ("recompiles after step 2", lambda m: m.recompiles, None),
]


def row(name: str, values: list[str], ratio: str = "") -> str:
    return f"{name:<28}" + "".join(f"{value:>16}" for value in values) + (f"{ratio:>16}" if len(values) == 2 else "")


def verdict(difference: Difference, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    judgement = "equal within" if difference.within else "NOT equal within"
    return (
        f"largest relative difference of the losses: {difference.largest:.1e}, at step {difference.step}\n"
        f"{judgement} what {name} rounding explains over a run (at most {difference.tolerance:.0e})"
    )


def plot_losses(file: Path, title: str, results: list[Result]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for result in reversed(results):  # plain PyTorch wide and pale below, llmk thin on top
        steps, width = range(1, len(result.losses) + 1), 5.0 if result.blocks == "plain" else 1.5
        axes.plot(steps, result.losses, color=COLORS[result.blocks], lw=width, label=LABELS[result.blocks])
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save_json(
    file: Path, config: dict[str, Any], device: torch.device, results: list[Result], dtype: torch.dtype
) -> None:
    differences = [Difference.of(result, results[-1], dtype) for result in results[:-1]]
    difference = asdict(max(differences, key=lambda each: each.largest)) if differences else None
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "llmk": llmk.__version__,
        },
        "config": config,
        "largest_relative_difference": difference,
        "runs": {result.blocks: asdict(result) for result in results},
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
