"""The ways to compute one workload of an operator: llmk's, PyTorch's and the peers', ready to time.

Every way has its own copies of the inputs and of the incoming gradients, because some peers overwrite theirs: the
others must not compute on what is left of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Installed
from benchmarks.products import PRODUCTS
from benchmarks.timing import first_line
from llmk.opcheck.calls import as_list, copy_with_layout, prepare
from llmk.registry import Op, Sample

MAX_ERROR = 2e-2  # relative L2 error of bfloat16 results beside float32: what is above is another function


@dataclass
class Way:
    """What is timed: forward without gradients, and forward and backward, unless only a forward pass is offered."""

    name: str
    forward: Callable[[], Any]
    full: Callable[[], Any] | None


def wanted(op: Op, sample: Sample) -> list[str]:
    """The inputs that get gradients in training."""
    bound = op.bind(sample)
    return [name for name in op.trained or op.differentiable if isinstance(bound.get(name), Tensor)]


def way_of(name: str, op: Op, sample: Sample, function: Callable[..., Any]) -> Way:
    args, kwargs, tensors = prepare(op, sample, wanted(op, sample))
    inputs = [tensors[key] for key in wanted(op, sample)]

    def forward() -> None:
        with torch.no_grad():
            function(*args, **kwargs)

    outputs = as_list(function(*args, **kwargs))
    grads = incoming_gradients(outputs)
    if not all(output.requires_grad for output in outputs):
        return Way(name, forward, None)
    del outputs

    def full() -> None:
        torch.autograd.grad(as_list(function(*args, **kwargs)), inputs, grads)

    return Way(name, forward, full)


def incoming_gradients(outputs: list[Tensor]) -> list[Tensor]:
    """As in training: 1 for a loss, else normal numbers, the same for every way, in the output's layout."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    grads = []
    for output in outputs:
        grad = torch.empty_like(output, requires_grad=False).fill_(1)
        if output.dim() > 0:
            grad.copy_(torch.randn(output.shape, generator=generator, dtype=torch.bfloat16, device=output.device))
        grads.append(grad)
    return grads


def results(
    op: Op, sample: Sample, function: Callable[..., Any], change: Callable[[Tensor], Tensor] = copy_with_layout
) -> list[Tensor]:
    """Outputs, then gradients unless only a forward pass is offered, of a call on copies of the inputs."""
    args, kwargs, tensors = prepare(op, sample, wanted(op, sample), change)
    outputs = as_list(function(*args, **kwargs))
    grads = incoming_gradients(outputs)
    found = [output.detach().clone() for output in outputs]
    if all(output.requires_grad for output in outputs):
        found += torch.autograd.grad(outputs, [tensors[name] for name in wanted(op, sample)], grads)
    return found


def exact_results(op: Op, sample: Sample) -> list[Tensor]:
    """What the reference gives in float32."""
    return results(op, sample, op.reference, lambda x: x.detach().float() if x.is_floating_point() else x.clone())


def relative_error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative L2 error of the results that there are; infinite for a NaN or a wrong shape."""
    errors = []
    for a, b in zip(actual, exact, strict=False):
        if a.shape != b.shape:
            return float("inf")
        size = torch.linalg.vector_norm(b).clamp(min=torch.finfo(torch.float32).tiny)
        error = (torch.linalg.vector_norm(a.float() - b) / size).item()
        errors.append(error if error == error else float("inf"))
    return max(errors)


def own_ways(op: Op, compiled: bool) -> dict[str, Callable[..., Any]]:
    """llmk and PyTorch, eager and compiled."""
    ways: dict[str, Callable[..., Any]] = {"llmk eager": op.overload}
    if compiled:
        ways["llmk compiled"] = torch.compile(op.overload, fullgraph=True, dynamic=False)
    ways["torch eager"] = op.reference
    if compiled:
        ways["torch compiled"] = torch.compile(op.reference, dynamic=False)
    return ways


def make_ways(op: Op, sample: Sample, peers: list[Installed], compiled: bool) -> tuple[list[Way], dict[str, dict]]:
    """Every way that works, and the beginnings of all rows: the error of those that do not, how exact peers are."""
    rows: dict[str, dict[str, Any]] = {}
    functions = own_ways(op, compiled) | _functions_of_peers(op, sample, peers, rows)
    ways = []
    for name, function in functions.items():
        row = rows.setdefault(name, {})
        if "error" in row:
            continue
        try:
            ways.append(way_of(name, op, sample, function))
        except Exception as error:  # whatever a peer raises belongs in its row
            row["error"] = first_line(error)
    rows = {name: rows[name] for name in functions}
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
            error = relative_error(results(op, sample, function), exact)
            rows[peer.name]["check_error"] = error if error < float("inf") else None
            if error > MAX_ERROR:
                rows[peer.name]["error"] = f"wrong result ({error:.2g})"
        except Exception as error:
            rows[peer.name]["error"] = first_line(error)
    return functions
