"""A fuzzer of the compile backend: spellings of what it finds, which are damaged more and more.

`python -m tools.backend_fuzz --seconds 600 --seed 0`, on one core. A program on which the backend
differs from eager mode and from AOTAutograd in anything that a caller sees is made as small as it stays wrong, and
printed to be pasted. Those become tests in test_backend_found.py.
"""

import argparse
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compile_tests.helpers.backend_checks import THROUGH_AUTOGRAD
from compile_tests.helpers.backend_compare import AOT, InFloat64, difference, eager, outcome, to_float64, with_backend
from compile_tests.helpers.fuzz_calls import around, as_called, way_of
from compile_tests.helpers.fuzz_damage import damaged
from compile_tests.helpers.fuzz_program import Program, Ref, map_refs
from compile_tests.helpers.fuzz_spelled import spelled
from llmk.compiler import Report

LIMIT = 60
"""Seconds that one program may take to compile and run."""


def as_it_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Runs the graph as the backend leaves it, without AOTAutograd."""
    return gm


@dataclass
class Tally:
    """The number of things tried."""

    programs: int = 0
    unusable: int = 0
    replaced: Counter[str] = field(default_factory=Counter)
    left: int = 0
    last: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = ", ".join(f"{name} {count}" for name, count in sorted(self.replaced.items()))
        return (
            f"{self.programs} programs ({self.unusable} did not run eagerly, {self.left} unchanged); replaced: {found}"
        )


class TooLong(Exception):
    """A program did not come to an end."""


def _too_long(*_: Any) -> None:
    raise TooLong(f"not done after {LIMIT} seconds")


def check(program: Program, tally: Tally | None = None, seeds: int = 9, quick: bool = False) -> str | None:
    """Return in words what the backend changes of a program's outcome, or None.

    A difference of numbers counts where it is there for three quarters of the inputs that are drawn: a rule that is
    wrong is wrong for nearly all of them, and the accuracy rule knows few elements. A quick check runs the graph as the
    backend leaves it, in half the time, and what it finds must be there with AOTAutograd too, as it comes before
    Inductor.
    """
    report = Report()
    say = _differs(program, 0, with_backend(report, as_it_is if quick else THROUGH_AUTOGRAD))
    if tally is not None:
        tally.programs += 1
        tally.replaced.update(report.replaced)
        tally.left += not report.replaced
        tally.last = tuple(report.replaced)
    if say is not None and quick:
        say = _differs(program, 0, with_backend())
    if say is not None and "expected experts from" in say and names_no_expert(program):
        return None
    if say is None or seeds == 1 or not _is_of_numbers(say):
        return say
    if " is nan" not in say and " is inf" not in say and overflows(program):
        return None
    again = [_differs(program, seed, with_backend()) for seed in range(1, seeds)]
    return say if sum(x is not None for x in again) * 4 >= len(again) * 3 else None


def names_no_expert(program: Program) -> bool:
    """Return True if an index that is counted is out of range: eager mode gives its row to another expert."""
    values = program.values()
    counted = [line.args[:2] for line in program.lines if line.target is torch.ops.aten.histc.default]
    return any(bool(((values[x.name] < 0) | (values[x.name] > experts)).any()) for x, experts in counted)


def overflows(program: Program) -> bool:
    """Return True if eager mode leaves a dtype's range on the way, so that its error is no baseline."""
    plain = program.values()
    with InFloat64():
        exact = program.values(to_float64)
    pairs = [(x, exact[name]) for name, x in plain.items() if isinstance(x, Tensor)]
    pairs = [(x, y) for x, y in pairs if x.shape == y.shape]  # bits that were read as another dtype may be more
    return any(bool((~x.isfinite() & y.isfinite()).any()) for x, y in pairs)


def _is_of_numbers(say: str) -> bool:
    return "error" in say and "allowed" in say and not say.startswith("raises")


def _differs(program: Program, seed: int, way: Any) -> str | None:
    fn, args = program.function(), program.args(seed)
    plain = around(program, fn)
    got = outcome(way_of(program, way), fn, args)
    say = difference(got, plain, args)
    if say is None:
        return None
    # A difference is one of the backend's only where it is not PyTorch's own.
    aot = outcome(as_called(program, AOT), fn, args)
    return None if aot.error or difference(aot, plain, args) is not None else say


def usable(program: Program) -> bool:
    return not outcome(eager, around(program, program.function()), program.args()).error


