"""Each argument of each operator with values and sizes that it does not take: the error names it, eager and traced."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import llmk
from compile_tests.helpers.wrong_arguments import complete, error_of, not_named, wrong_sizes
from llmk.opcheck.inputs import as_list
from llmk.registry import OPS, Op, set_short_path_enabled


def calls_of(op: Op) -> list[dict[str, Any]]:
    """The arguments of few samples, those with the most tensors first, that have each of the tensors once."""
    samples = [op.bind(sample) for sample in op.samples(torch.device("cpu"), torch.float32)]
    tensors = {id(s): {name for name, value in s.items() if isinstance(value, Tensor | list)} for s in samples}
    chosen, seen = [], set[str]()
    for given in sorted(samples, key=lambda given: (len(tensors[id(given)]), len(given)), reverse=True):
        if tensors[id(given)] - seen:
            chosen.append(given)
            seen |= tensors[id(given)]
    return chosen


@pytest.mark.parametrize("way", [torch.no_grad, partial(set_short_path_enabled, False)], ids=["fast", "dispatcher"])
@pytest.mark.parametrize("name", OPS)
def test_an_error_names_the_argument(name: str, way: Any) -> None:
    fn = getattr(llmk.functional, name)
    for given in calls_of(OPS[name]):
        with way():
            assert not_named(fn, complete(fn, given), but=("vocab_start", "num_classes")) == []


@pytest.mark.parametrize("name", OPS)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    """The error names one of the arguments; what the operator takes, its reference takes, and gives as much.

    A loss calls its labels `target` where it looks at their numbers.
    """
    op, wrong = OPS[name], []
    begins = re.compile(rf"({'|'.join(op.argument_names())}|target)(\[\d+\])?: expected ")
    changes = ((given, name, wrong) for given in calls_of(op) for name in given for wrong in wrong_sizes(given[name]))
    for given, argument, changed in changes:
        arguments = given | {argument: changed}
        if said := error_of(op.overload, arguments):
            wrong += [] if begins.match(said) else [f"{argument}={changed}: {said}"]
            continue
        shapes = [[tuple(y.shape) for y in as_list(fn(**arguments))] for fn in (op.overload, op.reference)]
        wrong += [] if shapes[0] == shapes[1] else [f"{argument}={changed}: {shapes}"]
    assert wrong == []
