"""A file of a process's results and of the check that it is running; it outlives the process."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmk.opcheck.runner import Result, RunningCheck


class Journal:
    """A file of lines: each check that begins, each sample that it comes to, each result, and the end."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def entries(self, kind: str) -> Iterator[Any]:
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            entry = json.loads(line)
            if kind in entry:
                yield entry[kind]

    def write(self, kind: str, value: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    def results(self) -> list[Result]:
        return [Result(**result) for result in self.entries("result")]

    def note_result(self, result: Result) -> None:
        self.write("result", asdict(result))

    def note_running(self, running: RunningCheck) -> None:
        self.write("running", asdict(running))

    def unfinished(self) -> RunningCheck | None:
        """The check that began last, if it has no result."""
        running = [RunningCheck(**running) for running in self.entries("running")]
        known = {result.check for result in self.results()}
        return running[-1] if running and running[-1].check not in known else None

    def note_end(self) -> None:
        self.write("end", True)

    def ended(self) -> bool:
        return any(self.entries("end"))
