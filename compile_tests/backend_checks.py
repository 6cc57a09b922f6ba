"""What the backend makes of a function, against the function itself: what it found, and by the accuracy rule."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.compiler import Report
from llmk.compiler.backend import Backend
from llmk.compiler.rules import chosen
from llmk.opcheck.accuracy import accuracy_violation


def rewritten(
    fn: Callable[..., Any],
    report: Report,
    without: Collection[str] = (),
    drop_logits: bool = False,
    look: Callable[[torch.fx.GraphModule], None] = lambda gm: None,
) -> Callable[..., Any]:
    """The function with its graphs rewritten, looked at and run as they are, without Inductor."""
    backend = Backend(chosen(None, without), (), report, drop_logits)

    def run_as_it_is(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report.add(backend.rewrite(gm))
        look(gm)
        return gm

    torch._dynamo.reset()
    return torch.compile(fn, backend=run_as_it_is)


def results(fn: Callable[..., Any], args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, and gradients for the same incoming ones, with the inputs in another dtype if one is given."""
    args = [copied(x, dtype) for x in args]
    outputs = fn(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    wanted = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted, incoming) if differentiable and wanted else ()
    return [y.detach() for y in (*outputs, *gradients)]


def copied(x: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(x, Tensor):
        return x
    if dtype == torch.float64 and x.is_complex():
        return x.to(torch.complex128)
    change = dtype if x.is_floating_point() else None
    return x.detach().clone().to(change or x.dtype).requires_grad_(x.requires_grad)


def require_equal(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> Report:
    """That rewriting keeps the accuracy rule and dtypes for every output and gradient; what was found."""
    report = Report()
    got, plain = results(rewritten(fn, report, **options), args), results(fn, args)
    exact = results(fn, args, torch.float64)
    for i, (x, y, z) in enumerate(zip(got, plain, exact, strict=True)):
        assert x.dtype == y.dtype, f"result {i}"
        violation = accuracy_violation(x, y, z)
        assert violation is None, f"result {i}: {violation}"
    return report
