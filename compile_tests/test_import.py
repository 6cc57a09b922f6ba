"""`import llmk` takes no time, and all of it is there: operators and modules load when they are first used."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def require_runs(code: str) -> None:
    """Run code in a process of its own, which has imported nothing."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def without(package: str, module: str, install: str) -> str:
    """Return code that uses a module where a package is missing: the error names it, with what to install."""
    return f"""
sys.modules[{package!r}] = None
try:
    import llmk
    {module}
except ModuleNotFoundError as error:
    said = str(error)
assert said == {f"{module} needs the package {package}: pip install {install}"!r}, said
"""


IMPORTS = {
    # These are the two seconds that it took; an installed backend is found by its entry point.
    "no operator, and nothing of the compiler": """
before = set(sys.modules)
from llmk.registry.private import compilers
compilers.entry_points = lambda **asked: [asked]
import llmk.opcheck.__main__  # which imports llmk and llmk.opcheck
new = sys.modules.keys() - before
heavy = ("llmk.ops", "llmk.nn", "llmk.losses", "torch._dynamo", "torch.distributed.tensor")
assert not [name for name in new if name.startswith(heavy)], new
""",
    # Dynamo takes a second to import, a third of what the operators take.
    "no compiler where operators load": """
import llmk.functional, llmk.losses
assert not [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
""",
    # PyTorch's compiler replaces a function of PyTorch's when it is first imported, in a first call maybe.
    "loading the compiler is no side effect of an operator": """
from llmk.opcheck.promises.settings import remember_state, restore_state
remember_state()
import torch._dynamo
assert restore_state() == []
""",
    "without triton": without("triton", "llmk", "triton"),
    "without transformers": without("transformers", "llmk.transformers", "'llmk[transformers]'"),
    "without trl": without("trl", "llmk.trl", "'llmk[trl]'"),
    "frameworks": """
import importlib.util
if importlib.util.find_spec("trl") is not None:
    import llmk
    llmk.transformers.patch, llmk.trl.patch, llmk.verl.patch, llmk.estimate.estimate
""",
}


def test_imports() -> None:
    """Each in a process of its own, forked from one that has imported PyTorch and Triton alone."""
    require_runs(f"""
        import sys, torch, triton
        from compile_tests.helpers.forked import forked
        for name, code in {IMPORTS!r}.items():
            done = forked(1, lambda: exec(code, {{"sys": sys}}))
            assert done["codes"] == [0], (name, done)
    """)


FIRST_USES = {
    "held before": "assert held.rms_norm(x, w).shape == x.shape",
    "compiled": "assert torch.compile(call, fullgraph=True, backend='aot_eager')(x, w).shape == x.shape",
    "backend": "torch.compile(F.rms_norm, backend='llmk')(x, (64,), w); assert llmk.compile_report().replaced",
    "named": "assert torch.ops.llmk.add.default.__module__ == 'torch._ops.llmk', torch.ops.llmk.add.default.__module__",
    "records": "from llmk.registry import OPS; assert 'rms_norm' in OPS and len(OPS) > 30",
    "module": "assert llmk.nn.RMSNorm(64)(x).shape == x.shape",
    "from": "from llmk import functional; assert functional.rms_norm(x, w).shape == x.shape",
    "dir": "assert 'rms_norm' in dir(torch.ops.llmk) and 'transformers' in dir(llmk)",
    "missing": "assert not hasattr(torch.ops.llmk, 'no_such') and not hasattr(llmk, 'no_such')",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert len(set(pool.map(lambda i: torch.ops.llmk.rms_norm, range(4)))) == 1
""",
}


def test_first_uses() -> None:
    """Each in a process of its own, forked from one that has imported llmk and used nothing of it.

    After the first one, which finds nothing imported, that process imports what they all need of PyTorch.
    """
    require_runs(f"""
        import torch, torch.nn.functional as F
        held = torch.ops.llmk
        import llmk
        from compile_tests.helpers.forked import forked
        def call(x, w): return torch.ops.llmk.rms_norm(x, w)
        for name, use in {FIRST_USES!r}.items():
            x, w = torch.randn(3, 64), torch.ones(64)
            done = forked(1, lambda: exec(use, globals()))
            assert done["codes"] == [0], (name, done)
            import torch._inductor.compile_fx, torch.distributed.tensor, compile_tests.helpers.without_cpp
            compile_tests.helpers.without_cpp.write_no_cpp()
    """)
