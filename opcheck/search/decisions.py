"""Finds where an operator decides, by moving one number until a result jumps, however close the two sides are."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from llmk.opcheck.calls import call
from llmk.opcheck.inputs import rebound
from llmk.opcheck.patience import patience
from llmk.opcheck.search.cases import Case, Cases
from llmk.opcheck.search.refusals import PATIENCE
from llmk.opcheck.search.regimes import readable

PLACES = tuple(sign * size for sign in (-1.0, 1.0) for size in (0.01, 0.3, 0.7, 1.5, 3.0, 6.0, 12.0, 25.0, 60.0))


def at_decisions(cases: Cases, case: Case, until: float) -> list[Case]:
    """The case with one of its numbers on either side of the largest jump that a result makes as it moves.

    None where there is no jump, or it is not found before `until` of `time.monotonic()`. The number stays in the domain
    of its argument.
    """
    op = cases.op
    bound = op.bind(case.sample)
    names = [name for name, value in bound.items() if isinstance(value, Tensor) and value.is_floating_point()]
    names = [name for name in names if 0 < bound[name].numel() <= 4096]
    if not names:
        return []
    random = Random(case.seed)
    name = random.choice(names)
    index = random.randrange(bound[name].numel())
    places = cases.domain(name, bound).part_of(PLACES)

    def with_number(value: float) -> Case:
        moved = bound[name].detach().clone(memory_format=torch.contiguous_format)
        moved.view(-1)[index] = value
        why = f"{case.sample.why}; element {index} of {name} where a result jumps"
        changed = dataclasses.replace(case, decides=True, changed=(*case.changed, "a decision"))
        return dataclasses.replace(changed, sample=rebound(op, case.sample, bound | {name: moved}, why))

    def results(value: float) -> Tensor:
        with patience(max(0.01, min(PATIENCE, until - time.monotonic()))):
            outcome = call(op, with_number(value).sample, grads=case.grads)
        flat = [r.detach().double().nan_to_num().flatten() for r in outcome.results() if r is not None]
        return torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64, device="cpu")

    try:
        pair = _jump(results, bound[name].dtype, places)
    except Exception:  # the judge says of the call itself whether it may raise
        return []
    return [with_number(value) for value in pair]


def _jump(results: Callable[[float], Tensor], dtype: torch.dtype, places: Sequence[float]) -> tuple[float, ...]:
    """Two neighbours of the dtype between which the results jump; none if they are continuous."""
    at = {value: results(value) for value in places}
    low, high = max(itertools.pairwise(sorted(at)), key=lambda pair: _apart(at[pair[0]], at[pair[1]]))
    first = _apart(at[low], at[high])
    while True:
        middle = float(readable(torch.tensor((low + high) / 2, dtype=dtype, device="cpu")))
        if not low < middle < high:
            break
        at[middle] = results(middle)
        left, right = _apart(at[low], at[middle]), _apart(at[middle], at[high])
        low, high = (low, middle) if left >= right else (middle, high)
    return (low, high) if _apart(at[low], at[high]) > max(first / 100, 1e-30) else ()


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
