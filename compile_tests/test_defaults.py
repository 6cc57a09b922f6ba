"""torch.set_default_dtype and torch.set_default_device change nothing: no factory leaves its dtype or device open."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from llmk.opcheck.calls import Outcome, call, incoming_gradients
from llmk.opcheck.inputs import with_default_dtype
from llmk.registry import OPS, Op, Sample
from llmk.registry.backends import INTERPRET

ROOT = Path(__file__).resolve().parent.parent
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randn", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


VALUES: list[torch.dtype | str] = [torch.bfloat16] if INTERPRET else [torch.bfloat16, torch.float64, "meta"]


def sources() -> Iterator[Path]:
    for folder in ("ops", "registry"):
        yield from (ROOT / folder).glob("**/*.py")
    yield from (ROOT / "llmk").glob("*.py")


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def leaves_open(node: ast.AST) -> bool:
    """Whether a call makes a tensor whose dtype or device is the default one."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("torch"), "where"), [_, a, b]):
            return is_number(a) and is_number(b)
        case ast.Call(ast.Attribute(ast.Name("torch"), name), keywords=keywords) if name in FACTORIES:
            given = {keyword.arg for keyword in keywords}
            return not ({"dtype", "device"} <= given or None in given)  # None: of **options
    return False


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.ones((), device=x.device)", True),
        ("torch.full((3,), 1.0, dtype=x.dtype)", True),
        ("torch.where(x > 0, -1.0, 0.0)", True),
        ("torch.where(x > 0, x, 0.0)", False),
        ("torch.zeros(3, dtype=x.dtype, device=x.device)", False),
    ],
)
def test_the_scan_sees_what_is_open(line: str, expected: bool) -> None:
    assert any(leaves_open(node) for node in ast.walk(ast.parse(line))) == expected


def test_every_factory_has_a_dtype_and_a_device() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if leaves_open(node)
    ]
    assert not found, "\n".join(found)


def default(value: torch.dtype | str) -> AbstractContextManager[Any]:
    return torch.device(value) if isinstance(value, str) else with_default_dtype(value)


def bits(outcome: Outcome) -> list[torch.Tensor]:
    tensors = [*outcome.outputs, *outcome.gradients.values()]
    return [t.detach().contiguous().view(torch.uint8) for t in tensors if t is not None and t.dim()] + [
        t.detach().view(1).view(torch.uint8) for t in tensors if t is not None and not t.dim()
    ]


def require_the_same(op: Op, samples: list[Sample], fn: Callable[..., Any], value: torch.dtype | str) -> None:
    torch._dynamo.reset()
    for sample in samples:
        grads: list[torch.Tensor] = []

        def known(outputs: Any, grads: list[torch.Tensor] = grads) -> list[torch.Tensor]:
            grads[:] = grads or incoming_gradients(outputs)
            return grads

        plain = call(op, sample, fn=fn, grads=known)
        torch._dynamo.reset()
        with default(value):
            other = call(op, sample, fn=fn, grads=known)
        for a, b in zip(bits(plain), bits(other), strict=True):
            assert a.device == b.device
            assert torch.equal(a, b), sample


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.kernels
def test_eager(name: str, value: torch.dtype | str, device: torch.device) -> None:
    op = OPS[name]
    samples = [s for s in op.samples(device, torch.float32) if all(a.numel() < 10_000 for a in s.args[:1])]
    require_the_same(op, samples, op.overload, value)


def compiled(op: Op, backend: str) -> Callable[..., Any]:
    return torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, backend=backend)


@pytest.mark.skipif(INTERPRET, reason="opaque")
@pytest.mark.parametrize("name", OPS)
def test_compiled(name: str, device: torch.device) -> None:
    op = OPS[name]
    assert op.resized is not None
    require_the_same(op, [op.resized(8, device, torch.float32)], compiled(op, "aot_eager"), torch.float64)


@pytest.mark.skipif(INTERPRET, reason="opaque")
def test_compiled_sum(device: torch.device) -> None:
    """Of `fused_linear_ce`, whose divisor nobody computes: Inductor reads a buffer as what the fake says it is."""
    op = OPS["fused_linear_ce"]
    assert op.resized is not None
    sample = op.resized(8, device, torch.float32)
    sample = Sample(sample.args, {**sample.kwargs, "reduction": "sum"})
    require_the_same(op, [sample], compiled(op, "inductor"), torch.bfloat16)