def programs(random: Random) -> Iterator[Program]:
    """Spellings, and each with more and more damage."""
    while True:
        program = spelled(random)
        if random.random() < 0.25:
            yield program
        for _ in range(random.choice((1, 2, 3, 6))):
            changed = damaged(random, program)
            if changed is not None and len(changed.lines) < 80:
                program = changed
                yield program


def shrunk(program: Program, wrong: Callable[[Program], bool], seconds: float = 20.0) -> Program:
    """The program without lines, outputs, segments and constants that are not needed for it to be wrong."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                break
            if _runs(smaller) and wrong(smaller):
                program, progress = smaller.pruned(), True
                break
    return program


def _runs(program: Program) -> bool:
    try:
        program.values()
    except Exception:
        return False
    return usable(program)


def _smaller(program: Program) -> Iterator[Program]:
    """Large steps first: a single output and what it is made of."""
    for names in (*((name,) for name in program.outputs), program.outputs):
        smaller = _needed(program, names)
        if smaller != program:
            yield smaller
    for name in program.outputs:
        if len(program.outputs) > 1:
            yield replace(program, outputs=tuple(x for x in program.outputs if x != name))
    for i in reversed(range(len(program.lines))):
        line = program.lines[i]
        rest = (*program.lines[:i], *program.lines[i + 1 :])
        read = any(line.name in other.refs() for other in rest) or line.name in program.outputs
        if not read:
            yield replace(program, lines=rest)
            continue
        for name in line.refs():  # what reads it reads what it reads
            yield _renamed(replace(program, lines=rest), line.name, name)
    if any(line.segment for line in program.lines):
        for segment in dict.fromkeys(line.segment for line in program.lines if line.segment):
            lines = tuple(replace(x, segment="") if x.segment == segment else x for x in program.lines)
            yield replace(program, lines=lines)
    if program.called:
        yield replace(program, called="")
    for i, x in enumerate(program.inputs):
        for plain in (replace(x, scale=1.0, plus=0.0), replace(x, dtype=torch.float32), replace(x, grad=False)):
            if plain != x and x.kind == "normal":
                yield replace(program, inputs=(*program.inputs[:i], plain, *program.inputs[i + 1 :]))


def _needed(program: Program, names: tuple[str, ...]) -> Program:
    """Keep these outputs and only the lines that they are computed by."""
    lines, read = [], set(names)
    for line in reversed(program.lines):
        if line.name in read:
            lines.append(line)
            read.update(line.refs())
    return replace(program, lines=tuple(reversed(lines)), outputs=names)


def _renamed(program: Program, old: str, new: str) -> Program:
    def other(ref: Ref) -> Ref:
        return Ref(new) if ref.name == old else ref

    lines = [replace(x, args=map_refs(other, x.args), kwargs=map_refs(other, dict(x.kwargs))) for x in program.lines]
    outputs = tuple(dict.fromkeys(new if x == old else x for x in program.outputs))
    return replace(program, lines=tuple(lines), outputs=outputs)


def symptom_of(say: str) -> str:
    """A key that differences of one cause nearly always share."""
    if say.startswith("raises"):
        return say[:160]
    return " ".join(say.split(":")[0].split()[:3]).rstrip("0123456789 ")


def run(seconds: float, seed: int, show: Callable[[Program, str], None], tally: Tally, per_kind: int = 1) -> int:
    """Fuzz for so long; how many programs were shown."""
    signal.signal(signal.SIGALRM, _too_long)
    random, end, shown = Random(seed), time.monotonic() + seconds, Counter[str]()
    for program in programs(random):
        if time.monotonic() > end:
            break
        signal.alarm(LIMIT)
        try:
            if not usable(program):
                tally.unusable += 1
                continue
            say = check(program, tally, quick=random.random() < 0.75)
        except TooLong as error:
            say = f"raises {error}"
        finally:
            signal.alarm(0)
        if say is not None:
            symptom = symptom_of(say)
            kind = f"{symptom}; replaced {', '.join(sorted(tally.last)) or 'nothing'}"
            shown[kind] += 1
            if shown[kind] <= per_kind:
                program = shrunk(program, lambda p, symptom=symptom: _symptom(p) == symptom)
                show(program, check(program) or say)
    for kind, count in shown.items():
        print(f"{count:4} {kind}")
    return shown.total()


def _symptom(program: Program) -> str:
    return symptom_of(check(program, seeds=1) or "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Programs that the compile backend might get wrong.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long it goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the programs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tally = Tally()

    def show(program: Program, say: str) -> None:
        print(f"# {say}\n{program.snippet()}", flush=True)

    found = run(options.seconds, options.seed, show, tally)
    print(f"{tally}\n{found} wrong", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
