"""Broken promises by their cause, the gravest first: one wrong factor breaks fifteen promises and is one thing to mend.

Promises have one cause if the same result is wrong in all of them, or if all end with the same error, whatever the
sample, the dtype and the path. An operator that mutates what it must not, or leaves memory unwritten, has wrong values
and gradients for it: they are of the same cause. Where one result is wrong for two causes, the second is named once the
first is mended.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmk.opcheck.inputs import MEMORY, TIME
from llmk.opcheck.promises.table import INTERPRETER_PROMISES
from llmk.opcheck.runner import WORST, Result

KINDS = ("wrong values", "wrong gradients", "memory", "side effects", "compile", "habits", TIME)
"""The kinds of faults, the gravest first; last what there was no time to check."""

_PROMISES_OF = {
    "wrong gradients": (
        "has_backward",
        "finite_gradients",
        "second_backward",
        "scaled_gradient",
        "expanded_gradient",
        "strided_gradient",
        "input_subsets",
        "undefined_gradients",
        "two_calls",
        "checkpointed",
        "autocast",
    ),
    "memory": (
        "in_bounds",
        "every_element_written",
        "no_mutation",
        "no_alias",
        "any_program_order",
        "long_offsets",
        "far_rows",
        "every_kernel_ends",
        "memcheck",
        "racecheck",
    ),
    "side effects": ("side_effects",),
    "compile": (
        "torch_opcheck",
        "can_torch_compile",
        "compiled",
        "compiled_samples",
        "compiled_shapes",
        "no_recompile",
        "exported_trains",
        "cuda_graphs",
    ),
    "habits": (
        "same_on_short_path",
        "batch_invariant",
        "clean_graph",
        "refuses_transforms",
        "no_float_atomics",
        "no_host_sync",
        "default_dtype",
        "default_device",
        "second_derivatives",
    ),
}
_KIND_OF = {promise: kind for kind, promises in _PROMISES_OF.items() for promise in promises}


@dataclass(frozen=True)
class Cause:
    """Results that one cause breaks; the first says most of it."""

    kind: str
    results: Sequence[Result]

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def headline(self) -> str:
        dtypes = _listed(result.dtype for result in self.results)
        paths = _listed(result.path for result in self.results)
        verb = "did not get past" if self.kind == TIME else "breaks"
        return f"{self.kind}: {self.first.op} {dtypes} ({paths}) {verb} {self.first.promise}:"

    @property
    def others(self) -> str:
        """The other promises that it breaks, in words; empty if there are none."""
        names = list(dict.fromkeys(result.promise for result in self.results))[1:]
        return f"and {len(names)} more promise{'s' * (len(names) > 1)}: {', '.join(names)}" if names else ""

    def __str__(self) -> str:
        return "\n  ".join(filter(None, [self.headline, self.first.message, self.others]))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def described(cause: Cause, place: tuple[str, int] | None) -> dict[str, Any]:
    """Return a cause for a report that programs read."""
    return {
        "kind": cause.kind,
        "op": cause.first.op,
        "promise": cause.first.promise,
        "message": cause.first.message,
        "promises": list(dict.fromkeys(result.promise for result in cause.results)),
        "dtypes": list(dict.fromkeys(result.dtype for result in cause.results)),
        "paths": list(dict.fromkeys(result.path for result in cause.results)),
        "file": place[0] if place else None,
        "line": place[1] if place else None,
    }


def causes(results: Sequence[Result]) -> list[Cause]:
    """Return the causes of what is broken, by operator, and of each the gravest first."""
    found: list[Cause] = []
    for operator in dict.fromkeys(result.op for result in results):
        groups: dict[str, list[Result]] = {}
        for result in results:
            if result.verdict == "broken" and result.op == operator:
                groups.setdefault(result.wrong or _error_in(result), []).append(result)
        if MEMORY in groups:  # what is read there, and the gradients made of it, are wrong for it
            follow = [wrong for wrong in groups if wrong.startswith(("output ", "gradient of "))]
            groups = {MEMORY: [r for wrong in (MEMORY, *follow) for r in groups.pop(wrong)]} | groups
        causes = [_cause(group) for group in groups.values()]
        found += sorted(causes, key=lambda cause: (cause.first.wrong != MEMORY, KINDS.index(cause.kind)))
    return found


def _cause(group: list[Result]) -> Cause:
    """A promise about the kernels' code says most, then one about memory, then values, then the first asked."""

    def rank(result: Result) -> tuple[bool, bool, bool]:
        return not _of_kernels(result), result.wrong != MEMORY, result.promise != "values_and_gradients"

    first = sorted(group, key=rank)
    told_by_first = _of_kernels(first[0]) or first[0].wrong == MEMORY
    kinds = [_kind(first[0])] if told_by_first else [_kind(result) for result in group]
    return Cause(min(kinds, key=KINDS.index), first)


def _of_kernels(result: Result) -> bool:
    return result.promise in {promise.__name__ for promise in INTERPRETER_PROMISES}


def _kind(result: Result) -> str:
    if result.wrong in (MEMORY, TIME):
        return result.wrong
    if result.promise == "second_derivatives":
        return "habits"
    if result.wrong:
        return "wrong gradients" if result.wrong.startswith("gradient") else "wrong values"
    return _KIND_OF.get(result.promise, "wrong values")


def _error_in(result: Result) -> str:
    """Return the error that a message ends with, or all of it, without the sample and numbers that depend on it."""
    error = re.search(r"\b(\w+(Error|Exception)|Unsupported): .*", result.message)
    text = error[0] if error else result.message.rpartition("]: ")[2]
    text = text.partition(WORST)[0]
    text = re.sub(r" \(\S+, line \d+\)$", "", text.partition("\n")[0])
    text = re.sub(r"-?\d[\d.e+-]*", "#", text)
    return re.sub(r"[(\[][#, ]*[)\]]", "#", text)
