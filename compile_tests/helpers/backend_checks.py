"""Holding a function through the backend against the function itself: what is found, and the accuracy rule."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from llmk.accuracy.neighbours import NEIGHBOURS, Change, copy_with_layout, nudged, to_float64
from llmk.accuracy.rule import accuracy_violation
from llmk.compiler import Report
from llmk.compiler.backend import Backend
from llmk.compiler.rules import chosen

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def rewriting(
    report: Report,
    without: Collection[str] = (),
    drop_logits: bool = False,
    look: Callable[[GraphModule], None] = lambda gm: None,
    then: Compiler = lambda gm, example_inputs: gm,
    verify: bool = True,
) -> Compiler:
    """A backend that rewrites graphs, looks at them and runs them as they are, or with another backend."""
    backend = Backend(chosen(None, without), (), report, drop_logits, verify)

    def compiled(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report.add(backend.rewrite(gm))
        look(gm)
        return then(gm, example_inputs)

    return compiled


def rewritten(fn: Callable[..., Any], report: Report, **options: Any) -> Callable[..., Any]:
    """The function with its graphs rewritten, without Inductor; options are those of `rewriting`."""
    torch._dynamo.reset()
    return torch.compile(fn, backend=rewriting(report, **options))


def _as_it_is(gm: GraphModule, example_inputs: Any) -> Any:
    return make_boxed_func(gm.forward)


THROUGH_AUTOGRAD = aot_autograd(
    fw_compiler=_as_it_is,
    bw_compiler=_as_it_is,
    partition_fn=min_cut_rematerialization_partition,
    keep_inference_input_mutations=True,
)
"""The steps after the rewriting but Inductor: AOTAutograd's graphs, run as they are.

Its partition and its writes to inputs are Inductor's and `aot_eager`'s.
"""


def results(fn: Callable[..., Any], args: Sequence[Any], change: Change = copy_with_layout) -> list[Tensor]:
    """Outputs, and gradients for the same incoming ones, with every tensor among the arguments changed (copied)."""
    args = [change(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
    outputs = fn(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    wanted = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted, incoming) if differentiable and wanted else ()
    return [y.detach() for y in (*outputs, *gradients)]


def of_step(model: nn.Module, run: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """The results of a model's training step, run in some way: the loss and every gradient."""
    model.zero_grad()
    loss = run(*args)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def require_same_step(model: nn.Module, run: Callable[..., Any], args: Sequence[Tensor]) -> None:
    """Require that a run of the model trains as the model itself, by the accuracy rule."""

    def plain(change: Change) -> list[Tensor]:
        changed = copy.deepcopy(model)
        for parameter in changed.parameters():
            parameter.data = change(parameter.data)
        return of_step(changed, changed, [change(x) for x in args])

    require_right(of_step(model, run, args), plain)


def require_right(got: Sequence[Tensor], plain: Callable[[Change], Sequence[Tensor]]) -> None:
    """The accuracy rule, and that whole numbers are the same.

    Args:
        got: Results to check.
        plain: Gives the same results in plain PyTorch, with what goes in changed: copied, cast or nudged.
    """
    composition, exact = plain(copy_with_layout), plain(to_float64)
    neighbours: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
    for i, (x, y, z) in enumerate(zip(got, composition, exact, strict=True)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"result {i}"
        if not x.is_floating_point():
            assert torch.equal(x, y), f"result {i}"
            continue
        if accuracy_violation(x, y, z) is not None and not neighbours:
            neighbours = [(plain(nudged(seed)), plain(nudged(seed, torch.float64))) for seed in range(NEIGHBOURS)]
        near = [(inexact[i], right[i]) for inexact, right in neighbours]
        violation = accuracy_violation(x, y, z, neighbours=near)
        assert violation is None, f"result {i}: {violation}"


def require_equal(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> Report:
    """Require the accuracy rule, dtypes and shapes for every output and gradient, rewritten; return what was found."""
    report = Report()
    require_same(rewritten(fn, report, **options), fn, args)
    return report


def require_same(run: Callable[..., Any], fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """The same of any way to run a function."""
    require_right(results(run, args), lambda change: results(fn, args, change))
