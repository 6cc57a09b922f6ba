"""Checking in processes of their own: Triton decides at import whether it interprets, and a kernel may kill one."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from llmk.opcheck.journal import Journal
from llmk.opcheck.runner import Result, RunningCheck


@dataclass(frozen=True)
class Unit:
    """The work of one process: operators (or all of a file) on a path."""

    names: tuple[str, ...]
    path: str

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.names)}"


def check_in_processes(
    units: Sequence[Unit], device: torch.device, options: Sequence[str], jobs: int
) -> Iterator[tuple[Unit, list[Result]]]:
    """Check each unit in a process of its own, so many at a time; each is given as it ends."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(check_in_process, unit, device, options, threads): unit for unit in units}
        for done in as_completed(running):
            yield running[done], done.result()


def check_in_process(unit: Unit, device: torch.device, options: Sequence[str], threads: int) -> list[Result]:
    """Return all results of a unit. A process that dies breaks the promise it was at; another checks those after it."""
    # Processes side by side share the cores, and compile too little for those of Inductor to be worth starting.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} | os.environ | {"OMP_NUM_THREADS": str(threads)}
    if unit.path == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    elif unit.path == "reference":
        environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        command = [sys.executable, "-X", "faulthandler", "-m", "llmk.opcheck", *unit.names, "--device", str(device)]
        command += [*options, "--journal", str(journal.file)]
        while True:
            process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if journal.ended():
                return journal.results()
            running = journal.unfinished()
            last = running or RunningCheck(", ".join(unit.names), "", "import")  # it died before its first check
            where = f" at the sample {last.sample}" if last.sample else ""
            message = f"the process {_death(process.returncode)}{where}{_last_words(process.stderr)}"
            journal.note_result(
                Result(last.op, str(device), last.dtype, unit.path, last.promise, False, message, 0.0, calls=1)
            )
            if running is None:
                return journal.results()


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")


_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def _last_words(stderr: str) -> str:
    """Return the process's last words; after a fatal signal, the operator's own innermost frame."""
    lines = stderr.strip().splitlines()
    if not any(line.startswith("Fatal Python error") for line in lines):
        return f": {lines[-1]}" if lines else ""
    for frame in filter(None, map(_FRAME.match, lines)):
        file = Path(frame["file"])
        standard = Path(os.__file__).parent in file.parents and "site-packages" not in file.parts
        if not standard and not {"torch", "triton", "numpy", "opcheck"} & set(file.parts):
            return f", in {frame['function']} (line {frame['line']} of {frame['file']})"
    return ""
