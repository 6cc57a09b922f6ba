"""Tells which kernels a step runs, for how long, and whose they are."""

import collections
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm
from triton.runtime.jit import KernelInterface

import llmk  # noqa: F401 registers the operators
from benchmarks.layer import GROUPS as LIBRARIES

SHOWN = 25
WARM_STEPS = 5
NAME_WIDTH = 50


@functools.cache
def patterns() -> dict[str, re.Pattern[str]]:
    """Names that tell kernels apart, the first that fits; all others are "other"."""
    modules = [module for name, module in sys.modules.items() if name.startswith("llmk.ops.")]
    ours = {name for module in modules for name, value in vars(module).items() if isinstance(value, KernelInterface)}
    return {
        "llmk": re.compile(rf"^({'|'.join(sorted(ours))})(_\d+)?$"),  # Inductor adds a number
        "inductor": re.compile("^triton_"),
        **{name: re.compile(pattern, re.IGNORECASE) for name, pattern in LIBRARIES.items()},
        "optimizer": re.compile("multi_tensor_apply|adam", re.IGNORECASE),
        "copies": re.compile("^mem(cpy|set)|copy_kernel|catarray|fillfunctor|^aten::(copy_|fill_|cat)$", re.IGNORECASE),
    }


def group_of(kernel: str) -> str:
    return next((group for group, pattern in patterns().items() if pattern.search(kernel)), "other")


def kernel_times(step: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """The kernels of one step, the longest first; on a CPU the operators."""
    on_gpu = device.type == "cuda"
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if on_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    # The last of a few: a GPU that waited for the profiler's start has cooled, and runs faster than it can for long.
    turns = schedule(wait=0, warmup=WARM_STEPS, active=1)
    with profile(activities=[activity], schedule=turns, acc_events=True) as profiled:
        for _ in range(WARM_STEPS + 1):
            step()
            if on_gpu:
                torch.cuda.synchronize(device)
            profiled.step()
    spent: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiled.events() or []:
        if event.device_type == kind and not event.is_user_annotation:
            spent[event.name].append(event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total)
    rows = [
        {"name": name, "group": group_of(name), "calls": len(times), "ms": sum(times) / 1e3}
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def write_kernels(file: Path, about: dict[str, Any], profiles: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**about, "profiles": profiles}, indent=1) + "\n")


def print_kernels(profiled: dict[str, Any]) -> None:
    """A variant's groups, then its longest kernels, at most 80 columns wide."""
    kernels = profiled["kernels"]
    total = sum(row["ms"] for row in kernels)
    tqdm.write(f"\n{profiled['model']}, {profiled['variant']}: {total:.1f} ms of kernels in a step")
    spent: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for row in kernels:
        spent[row["group"]] += row["ms"]
        calls[row["group"]] += row["calls"]
    for group, ms in spent.most_common():
        tqdm.write(_line(ms, total, calls[group], group, ""))
    tqdm.write("")
    for row in kernels[:SHOWN]:
        tqdm.write(_line(row["ms"], total, row["calls"], row["group"], row["name"]))


def _line(ms: float, total: float, calls: int, group: str, name: str) -> str:
    short = re.sub(r"^void |at::native::|\(anonymous namespace\)::|c10::", "", name)
    return f"{ms:>8.2f}{ms / total:>6.1%}{calls:>6}  {group:<10}{short[: NAME_WIDTH - 4]}".rstrip()
