"""No factory leaves its dtype or device open: torch.set_default_dtype and torch.set_default_device change nothing.

opcheck asks it of every operator's calls, with the promises `default_dtype` and `default_device`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmk.accuracy.neighbours import with_default_dtype
from llmk.opcheck.calls import call
from llmk.opcheck.inputs import same_results
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

ROOT = Path(__file__).resolve().parents[2]
FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def sources() -> Iterator[Path]:
    for folder in ("ops", "registry"):
        yield from (ROOT / folder).glob("**/*.py")
    yield from (ROOT / "llmk").glob("*.py")


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def leaves_open(node: ast.AST) -> bool:
    """Return True if a call makes a tensor whose dtype or device is the default one."""
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


@pytest.mark.skipif(INTERPRET, reason="opaque")
def test_compiled_sum(device: torch.device) -> None:
    """Nobody computes the divisor of `fused_linear_ce`: Inductor reads a buffer as what the fake says it is."""
    op = OPS["fused_linear_ce"]
    assert op.resized is not None
    sample = op.resized(8, device, torch.float32)
    sample = Sample(sample.args, {**sample.kwargs, "reduction": "sum"})
    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True)
    plain = call(op, sample, fn=fn)
    torch._dynamo.reset()
    with with_default_dtype(torch.bfloat16):
        assert same_results(call(op, sample, fn=fn), plain)
