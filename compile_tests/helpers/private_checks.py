"""llmk with private names of torch or triton renamed: run by test_private.py, in a process that has not imported it.

A few names at a time are renamed in a process of their own, forked from this one: what they all import is imported
once. Where that does not work, each of the names is renamed by itself.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import torch
import torch._decomp.decompositions_for_jvp
import torch._inductor.compile_fx  # what they share; nothing may run, for autograd's threads do not fork

from compile_tests.helpers.forked import forked

TOGETHER = 24
PRIVATE = Path(__file__).resolve().parents[2] / "registry" / "private"
LOOKED_UP_BY = {"find": 0, "required": 0, "attribute": 1, "getattr": 1}
"""The argument that is the name."""


def private_names() -> list[str]:
    """The strings that the package looks names up by."""
    names = []
    for node in (node for path in sorted(PRIVATE.glob("*.py")) for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = LOOKED_UP_BY.get(node.func.id)
            if place is not None and isinstance(node.args[place], ast.Constant):
                names.append(node.args[place].value)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("names", "paths", "kinds"):
            names += ast.literal_eval(node.value)
    return list(dict.fromkeys(names))


class _Renamed(SourceFileLoader):
    """Loads a module as if it had to look up other names."""

    def __init__(self, fullname: str, path: str, names: Sequence[str]) -> None:
        super().__init__(fullname, path)
        self.names_there = names

    def get_code(self, fullname: str):  # past the cache of compiled files
        source = Path(self.path).read_text()
        for name in self.names_there:
            source = source.replace(f'"{name}"', f'"{name}_renamed"')
        return compile(source, self.path, "exec")


class _Renaming(MetaPathFinder):
    """Has the modules of the package loaded so."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names_there = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname.startswith("llmk.registry.private.") else None
        if spec is not None:
            assert spec.origin is not None
            assert Path(spec.origin).resolve().parent == PRIVATE
            spec.loader = _Renamed(fullname, spec.origin, self.names_there)
        return spec


def works_without(names: Sequence[str]) -> None:
    """Import llmk where names are others now, and have an operator checked, eager and compiled."""
    sys.meta_path.insert(0, _Renaming(names))

    from llmk.opcheck.calls import call, require_accurate
    from llmk.opcheck.promises.table import compiled_samples, refuses_transforms, same_on_short_path
    from llmk.registry import OPS
    from llmk.registry.private import modules

    assert isinstance(modules.__loader__, _Renamed)
    assert list(modules.parameters_of(torch.nn.LayerNorm(3))) == ["weight", "bias"]
    assert list(modules.buffers_of(torch.nn.BatchNorm1d(3))) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(modules.children_of(torch.nn.Sequential(torch.nn.ReLU()))) == ["0"]
    hooked = torch.nn.ReLU()
    hooked.register_forward_hook(print)
    assert modules.has_hooks(hooked)
    op = OPS["rms_norm"]
    samples = list(op.samples(torch.device("cpu"), torch.float32))[:1]
    require_accurate(op, samples[0], call(op, samples[0]))
    for promise in (compiled_samples, refuses_transforms, same_on_short_path):
        promise(op, samples)
    try:
        _rewrite_a_graph()
    except Exception as error:
        if not any(f"needs {name}_renamed" in str(error) for name in names):
            raise


def _rewrite_a_graph() -> None:
    """Rewrite a graph as the backend does, which nothing public does without some names: then it says which."""
    from llmk.compiler.backend import Backend
    from llmk.compiler.report import Report
    from llmk.registry.private.compilers import config_of

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def rewritten(gm: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        (note,) = Backend(frozenset({"rms_norm"}), (), Report()).rewrite(gm)
        assert not note.reason, note
        return gm

    x = torch.arange(1.0, 7.0, dtype=torch.float32, device="cpu").view(2, 3)
    torch.testing.assert_close(torch.compile(norm, backend=rewritten)(x), norm(x))
    assert config_of("reduce-overhead", None, None) == {"triton.cudagraphs": True}


def failures(names: Sequence[str]) -> Iterator[str]:
    """The failures of llmk without each of these names."""
    result = forked(1, lambda: works_without(names))
    if result["codes"] == [0]:
        return
    if len(names) == 1:
        yield f"without {names[0]}:\n{result['errors'][0]}"
        return
    alone = [line for name in names for line in failures([name])]
    yield from alone or [f"without {', '.join(names)} together:\n{result['errors'][0]}"]


def main() -> int:
    """The number of names that it does not work without."""
    torch.set_num_threads(1)
    names = private_names()
    groups = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    said = [line for group in groups for line in failures(group)]
    sys.stderr.write("".join(said))
    return len(said)


if __name__ == "__main__":
    sys.exit(main())
