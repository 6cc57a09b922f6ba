"""The search: cases by seed until the time is up, each one judged, and what is found made small and printed.

python -m llmk.opcheck rms_norm --search 60
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmk.opcheck.calls import call, incoming_gradients
from llmk.opcheck.inputs import tensors_of
from llmk.opcheck.reference import reference_for
from llmk.opcheck.runner import Check, Result, RunningCheck, around, path_taken
from llmk.opcheck.search.cases import Case, Cases
from llmk.opcheck.search.decisions import at_decisions
from llmk.opcheck.search.derivatives import derivative_violation
from llmk.opcheck.search.judge import Finding, judge
from llmk.opcheck.search.shrink import MOST_NUMBERS, shrink, snippet
from llmk.registry import Op

SHRINKING = 10.0
"""Seconds at most for one finding."""
MOST_FINDINGS = 8


@dataclass(frozen=True)
class Found:
    """A finding, its call as it was drawn and as it was shrunk."""

    op: Op
    drawn: Case
    shrunk: Case
    finding: Finding

    def __str__(self) -> str:
        tensors = tensors_of(self.op, self.shrunk.sample).values()
        numbers = max((tensor.numel() for tensor in tensors), default=0)
        program = snippet(self.op, self.shrunk) if numbers <= MOST_NUMBERS else "(more numbers than can be read)"
        indented = "\n".join(f"    {line}" for line in program.splitlines())
        return f"{self.finding.kind}: {self.finding.message}\n  {self.drawn.sample}\n{indented}"


@dataclass
class Searched:
    """The result of a search: the number of cases, the seed after the last, and the findings."""

    calls: int
    next_seed: int
    found: list[Found]


def search(
    op: Op,
    device: torch.device | str,
    dtype: torch.dtype,
    seconds: float,
    seed: int = 0,
    *,
    on_begin: Callable[[Case], None] = lambda case: None,
    most: int = MOST_FINDINGS,
    shrinking: float = SHRINKING,
) -> Searched:
    """Search an operator's inputs in a dtype from a seed on, for so many seconds.

    The case of a seed is always the same; how far a search comes depends on the machine. Of each kind of fault in each
    result the first is kept.
    """
    cases, result, until = Cases(op, torch.device(device), dtype), Searched(0, seed, []), time.monotonic() + seconds
    known: set[tuple[str, str]] = set()
    while time.monotonic() < until and len(result.found) < most:
        for case in _cases(cases, cases[result.next_seed], until):
            on_begin(case)
            finding = judge(op, case)
            result.calls += 1
            if finding is None or finding.key in known:
                continue
            known.add(finding.key)
            if finding.kind == "derivative" and _differs_by_intent(op, cases, finding):
                continue
            small, smaller = shrink(op, case, finding, min(shrinking, seconds))
            result.found.append(Found(op, case, small, smaller))
        result.next_seed += 1
    return result


def _differs_by_intent(op: Op, cases: Cases, finding: Finding) -> bool:
    """Return True if the samples show it too: such as the row of a table that has no gradient."""
    for place, sample in enumerate(cases.samples):
        outcome = call(op, sample)
        reference = reference_for(op, sample, outcome, incoming_gradients)
        found = derivative_violation(op, sample, reference, place)
        if found is not None and found[0] == finding.where:
            return True
    return False


def _cases(cases: Cases, case: Case, until: float) -> Iterator[Case]:
    """The seed's case, and for some seeds those at a decision near it."""
    yield case
    if case.seed % 8 == 4:
        yield from at_decisions(cases, case, until)


def searches(
    op: Op,
    device: torch.device,
    dtypes: Sequence[torch.dtype] | None,
    seconds: float,
    seed: int,
    on_begin: Callable[[RunningCheck], None],
    done: Collection[Check] = (),
) -> Iterator[Result]:
    """The search as a check of its own, one result for each dtype; they share the time."""
    for dtype in dtypes or op.dtypes:
        name = str(dtype).removeprefix("torch.")
        if (op.name, name, "search") in done:
            continue
        on_begin(RunningCheck(op.name, name, "search"))
        start = time.perf_counter()

        def note(case: Case, name: str = name) -> None:
            on_begin(RunningCheck(op.name, name, "search", str(case.sample)))

        with around(op, device):
            result = search(op, device, dtype, seconds / len(dtypes or op.dtypes), seed, on_begin=note)
        message = "\n  ".join([f"seeds {seed} to {result.next_seed - 1}", *map(str, result.found)])
        took = time.perf_counter() - start
        passed = not result.found
        yield Result(op.name, str(device), name, path_taken(device), "search", passed, message, took, result.calls)
