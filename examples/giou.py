"""Train a small detector with the GIoU loss in five ways and compare the time of a step.

    python examples/giou.py                             # a size for this machine
    python examples/giou.py --batch 32 --boxes 256      # where launches, not boxes, take the time

Every image has room for `--boxes` boxes, and the targets that it lacks are padding. The loss is plain PyTorch or
`llmk.functional.giou_loss`, the step around it eager or compiled; on a GPU the compiled step is replayed as CUDA graphs
(`mode="reduce-overhead"`). All ways start from the same weights and see the same batches, so that their final losses
agree, and take turns, so that none has a quieter machine. The output folder then holds giou.json and giou.png.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.colors
import torch
import triton
from report import COLORS, TOLERANCES
from torch import Tensor, nn
from tqdm import tqdm

import llmk
from llmk.functional import giou_loss
from llmk.ops.loss.giou_loss import giou_loss_reference

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

WARMUP_STEPS = 3  # the first compiles
BATCHES = 4  # the training data, seen again and again
HIDDEN = 64
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"plain": giou_loss_reference, "llmk": giou_loss}


@dataclass(frozen=True)
class Way:
    """One way to train: which loss, and what of it is compiled."""

    name: str
    loss: str
    compiled: str = "nothing"


WAYS = [
    Way("plain loss, eager", "plain"),
    Way("plain loss compiled, eager step", "plain", "loss"),
    Way("llmk loss, eager", "llmk"),
    Way("plain loss in the compiled step", "plain", "step"),
    Way("llmk loss in the compiled step", "llmk", "step"),
]


@dataclass(frozen=True)
class Result:
    way: str
    dtype: str
    step_ms: float
    loss_ms: float  # forward and backward of the loss alone
    losses: list[float]


class Detector(nn.Module):
    """A few convolutions, a query for each box, and a head that gives its corners."""

    def __init__(self, boxes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, HIDDEN, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.queries = nn.Parameter(torch.randn(boxes, HIDDEN))
        self.hidden = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([0.3, 0.3, 0.7, 0.7]))  # overlaps all targets

    def forward(self, images: Tensor) -> Tensor:
        x = self.backbone(images).unsqueeze(1) + self.queries  # [batch, boxes, HIDDEN]
        return self.head(torch.relu(self.hidden(x)))


def make_batch(batch: int, boxes: int) -> tuple[Tensor, Tensor]:
    """Noisy images that say by how much their boxes are shifted, and the boxes, a number of them for each image."""
    shift = 0.2 * torch.rand(batch, 1, 2) - 0.1
    place = 0.2 * torch.rand(boxes, 4, generator=torch.Generator().manual_seed(0)) - 0.1  # of each query's box
    targets = torch.tensor([0.3, 0.3, 0.7, 0.7]) + place + torch.cat([shift, shift], dim=-1)
    count = torch.randint(max(1, boxes // 4), boxes + 1, (batch, 1))
    targets = torch.where((torch.arange(boxes) < count).unsqueeze(-1), targets, 0.0)
    images = 0.1 * torch.randn(batch, 3, 64, 64)
    images[:, :2] += 10 * shift[:, 0, :, None, None]
    return images, targets


class Clock:
    """Milliseconds of a call: what the device took from its start to its end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, fn: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            fn()
            return 1e3 * (time.perf_counter() - started)
        torch.cuda.synchronize(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def median(self, fn: Callable[[], Any], repeats: int) -> float:
        for _ in range(WARMUP_STEPS):
            fn()
        return statistics.median(self(fn) for _ in range(repeats))


class Run:
    """One way to train, set up and ready for its next step."""

    def __init__(self, way: Way, dtype: torch.dtype, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.way, self.dtype, self.clock = way, dtype, Clock(args.device)
        self.model = Detector(args.boxes).to(args.device, dtype)
        batches = [make_batch(args.batch, args.boxes) for _ in range(BATCHES)]
        self.batches = [tuple(x.to(args.device, dtype) for x in batch) for batch in batches]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.loss = LOSSES[way.loss] if way.compiled == "nothing" else torch.compile(LOSSES[way.loss], fullgraph=True)
        self.loss_of = self._loss_of
        if way.compiled == "step":
            mode = "reduce-overhead" if args.device.type == "cuda" else "default"
            self.loss_of = torch.compile(self._loss_of, fullgraph=True, mode=mode)
        self.losses: list[Tensor] = []
        self.step_ms: list[float] = []

    def _loss_of(self, images: Tensor, targets: Tensor) -> Tensor:
        loss = LOSSES[self.way.loss] if self.way.compiled == "step" else self.loss
        return loss(self.model(images), targets)

    def _step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = self.loss_of(*self.batches[len(self.losses) % BATCHES])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach().clone())  # a CUDA graph writes the next one over it

    def step(self) -> None:
        self.step_ms.append(self.clock(self._step))

    def result(self, repeats: int) -> Result:
        boxes, targets = self.model(self.batches[0][0]).detach().requires_grad_(), self.batches[0][1]
        loss_ms = self.clock.median(lambda: torch.autograd.grad(self.loss(boxes, targets), boxes), repeats)
        step_ms = statistics.median(self.step_ms[WARMUP_STEPS:])
        return Result(self.way.name, dtype_name(self.dtype), step_ms, loss_ms, torch.stack(self.losses).tolist())


def compare(dtype: torch.dtype, args: argparse.Namespace, bar: "tqdm[Any]") -> list[Result]:
    """All ways take a step in turn."""
    torch._dynamo.reset()
    runs = [Run(way, dtype, args) for way in WAYS]
    for _ in range(WARMUP_STEPS + args.steps):
        for run in runs:
            run.step()
            bar.update()
    return [run.result(args.steps) for run in runs]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- what is left of it


def by_dtype(results: list[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(result.dtype for result in results)
    return {name: [result for result in results if result.dtype == name] for name in names}


def table(results: list[Result]) -> str:
    """Make a table that is at most 80 columns wide."""
    lines = []
    for name, rows in by_dtype(results).items():
        lines += ["", f"{name:<36}{'step ms':>11}{'loss alone ms':>17}{'final loss':>14}"]
        fastest = min(row.step_ms for row in rows)
        for row in rows:
            mark = " *" if row.step_ms == fastest else ""
            lines.append(f"{row.way:<36}{row.step_ms:>11.3f}{row.loss_ms:>17.3f}{row.losses[-1]:>14.6f}{mark}")
        lines.append(verdict(rows, TOLERANCES[DTYPES[name]]))
    return "\n".join([*lines, "", "* the fastest step"])


def difference(rows: list[Result]) -> float:
    """The largest difference of the final losses, relative to the loss, or to 1 where it is smaller."""
    final = [row.losses[-1] for row in rows]
    return (max(final) - min(final)) / max(1.0, abs(final[0]))


def verdict(rows: list[Result], tolerance: float) -> str:
    largest = difference(rows)
    judgement = "equal within" if largest <= tolerance else "NOT equal within"
    return f"final losses differ by {largest:.1e}: {judgement} what rounding explains ({tolerance:.0e})"


def pale(color: str) -> tuple[float, ...]:
    return tuple(1 - 0.35 * (1 - part) for part in matplotlib.colors.to_rgb(color))


def plot(file: Path, title: str, results: list[Result]) -> None:
    """Bars for the steps, and inside each one the loss alone."""
    panels_of = by_dtype(results)
    size = (1 + 4.5 * len(panels_of), 3.4)
    figure, panels = plt.subplots(1, len(panels_of), figsize=size, sharey=True, squeeze=False, layout="constrained")
    widest = max(max(result.step_ms, result.loss_ms) for result in results)
    for axes, (name, rows) in zip(panels[0], panels_of.items(), strict=True):
        rows = rows[::-1]
        colors = [COLORS[way.loss] for way in reversed(WAYS)]
        places = range(len(rows))
        axes.barh(places, [row.step_ms for row in rows], height=0.66, color=[pale(color) for color in colors])
        axes.barh(places, [row.loss_ms for row in rows], height=0.3, color=colors)
        for place, row in zip(places, rows, strict=True):
            end = max(row.step_ms, row.loss_ms)
            axes.text(end + 0.015 * widest, place, f"{row.step_ms:.2f}", va="center", fontsize=9)
        axes.set_yticks(places, [row.way for row in rows])
        axes.set_xlim(0, 1.13 * widest)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("ms: a step (wide bar), its loss alone (narrow bar)", fontsize=9)
        axes.grid(axis="x", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"


def save_json(file: Path, args: argparse.Namespace, results: list[Result]) -> None:
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(args.device),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "llmk": llmk.__version__},
        "config": {"batch": args.batch, "boxes": args.boxes, "steps": args.steps, "seed": args.seed},
        "results": [asdict(result) for result in results],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")


# ---- what the user asked for

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is one")
    parser.add_argument("--steps", type=positive, help="timed steps of each way; default: 20 on a CPU, 100 on a GPU")
    parser.add_argument("--batch", type=positive, help="images in a batch; default: 4 on a CPU, 64 on a GPU")
    parser.add_argument("--boxes", type=positive, help="boxes of an image; default: 64 on a CPU, 8192 on a GPU")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; default: both")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: 0")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="output folder; default: runs")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the numbers; default: giou.json in the output folder"
    )
    args = parser.parse_args(argv)
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        args.device = torch.device("cuda:0" if name == "cuda" else name)
        args.out.mkdir(parents=True, exist_ok=True)
    except RuntimeError:
        parser.error(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    except OSError as error:
        parser.error(f"--out: cannot make the folder {args.out}: {error.strerror}")
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    if args.device.type == "cuda" and args.device.index >= torch.cuda.device_count():
        parser.error(f"--device: {name} is asked for, and there are {torch.cuda.device_count()} CUDA devices")
    for option, on_cpu, on_gpu in [("steps", 20, 100), ("batch", 4, 64), ("boxes", 64, 8192)]:
        if getattr(args, option) is None:
            setattr(args, option, on_gpu if args.device.type == "cuda" else on_cpu)
    args.json = args.json or args.out / "giou.json"
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
        torch.backends.cudnn.allow_tf32 = False  # the losses of all ways are to agree
    results: list[Result] = []
    interval = 0.1 if sys.stderr.isatty() else 10.0  # a log needs fewer lines than a terminal
    names = args.dtype or list(DTYPES)
    with tqdm(total=len(names) * len(WAYS) * (WARMUP_STEPS + args.steps), mininterval=interval) as bar:
        for name in names:
            bar.set_description_str(name, refresh=False)
            results += compare(DTYPES[name], args, bar)
    size = f"{args.batch} images of up to {args.boxes} boxes, on {device_name(args.device)}"
    print(f"one training step, {size}, median of {args.steps}")
    print(table(results))
    plot(args.out / "giou.png", f"GIoU loss in a training step: {size}", results)
    save_json(args.json, args, results)
    print(f"\nwritten: {args.json}, {args.out / 'giou.png'}")


if __name__ == "__main__":
    sys.exit(main())
