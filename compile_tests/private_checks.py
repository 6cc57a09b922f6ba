"""llmk with private names of torch or triton renamed: run by test_private.py, in a process that has not imported it.

A few names at a time are renamed in a process of their own, forked from this one: what they all import is imported
once. Where that does not work, each of the names is renamed by itself.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
import torch._decomp.decompositions_for_jvp
import torch._inductor.compile_fx  # what they share; nothing may run, for autograd's threads do not fork

from compile_tests.forked import forked

TOGETHER = 5
PRIVATE = Path(__file__).resolve().parents[1] / "registry" / "private.py"


def private_names() -> list[str]:
    """The strings that private.py looks names up by."""
    names = []
    for node in ast.walk(ast.parse(PRIVATE.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = {"_find": 0, "_required": 0, "_attribute": 1, "getattr": 1}.get(node.func.id)
            if place is not None and isinstance(node.args[place], ast.Constant):
                names.append(node.args[place].value)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("names", "paths", "kinds"):
            names += ast.literal_eval(node.value)
    return list(dict.fromkeys(names))


class _Renamed(SourceFileLoader):
    """Loads private.py as if it had to look up other names."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__("llmk.registry.private", str(path))
        self.names_there = names

    def get_code(self, fullname: str):  # past the cache of compiled files
        source = PRIVATE.read_text()
        for name in self.names_there:
            source = source.replace(f'"{name}"', f'"{name}_renamed"')
        return compile(source, PRIVATE, "exec")


def works_without(names: Sequence[str]) -> None:
    """Import llmk where names are others now, and have an operator checked, eager and compiled."""
    spec = importlib.util.spec_from_file_location("llmk.registry.private", loader=_Renamed(PRIVATE, names))
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    from llmk.opcheck.calls import call, require_accurate
    from llmk.opcheck.promises import compiled_samples, refuses_transforms, same_on_short_path
    from llmk.registry import OPS, private

    assert private is module
    assert list(private.parameters_of(torch.nn.LayerNorm(3))) == ["weight", "bias"]
    assert list(private.buffers_of(torch.nn.BatchNorm1d(3))) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(private.children_of(torch.nn.Sequential(torch.nn.ReLU()))) == ["0"]
    hooked = torch.nn.ReLU()
    hooked.register_forward_hook(print)
    assert private.has_hooks(hooked)
    op = OPS["rms_norm"]
    samples = list(op.samples(torch.device("cpu"), torch.float32))[:1]
    require_accurate(op, samples[0], call(op, samples[0]))
    for promise in (compiled_samples, refuses_transforms, same_on_short_path):
        promise(op, samples)


def failures(names: Sequence[str]) -> Iterator[str]:
    """What is said where llmk does not work without these, name by name."""
    result = forked(1, lambda: works_without(names))
    if result["codes"] == [0]:
        return
    if len(names) == 1:
        yield f"without {names[0]}:\n{result['errors'][0]}"
        return
    alone = [line for name in names for line in failures([name])]
    yield from alone or [f"without {', '.join(names)} together:\n{result['errors'][0]}"]


def main() -> int:
    """How many names it does not work without."""
    torch.set_num_threads(1)
    names = private_names()
    groups = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    said = [line for group in groups for line in failures(group)]
    sys.stderr.write("".join(said))
    return len(said)


if __name__ == "__main__":
    sys.exit(main())
