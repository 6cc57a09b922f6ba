"""`python -m llmk`: the versions, the device, and what of llmk works here, tried; of what does not, why.

A call is compiled up to its graphs, forward and backward. `--inductor` has Inductor make code of them and runs it. On a
CPU that takes a C++ compiler and, the first time, most of a minute.
Exit 1: something that should work here does not.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

import torch
import triton

import llmk
from llmk.opcheck.calls import first_line
from llmk.ranges import complaint
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

WIDTH = 80
EXTRAS = {"transformers": "llmk.transformers", "trl": "llmk.trl"}


def try_call(device: str, backend: str | None = None) -> None:
    """Run an operator, forward and backward, compiled if there is a backend, and compare it with what is known."""
    fn: Callable[..., torch.Tensor] = llmk.functional.rms_norm
    if backend is not None:
        torch.compiler.reset()
        fn = torch.compile(fn, fullgraph=True, backend=backend)
    x = torch.full((2, 64), 3.0, device=device, dtype=torch.float32, requires_grad=True)
    y = fn(x, torch.full((64,), 2.0, device=device, dtype=torch.float32), eps=1e-6)
    y.sum().backward()
    assert x.grad is not None
    if (y - 2).abs().max() > 1e-5 or x.grad.abs().max() > 1e-5:
        raise ArithmeticError("a wrong result")


def outcome(works: str, call: Callable[[], None]) -> tuple[bool, str]:
    """Return whether a call runs, and what to say."""
    try:
        call()
    except Exception as error:  # whatever is missing on this machine
        return False, f"FAILED: {first_line(error)}"
    return True, f"works: {works}"


def kernels() -> tuple[bool, str]:
    if torch.cuda.is_available():
        return outcome("Triton kernels on the GPU", lambda: try_call("cuda"))
    if INTERPRET:
        return True, "no GPU; calls run in the interpreter"
    return outcome("no GPU, so calls run plain PyTorch", lambda: try_call("cpu"))


def interpreter() -> tuple[bool, str]:
    if not INTERPRET:
        return True, "off; TRITON_INTERPRET=1 runs the kernels on a CPU, for tests"
    return outcome("kernels run in Triton's interpreter", lambda: try_call("cpu"))


def compiling(inductor: bool) -> tuple[bool, str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if inductor:
        return outcome(f"torch.compile on {device}, one graph", lambda: try_call(device, "inductor"))
    traces, said = outcome("", lambda: try_call(device, "aot_eager"))
    if not traces:
        return False, said
    compiler = missing_compiler(device)
    return True, f"traced as one graph; {compiler or '--inductor tries the code, too'}"


def missing_compiler(device: str) -> str:
    """Say which compiler is missing, of C for Triton's launchers or of C++ for Inductor's code, or nothing."""
    name, other, variable = ("gcc", "clang", "CC") if device == "cuda" else ("g++", "clang++", "CXX")
    if any(map(shutil.which, (os.environ.get(variable, name), name, other))):
        return ""
    return f"no compiler: neither {name} nor {variable} is there, and code cannot be made"


def device_line() -> str:
    if not torch.cuda.is_available():
        return f"cpu ({platform.machine()}, {os.cpu_count()} cores); PyTorch sees no GPU"
    properties = torch.cuda.get_device_properties(0)
    target = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{torch.cuda.device_count()} x {properties.name}, {memory}, {target}"


def installed(distribution: str, used_by: str) -> str:
    try:
        version, said = importlib.metadata.version(distribution), complaint(distribution, used_by)
        return f"{version}, for {used_by}" if said is None else said.removeprefix(f"{distribution}: ")
    except importlib.metadata.PackageNotFoundError:
        return f"not installed; {used_by} needs it: pip install {distribution}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llmk", description="Say what of llmk works on this machine.")
    parser.add_argument(
        "--inductor", action="store_true", help="also compile and run code, which takes a minute at first"
    )
    inductor = parser.parse_args(arguments).inductor
    checks = {"kernels": kernels, "interpreter": interpreter, "compile": lambda: compiling(inductor)}
    said = {name: check() for name, check in checks.items()}
    lines = {
        "llmk": f"{llmk.__version__}, {len(OPS)} operators, {os.path.dirname(llmk.__file__)}",
        "torch": f"{torch.__version__}, triton {triton.__version__}",
        "python": f"{platform.python_version()}, {platform.system()} {platform.release()}",
        "device": device_line(),
        **{name: text for name, (_, text) in said.items()},
        **{name: installed(name, used_by) for name, used_by in EXTRAS.items()},
    }
    for name, text in lines.items():
        print(textwrap.fill(text, WIDTH, initial_indent=f"{name:<13}", subsequent_indent=" " * 13))
    return 0 if all(works for works, _ in said.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
