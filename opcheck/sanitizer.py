"""Samples under NVIDIA's compute-sanitizer, which watches every thread of every kernel that runs on a GPU.

memcheck finds what is read or written outside of an allocation, racecheck threads of one program that race for its
shared memory. A process calls an operator's samples and says which one is next; the sanitizer's own lines come between.
racecheck follows every access of every thread, which takes hundreds of times a kernel's time: it is given few samples.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

from llmk.opcheck.calls import call, of_other_widths, one_of_each
from llmk.opcheck.runner import Result, path_taken
from llmk.registry import Op, Sample

TOOLS = ("memcheck", "racecheck")
LONGEST = 900
"""Seconds that a tool has for an operator; what takes longer was not checked."""
FEW_KINDS = 4
_FOUND = 86
"""The exit code that the sanitizer is asked for when it finds something."""
_NEXT = "opcheck calls "
_LINE = "========="
_NO_ERROR = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Warning")


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def few_of(op: Op, samples: Sequence[Sample]) -> list[Sample]:
    """The smallest of FEW_KINDS kinds, and of each width that a row has: at most as many as that and four."""
    kinds = one_of_each(op, samples)[:FEW_KINDS]
    return kinds + of_other_widths(op, samples, kinds)


def call_samples(op: Op, device: torch.device, dtypes: Sequence[torch.dtype] | None, *, few: bool = False) -> None:
    """Call each sample, or few of them, forward and backward, one after the other; a line before each says which."""
    for dtype in dtypes or op.dtypes:
        torch.manual_seed(0)
        samples = list(op.samples(device, dtype))
        for sample in few_of(op, samples) if few else samples:
            print(f"{_NEXT}{op.name} {str(dtype).removeprefix('torch.')} {sample}", flush=True)
            call(op, sample)
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def sanitize(executable: str, tool: str, name: str, device: torch.device, dtypes: Sequence[str]) -> Result:
    """Call the samples of an operator (or of a file's) in a process that one of the sanitizer's tools watches."""
    command = [executable, "--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "application-only"]
    command += [sys.executable, "-m", "llmk.opcheck", name, "--device", str(device)]
    command += ["--call-samples", "few" if tool == "racecheck" else "all"]
    command += [word for dtype in dtypes for word in ("--dtype", dtype)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a tensor's end is its allocation's
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        said.seek(0)
        lines = said.read().splitlines()
    calls = sum(line.startswith(_NEXT) for line in lines)
    message = "" if code == 0 else _what_was_found(lines, code)
    seconds = time.perf_counter() - start
    dtype = "+".join(dtypes) or "all"
    return Result(name, str(device), dtype, path_taken(device), tool, not message, message, seconds, calls)


def _what_was_found(lines: Sequence[str], code: int | None) -> str:
    """The sanitizer's first error and the sample that it came at; without one, how the process ended, if it did."""
    place = "before the first sample"
    for line in lines:
        text = line.removeprefix(_LINE).strip()
        if line.startswith(_NEXT):
            place = line.removeprefix(_NEXT)
        elif line.startswith(_LINE) and text and not text.startswith(_NO_ERROR):
            return f"{place}: {text}"
    if code is None:
        return f"{place}: not done after {LONGEST} seconds"
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith(_LINE)), "it said nothing")
    return f"{place}: the process ended with exit code {code}: {last.strip()}"
