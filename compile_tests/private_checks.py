"""llmk with a private name of torch or triton renamed: run by test_private.py, in a process that has not imported it.

Each name is renamed in a process of its own, forked from this one: what they all import is imported once.
"""

import ast
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
import torch._decomp.decompositions_for_jvp
import torch._inductor.compile_fx  # what they share; nothing may run, for autograd's threads do not fork

from compile_tests.forked import forked

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
    """Loads private.py as if it had to look up another name."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__("llmk.registry.private", str(path))
        self.name_there = name

    def get_code(self, fullname: str):  # past the cache of compiled files
        source = PRIVATE.read_text().replace(f'"{self.name_there}"', f'"{self.name_there}_renamed"')
        return compile(source, PRIVATE, "exec")


def works_without(name: str) -> None:
    """Import llmk where a name is another now, and have an operator checked, eager and compiled."""
    spec = importlib.util.spec_from_file_location("llmk.registry.private", loader=_Renamed(PRIVATE, name))
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


def main() -> int:
    """How many names it does not work without."""
    torch.set_num_threads(1)
    failures = 0
    for name in private_names():
        result = forked(1, lambda name=name: works_without(name))
        if result["codes"] != [0]:
            failures += 1
            sys.stderr.write(f"without {name}:\n{result['errors'][0]}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
