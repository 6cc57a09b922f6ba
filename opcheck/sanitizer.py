"""Samples under NVIDIA's compute-sanitizer, which watches every thread of every kernel that runs on a GPU.

memcheck finds what is read or written outside of an allocation, racecheck threads of one program that race for its
shared memory. A process calls an operator's samples and says which one is next; the sanitizer's own lines come between.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from llmk.opcheck.calls import call
from llmk.opcheck.runner import Result, path_taken
from llmk.registry import Op

TOOLS = ("memcheck", "racecheck")
_FOUND = 86
"""The exit code that the sanitizer is asked for when it finds something."""
_NEXT = "opcheck calls "
_LINE = "========="
_NO_ERROR = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Warning")


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def call_samples(op: Op, device: torch.device, dtypes: Sequence[torch.dtype] | None) -> None:
    """Call each sample, forward and backward, one after the other; a line before each says which."""
    for dtype in dtypes or op.dtypes:
        torch.manual_seed(0)
        for sample in op.samples(device, dtype):
            print(f"{_NEXT}{op.name} {str(dtype).removeprefix('torch.')} {sample}", flush=True)
            call(op, sample)
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def sanitize(executable: str, tool: str, name: str, device: torch.device, dtypes: Sequence[str]) -> Result:
    """Call the samples of an operator (or of a file's) in a process that one of the sanitizer's tools watches."""
    command = [executable, "--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "application-only"]
    command += [sys.executable, "-m", "llmk.opcheck", name, "--device", str(device), "--call-samples"]
    command += [word for dtype in dtypes for word in ("--dtype", dtype)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a tensor's end is its allocation's
    start = time.perf_counter()
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = process.stdout.splitlines()
    calls = sum(line.startswith(_NEXT) for line in lines)
    message = _what_was_found(lines, process.returncode) if process.returncode else ""
    seconds = time.perf_counter() - start
    dtype = "+".join(dtypes) or "all"
    return Result(name, str(device), dtype, path_taken(device), tool, not message, message, seconds, calls)


def _what_was_found(lines: Sequence[str], code: int) -> str:
    """The sanitizer's first error and the sample that it came at; without one, what the process said last."""
    place = "before the first sample"
    for line in lines:
        text = line.removeprefix(_LINE).strip()
        if line.startswith(_NEXT):
            place = line.removeprefix(_NEXT)
        elif line.startswith(_LINE) and text and not text.startswith(_NO_ERROR):
            return f"{place}: {text}"
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith(_LINE)), "it said nothing")
    return f"{place}: the process ended with exit code {code}: {last.strip()}"
