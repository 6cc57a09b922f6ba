"""The ways to compute one workload of an operator: llmk's, PyTorch's and the peers', ready to time.

Every way has its own copies of the inputs and of the incoming gradients, because some peers overwrite theirs: the
others must not compute on what is left of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Installed
from benchmarks.products import PRODUCTS
from llmk.accuracy.neighbours import copy_with_layout
from llmk.bench.timing import first_line
from llmk.bench.ways import Way, incoming_gradients, own_ways, wanted, ways_of
from llmk.opcheck.calls import as_list, prepare
from llmk.registry import Op, Sample

MAX_ERROR = 2e-2  # relative L2 error of bfloat16 results beside float32: what is above is another function


def results(
    op: Op, sample: Sample, function: Callable[..., Any], change: Callable[[Tensor], Tensor] = copy_with_layout
) -> list[Tensor]:
    """Outputs, then gradients unless only a forward pass is offered, of a call on copies of the inputs."""
    args, kwargs, tensors = prepare(op, sample, wanted(op, sample), change)
    outputs = as_list(function(*args, **kwargs))
    found = [output.detach().clone() for output in outputs]
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        inputs = [tensors[name] for name in wanted(op, sample)]
        found += torch.autograd.grad(differentiable, inputs, incoming_gradients(differentiable))
    return found


def exact_results(op: Op, sample: Sample) -> list[Tensor]:
    """The results of the reference in float32."""
    return results(op, sample, op.reference, lambda x: x.detach().float() if x.is_floating_point() else x.clone())


def relative_error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative L2 error of the results that there are; infinite for a NaN or a wrong shape."""
    errors = []
    for a, b in zip(actual, exact, strict=False):
        if a.shape != b.shape:
            return float("inf")
        size = torch.linalg.vector_norm(b.float()).clamp(min=torch.finfo(torch.float32).tiny)
        error = (torch.linalg.vector_norm(a.float() - b) / size).item()
        errors.append(error if error == error else float("inf"))
    return max(errors)


def make_ways(op: Op, sample: Sample, peers: list[Installed], compiled: bool) -> tuple[list[Way], dict[str, dict]]:
    """Every way that works, and the beginnings of all rows: the error of those that do not, how exact peers are."""
    rows: dict[str, dict[str, Any]] = {}
    ways, rows = ways_of(op, sample, own_ways(op, compiled) | _functions_of_peers(op, sample, peers, rows), rows)
    if op.name in PRODUCTS:
        rows["products alone"] = {}
        ways.append(Way("products alone", *PRODUCTS[op.name](*sample.args, **sample.kwargs)))
    return ways, rows


def _functions_of_peers(
    op: Op, sample: Sample, peers: list[Installed], rows: dict[str, dict[str, Any]]
) -> dict[str, Callable[..., Any]]:
    """The peers' functions, checked on copies of the inputs against the reference in float32."""
    functions = {}
    exact: list[Tensor] | None = None
    for peer in peers:
        function = peer.function(op.name, sample.args, sample.kwargs)
        if function is None:
            continue
        functions[peer.name], rows[peer.name] = function, {}
        try:
            exact = exact_results(op, sample) if exact is None else exact
            try:
                found = results(op, sample, function)
            except Exception as error:  # one that has no backward pass here is timed without it
                functions[peer.name] = function = torch.no_grad()(function)
                found = results(op, sample, function)
                rows[peer.name]["backward_error"] = first_line(error)
            error = relative_error(found, exact)
            rows[peer.name]["check_error"] = error if error < float("inf") else None
            if error > MAX_ERROR:
                rows[peer.name]["error"] = f"wrong result ({error:.2g})"
        except Exception as error:
            rows[peer.name]["error"] = first_line(error)
    return functions
