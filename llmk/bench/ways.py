"""The ways to compute one call of an operator: llmk's and PyTorch's, eager and compiled, ready to time.

Every way has its own copies of the inputs and of the incoming gradients, so that none computes on what another has left
of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.bench.timing import first_line
from llmk.opcheck.calls import as_list, prepare
from llmk.registry import Op, Sample


@dataclass
class Way:
    """The timed modes: forward without gradients, and forward and backward, unless only a forward pass is offered."""

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

    def differentiable() -> list[Tensor]:
        return [output for output in as_list(function(*args, **kwargs)) if output.requires_grad]

    outputs = differentiable()
    if not outputs:
        return Way(name, forward, None)
    grads = incoming_gradients(outputs)
    del outputs

    def full() -> None:
        torch.autograd.grad(differentiable(), inputs, grads)

    return Way(name, forward, full)


def incoming_gradients(outputs: list[Tensor]) -> list[Tensor]:
    """Make training's gradients: 1 for a loss, else normal numbers, the same for every way, in the output's layout."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    grads = []
    for output in outputs:
        grad = torch.empty_like(output, requires_grad=False).fill_(1)
        if output.dim() > 0:
            grad.copy_(torch.randn(output.shape, generator=generator, dtype=torch.bfloat16, device=output.device))
        grads.append(grad)
    return grads


def own_ways(op: Op, compiled: bool) -> dict[str, Callable[..., Any]]:
    """llmk and PyTorch, eager and compiled."""
    ways: dict[str, Callable[..., Any]] = {"llmk eager": op.overload}
    if compiled:
        ways["llmk compiled"] = torch.compile(op.overload, fullgraph=True, dynamic=False)
    ways["torch eager"] = op.reference
    if compiled:
        ways["torch compiled"] = torch.compile(op.reference, dynamic=False)
    return ways


def ways_of(
    op: Op, sample: Sample, functions: dict[str, Callable[..., Any]], rows: dict[str, dict[str, Any]]
) -> tuple[list[Way], dict[str, dict[str, Any]]]:
    """The ways that work, and the beginnings of all rows, by way: the error of those that do not work."""
    ways = []
    for name, function in functions.items():
        row = rows.setdefault(name, {})
        if "error" in row:
            continue
        try:
            ways.append(way_of(name, op, sample, function))
        except Exception as error:  # whatever a way raises belongs in its row
            row["error"] = first_line(error)
    return ways, {name: rows[name] for name in functions}
