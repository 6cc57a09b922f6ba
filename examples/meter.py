"""Speed, memory and compilation of a training run, measured from the inside."""

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch._dynamo.utils import counters


@dataclass(frozen=True)
class Measured:
    tokens_per_second: float  # median over the steps after the warm-up
    spread: float  # of those steps: how many times the time of a fast one (10 %) a slow one (90 %) took
    peak_memory: int  # bytes
    peak_memory_of: str
    first_step_seconds: float  # with what compilation the caches on disk did not save
    graphs: int
    graph_breaks: int
    recompiles: int  # after the warm-up


class Meter:
    """Measures the steps that run under it; what the warm-up steps do is left out of speed, memory and recompiles."""

    def __init__(self, device: torch.device, tokens_per_step: int, warmup_steps: int) -> None:
        self.tokens_per_step, self.warmup_steps = tokens_per_step, warmup_steps
        self.memory = PeakMemory(device)
        self.seconds: list[float] = []
        self.graphs_of_warmup = 0

    def __enter__(self) -> None:
        if len(self.seconds) == self.warmup_steps:
            self.memory.reset()
        self.started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        if len(self.seconds) <= self.warmup_steps:
            self.graphs_of_warmup = compiled_graphs()

    def read(self) -> Measured:
        seconds = sorted(self.seconds[self.warmup_steps :] or self.seconds[-1:])
        return Measured(
            tokens_per_second=self.tokens_per_step / median(seconds),
            spread=seconds[int(0.9 * len(seconds))] / seconds[int(0.1 * len(seconds))],
            peak_memory=self.memory.read(),
            peak_memory_of=self.memory.name,
            first_step_seconds=self.seconds[0],
            graphs=compiled_graphs(),
            graph_breaks=sum(counters["graph_break"].values()),
            recompiles=compiled_graphs() - self.graphs_of_warmup,
        )


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


class PeakMemory:
    """The peak since `reset`: of the allocator on a GPU, else of the process, from what the system offers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.name = "torch.cuda.max_memory_allocated"
        elif Path("/proc/self/clear_refs").exists():
            self.name = "VmHWM, resident memory of the process"
        else:
            self.name = "ru_maxrss, resident memory of the process, compilation included"

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.name.startswith("VmHWM"):
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self.name.startswith("VmHWM"):
            status = Path("/proc/self/status").read_text()
            kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
            return int(kibibytes) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
