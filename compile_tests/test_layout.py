"""Where things are: files that are read at one sitting, helpers that stay with those who use them, a path as drawn."""

import ast
import functools
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_driver import stub_driver

import llmk
from llmk.ops.loss import row_loss_long

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("llmk", "ops", "registry", "opcheck", "compile_tests", "benchmarks", "examples", "docs")
LINKED = ("ops", "registry", "opcheck")
MOST_LINES = 400


def sources(*folders: str) -> list[Path]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("**/*.py"))]
    return [path for path in paths if path.resolve() == path]


def package_of(path: Path) -> str:
    """That a file is in, such as llmk.ops.norm."""
    parts = path.relative_to(ROOT).parent.parts
    return ".".join(("llmk", *parts) if parts[0] in LINKED else parts)


def helpers_from_elsewhere(tree: ast.Module, package: str) -> Iterator[str]:
    """The helpers of a family of operators, marked by an underscore, that a file of another package imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            is_helper = parts[:2] == ["llmk", "ops"] and len(parts) > 3 and parts[3].startswith("_")
            if is_helper and ".".join(parts[:3]) != package:
                yield name


@pytest.mark.parametrize("path", sources(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", sources(*LINKED), ids=lambda path: str(path.relative_to(ROOT)))
def test_helpers_of_a_family_are_used_by_it_alone(path: Path) -> None:
    assert list(helpers_from_elsewhere(ast.parse(path.read_text()), package_of(path))) == []


@pytest.mark.parametrize(("inside", "indent"), [("", ""), ("ops", "  "), ("registry", "  ")])
def test_every_folder_is_in_the_tree(inside: str, indent: str) -> None:
    """That opens CONTRIBUTING, with a line each."""
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    files = sources(inside) if inside else sources(*FOLDERS)
    folders = {path.relative_to(ROOT / inside).parts[0] for path in files} - {path.name for path in files}
    assert folders == set(re.findall(rf"^{indent}(\w+)/ ", section_of(tree, inside), re.MULTILINE))


def section_of(tree: str, folder: str) -> str:
    """The lines below a folder's own up to the next one's; of the root the whole."""
    return re.split(r"^\w", tree.partition(f"\n{folder}/ ")[2], maxsplit=1, flags=re.MULTILINE)[0] if folder else tree


@functools.cache
def users() -> dict[str, set[str]]:
    """By its name, the packages whose files import something or a thing of it."""
    found: dict[str, set[str]] = {}
    for path in sources("llmk", *LINKED):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    found.setdefault(name, set()).add(package_of(path))
    return found


def is_operator(path: Path) -> bool:
    return any(
        isinstance(node, ast.FunctionDef) and any("public_op" in ast.unparse(call) for call in node.decorator_list)
        for node in ast.parse(path.read_text()).body
    )


SHARED = [path for path in sources("ops") if not path.name.startswith("_") and not is_operator(path)]


@pytest.mark.parametrize("path", SHARED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_shared_has_several_users(path: Path) -> None:
    """A helper of a family without an underscore is another package's too; what is common is two families' at least."""
    package = package_of(path)
    others = users().get(f"{package}.{path.stem}", set()) - {package}
    assert len(others) >= (2 if path.parent.name == "common" else 1), others


@pytest.mark.parametrize(
    "source",
    [
        "from llmk.ops.norm import _rms_norm",
        "from llmk.ops.norm._rms_norm import forward",
        "import llmk.ops.norm._moments",
    ],
)
def test_the_scan_sees(source: str) -> None:
    tree = ast.parse(source)
    assert len(list(helpers_from_elsewhere(tree, "llmk.ops.loss"))) == 1
    assert list(helpers_from_elsewhere(tree, "llmk.ops.norm")) == []


def test_the_path_to_a_kernel_is_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In how-it-works: the files that a call of fused_linear_ce is in when it launches, and that of its products."""
    drawn = re.findall(r"^(ops/\S+\.py) ", (ROOT / "docs" / "how-it-works.md").read_text(), re.MULTILINE)
    passed: list[str] = []

    def launch(kernel: Any) -> Any:
        for frame in traceback.extract_stack():
            path = Path(frame.filename).resolve()
            if path.is_relative_to(ROOT / "ops") and str(path.relative_to(ROOT)) not in passed:
                passed.append(str(path.relative_to(ROOT)))
        return wrapped(kernel)

    wrapped = row_loss_long.wrap_triton
    monkeypatch.setattr(row_loss_long, "wrap_triton", launch)
    with stub_driver():
        llmk.functional.fused_linear_ce(torch.randn(4, 8), torch.randn(2048, 8), torch.tensor([0, 1, 2, 3]))
    assert len(drawn) <= 6
    assert [path for path in drawn if path != "ops/linear_loss/_chunked_linear.py"] == passed
