"""Findings that a project accepts, each with a reason, in a TOML file:

[[accepted]]
op = "my_softmax"
promise = "second_derivatives"
reason = "nobody trains with gradient penalties"
"""

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmk.opcheck.runner import Result, promise_named


@dataclass(frozen=True)
class Accepted:
    """A broken promise of an operator that is no failure, in every dtype and on every path unless it names them."""

    op: str
    promise: str
    reason: str
    dtype: str = ""
    path: str = ""

    def covers(self, result: Result) -> bool:
        asked = (self.op, self.promise, self.dtype or result.dtype, self.path or result.path)
        return not result.passed and asked == (result.op, result.promise, result.dtype, result.path)


def read_baseline(file: Path) -> list[Accepted]:
    """Return the entries of a file.

    Raises:
        ValueError: The file is missing or no TOML, or an entry lacks its operator, promise or reason.
    """
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8")).get("accepted", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    fields = {field.name for field in dataclasses.fields(Accepted)}
    for place, entry in enumerate(entries):
        missing = [name for name in ("op", "promise", "reason") if not entry.get(name)]
        unknown = sorted(entry.keys() - fields)
        if missing or unknown:
            words = (
                f"has no {missing[0]}" if missing else f"has {unknown[0]!r}, and may have {', '.join(sorted(fields))}"
            )
            raise ValueError(f"{file}: entry {place} {words}")
        promise_named(entry["promise"])
    return [Accepted(**entry) for entry in entries]


def accept(results: Sequence[Result], entries: Sequence[Accepted]) -> list[Result]:
    """Return the results, those that an entry covers with its reason."""

    def accepted(result: Result) -> Result:
        reason = next((entry.reason for entry in entries if entry.covers(result)), "")
        return dataclasses.replace(result, accepted=reason) if reason else result

    return list(map(accepted, results))


def unused(results: Sequence[Result], entries: Sequence[Accepted]) -> list[str]:
    """Return a line for each entry whose operator was checked and whose promise is kept."""
    checked = {(result.op, result.promise) for result in results}
    return [
        f"baseline: {entry.op} keeps {entry.promise}: the entry can go"
        for entry in entries
        if (entry.op, entry.promise) in checked and not any(map(entry.covers, results))
    ]
