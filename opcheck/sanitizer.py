"""Samples under NVIDIA's compute-sanitizer, which watches every thread of every kernel that runs on a GPU.

memcheck finds what is read or written outside of an allocation, racecheck threads of one program that race for its
shared memory. A process calls an operator's samples and says which one is next; the sanitizer's own lines come between.
racecheck follows every access of every thread, which takes hundreds of times a kernel's time: it is given few samples.
What a call of CUDA's API returns is not the tools' to say: libraries ask for functions that a driver may not have, and
what goes wrong PyTorch raises.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from llmk.opcheck.calls import call, of_other_widths, representatives
from llmk.opcheck.processes import Unit, side_by_side, threads_of_each
from llmk.opcheck.runner import Result, path_taken
from llmk.registry import Op, Sample

TOOLS = ("memcheck", "racecheck")
LONGEST = 900
"""Seconds that a tool has for an operator unless it is told; what takes longer was not checked."""
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
    kinds = representatives(op, samples)[:FEW_KINDS]
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


def sanitize_in_processes(
    executable: str,
    names: Sequence[str],
    device: torch.device,
    dtypes: Sequence[str],
    *,
    few: bool,
    longest: int,
    jobs: int,
) -> Iterator[tuple[Unit, Result]]:
    """Each operator (or all of a file) under each tool, so many at a time; each is given as it ends."""
    with_options = partial(sanitize, executable, longest=longest, threads=threads_of_each(jobs))
    units = [Unit((name,), tool) for name in names for tool in TOOLS]
    work = {u: partial(with_options, u, device, dtypes, few=few or u.path == "racecheck") for u in units}
    return side_by_side(work, jobs)


def sanitize(
    executable: str, unit: Unit, device: torch.device, dtypes: Sequence[str], *, few: bool, longest: int, threads: int
) -> Result:
    """Call the samples of an operator (or of a file's) in a process that one of the sanitizer's tools watches."""
    command = [executable, "--tool", unit.path, "--error-exitcode", str(_FOUND)]
    command += ["--target-processes", "application-only", "--report-api-errors", "no"]
    command += ["--launch-timeout", str(longest)]  # 10 seconds by default: too few for many at once
    command += [sys.executable, "-m", "llmk.opcheck", *unit.names, "--device", str(device)]
    command += ["--call-samples", "few" if few else "all"]
    command += [word for dtype in dtypes for word in ("--dtype", dtype)]
    # Without PyTorch's cache of memory a tensor's end is its allocation's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(longest)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it watches
            process.wait()
            code = None
        said.seek(0)
        lines = said.read().splitlines()
    calls = sum(line.startswith(_NEXT) for line in lines)
    message = "" if code == 0 else _what_was_found(lines, code, longest)
    seconds = time.perf_counter() - start
    dtype = "+".join(dtypes) or "all"
    (name,) = unit.names
    return Result(name, str(device), dtype, path_taken(device), unit.path, not message, message, seconds, calls)


def _what_was_found(lines: Sequence[str], code: int | None, longest: int) -> str:
    """The sanitizer's first error and the sample that it came at; without one, how the process ended, if it did."""
    place = "before the first sample"
    for line in lines:
        text = line.removeprefix(_LINE).strip()
        if line.startswith(_NEXT):
            place = line.removeprefix(_NEXT)
        elif line.startswith(_LINE) and text and not text.startswith(_NO_ERROR):
            return f"{place}: {text}"
    if code is None:
        return f"{place}: not done after {longest} seconds"
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith(_LINE)), "it said nothing")
    return f"{place}: the process ended with exit code {code}: {last.strip()}"
