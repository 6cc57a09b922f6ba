"""Measures how long a small Llama's first training step takes to compile: with the backend, and with Inductor alone.

`python -m tools.compile_time`. Every measurement is a process of its own with empty caches, on one
thread; the two take turns. A function of one line is compiled before, so that nobody pays for what is imported and set
up. Seconds are those of the processor, the C++ compiler's included, which other work on the machine does not change.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import llmk.compiler  # noqa: F401  (its name, for a checkout that is not installed)
from compile_tests.helpers.families import small_model, tokens

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = "inductor", "llmk"


def first_step(backend: str, layers: int) -> float:
    """Seconds of a forward and a backward pass that compile."""
    torch.compile(lambda x: x + 1)(torch.ones(8))
    model = small_model("Llama", num_hidden_layers=layers, use_cache=False)
    ids = tokens(2, 16)
    compiled = torch.compile(model, backend=backend)
    start = processor_seconds()
    compiled(input_ids=ids, labels=ids).loss.backward()
    return processor_seconds() - start


def processor_seconds() -> float:
    """Processor time of this process and of those it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def measured(backend: str, layers: int) -> float:
    """The same, in a process of its own with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        program = [sys.executable, "-m", "tools.compile_time"]
        command = [*program, "--layers", str(layers), "--backend", backend]
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        return float(subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--times", type=int, default=3, help="measurements of each, of which the median counts")
    parser.add_argument("--backend", choices=BACKENDS, help="measure this one here and now, and print the seconds")
    args = parser.parse_args()
    if args.backend:
        print(first_step(args.backend, args.layers))
        return
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(args.times):
        for backend in BACKENDS:
            seconds[backend].append(measured(backend, args.layers))
            print(f"{backend:8}  {seconds[backend][-1]:.1f} s", flush=True)
    plain, ours = (statistics.median(seconds[backend]) for backend in BACKENDS)
    print(f"medians: {BACKENDS[0]} {plain:.1f} s, {BACKENDS[1]} {ours:.1f} s, ratio {ours / plain:.2f}")


if __name__ == "__main__":
    main()
