"""Tests where things are: files of one sitting, helpers that stay with those who use them, a path as drawn."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmk

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("llmk", "ops", "registry", "opcheck", "compile_tests", "benchmarks", "tools", "examples", "docs")
LINKED = ("ops", "registry", "opcheck")
MOST_LINES = 600
MOST_BYTES = 200 * 1024


def sources(*folders: str) -> list[Path]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("**/*.py"))]
    return [path for path in paths if path.resolve() == path]


def package_of(path: Path) -> str:
    """Return the package that a file is in, such as llmk.ops.norm."""
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
            marked = next((i for i, part in enumerate(parts) if i > 2 and part.startswith("_")), None)
            if parts[:2] == ["llmk", "ops"] and marked is not None and ".".join(parts[:marked]) != package:
                yield name


def test_no_file_is_long() -> None:
    assert [str(path) for path in sources(*FOLDERS) if len(path.read_text().splitlines()) > MOST_LINES] == []


def test_no_file_is_large() -> None:
    """So that a clone stays small: results are kept as summaries, and reports are made by commands."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert [path.name for path in paths if path.is_file() and path.stat().st_size > MOST_BYTES] == []


def test_helpers_of_a_family_are_used_by_it_alone() -> None:
    for path in sources(*LINKED):
        assert list(helpers_from_elsewhere(ast.parse(path.read_text()), package_of(path))) == [], path


def users() -> dict[str, set[str]]:
    """Return the packages whose files import something or a thing of it, by its name."""
    found: dict[str, set[str]] = {}
    for path in sources("llmk", *LINKED):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    found.setdefault(name, set()).add(package_of(path))
    return found


def run_time_imports(path: Path) -> set[str]:
    """The modules of llmk that a file imports when it is imported, which those for type checkers alone are not."""
    body = ast.parse(path.read_text()).body
    found = {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in found if name.startswith("llmk.")}


def test_operators_import_patterns_and_nothing_else_of_the_backend() -> None:
    """The backend imports the registry, and patterns import what is private, so that no import goes in a circle."""
    patterns = {"llmk.compiler.patterns", "llmk.compiler.spellings"}
    for path in sources("ops", "registry"):
        of_backend = {name for name in run_time_imports(path) if name.startswith("llmk.compiler")}
        assert of_backend <= (patterns if path.is_relative_to(ROOT / "ops") else set()), path
    reached, queue = set[str](), list(patterns)
    while queue:
        name = queue.pop()
        if name not in reached and not name.startswith("llmk.registry.private."):
            reached.add(name)
            queue += run_time_imports(ROOT / f"{name.replace('.', '/')}.py")
    assert not {name for name in reached if name.startswith(("llmk.registry", "llmk.ops"))}
    for path in sources("llmk/compiler"):
        assert not any(name.startswith("llmk.ops") for name in run_time_imports(path)), path


def test_only_programs_import_the_checker() -> None:
    """The code that runs in a model, and its trials' rule of accuracy, import none of opcheck."""
    programs = {ROOT / "llmk" / "__main__.py", *sources("llmk/bench")}
    for path in {*sources("llmk", "ops", "registry")} - programs:
        assert not any(name.startswith("llmk.opcheck") for name in run_time_imports(path)), path


def is_operator(path: Path) -> bool:
    return any(
        isinstance(node, ast.FunctionDef) and any("public_op" in ast.unparse(call) for call in node.decorator_list)
        for node in ast.parse(path.read_text()).body
    )


def test_what_is_shared_has_several_users() -> None:
    """A helper of a family without an underscore is another package's too; what is common is two families' at least."""
    found = users()
    for path in sources("ops"):
        if not path.name.startswith("_") and not is_operator(path):
            package = package_of(path)
            others = found.get(f"{package}.{path.stem}", set()) - {package}
            assert len(others) >= (2 if path.parent.name == "common" else 1), f"{path}: {others}"


@pytest.mark.parametrize(
    "source",
    [
        "from llmk.ops.norm import _rms_norm_kernels",
        "from llmk.ops.norm._rms_norm_kernels import forward",
        "import llmk.ops.norm._moments",
    ],
)
def test_the_scan_sees(source: str) -> None:
    tree = ast.parse(source)
    assert len(list(helpers_from_elsewhere(tree, "llmk.ops.loss"))) == 1
    assert list(helpers_from_elsewhere(tree, "llmk.ops.norm")) == []


EXTRAS = {"accelerate", "expecttest", "hypothesis", "kernels", "matplotlib", "peft", "tqdm", "transformers", "trl"}
"""Packages that a test may find missing; pytest and, through Triton's interpreter, numpy every test needs."""


def names_imported(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """The modules that a module of the repository imports when it is imported."""
    path = ROOT.joinpath(*module.split("."))
    file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)
    body = ast.parse(file.read_text()).body if file else []
    return frozenset().union(*map(names_imported, body))


def extras_of(modules: set[str]) -> set[str]:
    """The extras that are imported with modules, by themselves or by what they import."""
    reached, ahead = set(modules), list(modules)
    while ahead:
        new = imports_of(ahead.pop()) - reached
        reached |= new
        ahead += new
    return {name.partition(".")[0] for name in reached} & EXTRAS


def test_a_test_imports_no_test_and_skips_without_an_extra() -> None:
    for path in (path for path in sources("compile_tests") if path.name.startswith("test_")):
        skipped: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            names = names_imported(node)
            assert not any(".test_" in name for name in names), path
            assert extras_of(names) <= skipped, f"{path}: pytest.importorskip comes before {ast.unparse(node)}"
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                skipped |= set(re.findall(r"pytest\.importorskip\('(\w+)", ast.unparse(node)))


ROOMS = ("", "drivers", "objectives", "rows", "chunked", "kernels", "head")
"""The folders of `ops/linear_loss`, in order, and last a file: each imports only from those after it."""


def test_rooms_of_linear_loss_import_one_way() -> None:
    home, package = ROOT / "ops" / "linear_loss", "llmk.ops.linear_loss."
    for path in sources("ops/linear_loss"):
        room = path.parent.name if path.parent != home else path.stem if path.stem in ROOMS else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
                name = node.module.removeprefix(package).partition(".")[0]
                target = name if name in ROOMS else ""
                if target != room:
                    assert ROOMS.index(room) < ROOMS.index(target), f"{path} imports {node.module}"


MOST_PARAMETERS = 8


def test_options_are_handed_on_as_values() -> None:
    """Only what users call lists all of its options: one more of these is added in one place."""
    for node in (node for path in sources("llmk/losses") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.FunctionDef) and node.name not in llmk.losses.__all__:
            given = node.args
            assert len(given.posonlyargs + given.args + given.kwonlyargs) <= MOST_PARAMETERS, node.name
