"""Checking in processes of their own: Triton decides at import whether it interprets, and a kernel may kill one."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from llmk.opcheck.inputs import TIME
from llmk.opcheck.report.journal import Journal
from llmk.opcheck.runner import Result, RunningCheck


@dataclass(frozen=True)
class Unit:
    """The work of one process: operators (or all of a file) on a path, or under a tool that watches them."""

    names: tuple[str, ...]
    path: str

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.names)}"


def check_in_processes(
    units: Sequence[Unit], device: torch.device, options: Sequence[str], jobs: int, longest: float | None = None
) -> Iterator[tuple[Unit, list[Result]]]:
    """Check each unit in a process of its own, so many at a time; each is given as it ends.

    After `longest` seconds, if given, processes are ended: what they were at is broken, and what did not begin.
    """
    end = None if longest is None else time.monotonic() + longest
    check = partial(check_in_process, device=device, options=options, threads=threads_of_each(jobs), end=end)
    return side_by_side({unit: partial(check, unit) for unit in units}, jobs)


Task = TypeVar("Task")
Found = TypeVar("Found")


def side_by_side(work: Mapping[Task, Callable[[], Found]], jobs: int) -> Iterator[tuple[Task, Found]]:
    """Do so many tasks at a time; each is given with what it found as it ends."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(find): task for task, find in work.items()}
        for done in as_completed(running):
            yield running[done], done.result()


def threads_of_each(jobs: int) -> int:
    return max(1, (os.cpu_count() or 1) // jobs)


def check_in_process(
    unit: Unit, device: torch.device, options: Sequence[str], threads: int, end: float | None = None
) -> list[Result]:
    """Return all results of a unit. A process that dies breaks the promise it was at; another checks those after it."""
    # Processes side by side share the cores, and compile too little for those of Inductor to be worth starting.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} | os.environ | {"OMP_NUM_THREADS": str(threads)}
    if unit.path == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        command = [sys.executable, "-X", "faulthandler", "-m", "llmk.opcheck", *unit.names, "--device", str(device)]
        command += [*options, "--journal", str(journal.file)]
        while True:
            ended = _run(command, environment, end)
            if journal.ended():
                return journal.results()
            running = journal.unfinished()
            last = running or RunningCheck(", ".join(unit.names), "", "import")  # it died before its first check
            where = f" at the sample {last.sample}" if last.sample else ""
            message = f"{ended.how}{where}{ended.words}"
            check = last.op, str(device), last.dtype, unit.path, last.promise
            journal.note_result(Result(*check, False, message, 0.0, calls=1, wrong=ended.wrong))
            if running is None or (end is not None and time.monotonic() >= end):
                return journal.results()


@dataclass(frozen=True)
class _Ended:
    """How a process ended, its last words, and TIME where that was the limit of the whole run."""

    how: str
    words: str = ""
    wrong: str = ""


def _run(command: Sequence[str], environment: dict[str, str], end: float | None) -> _Ended:
    """Run a process, until a time at most."""
    if end is not None and time.monotonic() >= end:
        return _Ended("the time of the whole run was over before it began", wrong=TIME)
    left = None if end is None else end - time.monotonic()
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return _Ended("the time of the whole run was over", wrong=TIME)
    timeout = _TIMEOUT.search(process.stderr)
    if timeout is not None:
        return _Ended(f"it did not end in {timeout[1]}", _stack(process.stderr[timeout.start() :]))
    return _Ended(f"the process {_death(process.returncode)}", _last_words(process.stderr))


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")


MOST_FRAMES = 5
_TIMEOUT = re.compile(r"^Timeout \((\S+?)\)!", re.MULTILINE)
"""The line that faulthandler writes before the stacks of all threads."""
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def _last_words(stderr: str) -> str:
    """Return the process's last words; after a fatal signal, the operator's own innermost frame."""
    lines = stderr.strip().splitlines()
    if not any(line.startswith("Fatal Python error") for line in lines):
        return f": {lines[-1]}" if lines else ""
    return next((f", in {frame}" for frame in _own_frames(lines)), "")


def _stack(stderr: str) -> str:
    """Return the frames of the operator in which the process was, the innermost first."""
    frames = list(_own_frames(stderr.splitlines()))
    return f", in {', called by '.join(frames[:MOST_FRAMES])}" if frames else ""


def _own_frames(lines: Sequence[str]) -> Iterator[str]:
    """The frames that are neither of Python's, nor of PyTorch, Triton, NumPy or opcheck."""
    for frame in filter(None, map(_FRAME.match, lines)):
        file = Path(frame["file"])
        standard = Path(os.__file__).parent in file.parents and "site-packages" not in file.parts
        if (
            not standard
            and not frame["file"].startswith("<")
            and not {"torch", "triton", "numpy", "opcheck"} & set(file.parts)
        ):
            yield f"{frame['function']} (line {frame['line']} of {frame['file']})"
