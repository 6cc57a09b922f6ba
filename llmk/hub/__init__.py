"""llmk as a kernel of the Hugging Face Hub: `write(folder)` makes the repository that the package `kernels` loads.

The files are the installed package's own: kernel.py and all that it imports. Two things are changed in them. Imports
are relative, because a kernel has no name of its own to be imported by. Operators are registered in a namespace named
after what the files say, so that a kernel, another version of it and the package run in one process.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import llmk
from llmk.transformers.slots import LAYERS

PACKAGE = Path(llmk.__file__).parent
ENTRY = "llmk.hub.kernel"
"""The module that is the kernel's `__init__.py`."""
VARIANT = "torch-universal"
"""The folder's name says what a kernel runs on: this one wherever PyTorch and Triton do."""
IMPORT = re.compile(r"^(\s*)from llmk\b\.?([\w.]*) import ", re.MULTILINE)
NAMESPACE = re.compile(r'(?<=torch\.ops\.)llmk\b|\bllmk(?=::)|(?<=[(= ]")llmk(?=")')
"""The places of the operators' namespace: `torch.ops.llmk`, `llmk::NAME` and the whole string "llmk"."""


def write(folder: Path, repository: str = "OWNER/llmk", version: int = 1) -> Path:
    """Write the repository of a kernel into a folder that is empty or not there.

    Args:
        folder: `kernels.get_local_kernel(folder)` loads the kernel from it, and `hf upload` takes it as it is.
        repository: The name on the Hub that the card tells people to load, OWNER/NAME.
        version: The kernel's version there, a whole number.

    Returns:
        The folder in it that has the kernel's files.

    Raises:
        ValueError: The folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder: expected one that is empty or not there, got {folder}")
    files = kernel_files()
    name = f"_llmk_universal_{_digest(files)}"
    variant = folder / "build" / VARIANT
    for path, text in files.items():
        target = variant / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(NAMESPACE.sub(name, text))
    metadata = {
        "id": name,
        "name": "llmk",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},  # `kernels` wants one named; the folder's name is what decides
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "README.md").write_text(_card(repository, version))
    return variant


def kernel_files() -> dict[str, str]:
    """The text of each file of a kernel, by its path there, with the operators' namespace still llmk's."""
    files = {}
    for module in sorted(_modules_of(ENTRY)):
        source = _file_of(module)
        path = Path("__init__.py") if module == ENTRY else source.relative_to(PACKAGE)
        dots = "." * len(path.parts)
        files[path.as_posix()] = IMPORT.sub(rf"\1from {dots}\2 import ", source.read_text())
    folders = {folder for path in files for folder in Path(path).parents}
    return {(folder / "__init__.py").as_posix(): "" for folder in sorted(folders)} | files


def _modules_of(entry: str) -> set[str]:
    """A module and those of llmk that it needs, also if it imports them only when it is called."""
    found: set[str] = set()
    todo = [entry]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += _imported(ast.parse(_file_of(module).read_text()))
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "llmk":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if _file_of(name).exists() else node.module


def _file_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]


def _card(repository: str, version: int) -> str:
    slots = "\n".join(f"| `{slot}` | {_first_line(layer)} |" for slot, layer in LAYERS.items())
    values = {
        "REPOSITORY": repository,
        "KERNEL_VERSION": str(version),
        "LLMK_VERSION": llmk.__version__,
        "SLOTS": slots,
    }
    card = (Path(__file__).parent / "card.md").read_text()
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], card)


def _first_line(layer: type) -> str:
    return (layer.__doc__ or "").partition("\n")[0]
