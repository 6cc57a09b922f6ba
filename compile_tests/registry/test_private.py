"""Private names of torch and triton: all in one package, and none of them one that llmk cannot do without."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from llmk.registry import jit
from llmk.registry.devices import INTERPRET
from llmk.registry.private import kernels, modes, names, tensors

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ROOT / "registry" / "private"
PACKAGES = ("llmk", "ops", "registry", "opcheck")
PUBLIC_OF_TRITON = ("triton.language", "triton.testing")


def sources() -> dict[Path, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).glob("**/*.py"))]
    return {path: ast.parse(path.read_text()) for path in paths if path.resolve() == path}


def names_of_ours(trees: list[ast.Module]) -> set[str]:
    """Names that llmk itself defines or assigns to, and in which modules of transformers keep their settings."""
    names = {"_attn_implementation", "_asdict", "_replace"}  # the last two are public methods of named tuples
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_uses(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in ours:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
            ("triton.runtime", "triton.knobs", "triton.backends", "triton.compiler")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{module}.{alias.name}".strip(".") for alias in node.names):
                of_triton = name.startswith("triton.") and not name.startswith(PUBLIC_OF_TRITON)
                if of_triton or (name.startswith("torch") and "._" in name):
                    yield f"line {node.lineno}: {name}"


def test_private_names_are_in_one_package() -> None:
    trees = sources()
    ours = names_of_ours(list(trees.values()))
    found = {
        str(path.relative_to(ROOT)): uses
        for path, tree in trees.items()
        if path.parent != PRIVATE and (uses := list(private_uses(tree, ours)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch._C.f()",
        "x._version",
        "from torch._dynamo import exc",
        "import torch._dynamo",
        "import triton.knobs",
        "triton.knobs.runtime.debug",
        "from triton import knobs",
        "from triton.runtime import driver",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert list(private_uses(ast.parse(source), set()))


def test_llmk_works_without_any_one_of_them() -> None:
    """They are renamed, a few at a time: `import llmk` works, and an operator's numbers stay, eager and compiled."""
    command = [sys.executable, "-m", "compile_tests.helpers.private_checks"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()


def test_a_probe_finds_functorch() -> None:
    depths = []

    def f(x: torch.Tensor) -> torch.Tensor:
        depths.append((modes._depth_of_probe(), modes.functorch_depth()))
        return x.sum()

    f(torch.ones(2))
    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    assert depths == [(0, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize("gelu", [False, True])
def test_a_product_is_activated_without_the_epilogue(gelu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bias, x, w = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    linear, y = torch.addmm(bias, x, w), torch.empty(3, 5)
    monkeypatch.setattr(tensors, "_addmm_activation", None)
    tensors.addmm_activation(bias, x, w, y, gelu=gelu)
    assert torch.equal(y, F.gelu(linear, approximate="tanh") if gelu else F.relu(linear))


def test_what_cannot_be_done_without_says_so() -> None:
    missing = names.required("torch._C._no_such_name")
    with pytest.raises(RuntimeError, match=r"needs torch\._C\._no_such_name\.more"):
        missing.more(1)
    assert not hasattr(missing, "__wrapped__")


def test_an_interpreter_that_its_numpy_breaks_is_refused() -> None:
    for triton, numpy in [((3, 6), "2.3.5"), ((3, 7), "2.4.6"), ((3, 9), "2.10.0"), ((3, 6), "1.26.4")]:
        kernels.check_interpreter(triton, numpy)
    for numpy in ("2.4.0", "2.4.6", "2.10.0", "3.0.0rc1"):
        with pytest.raises(ImportError, match=rf"triton 3\.6 expects numpy<2\.4, got numpy {numpy} \(pip install"):
            kernels.check_interpreter((3, 6), numpy)


@jit
def _cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets).to(y_ptr.dtype.element_ty))


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRET, reason="the interpreter alone converts so: opcheck compares the others with float64")
def test_the_interpreter_converts_bfloat16_as_a_gpu_does() -> None:
    """Triton's own drops the bits that bfloat16 does not have, and makes other numbers of subnormal ones."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ends = [float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, -0.0, 1e-40, 1.00390625, 1.01171875]
    wide = torch.cat([torch.tensor(ends), torch.randn(1024 - len(ends))])
    for x, dtype in ((every, torch.float32), (wide, torch.bfloat16)):
        y = torch.empty(x.shape, dtype=dtype)
        _cast_kernel[(1,)](x, y, x.numel())
        torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)
