"""`python -m llmk.opcheck [OP ...]`: check what operators promise, print a table, exit 1 if a promise is broken."""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

import llmk
from llmk.opcheck.runner import Result, check, path_taken, promises_for
from llmk.registry import OPS, Op
from llmk.registry.launch import INTERPRET

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llmk.opcheck", description=__doc__)
    parser.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="an llmk operator's name, or a Python file or module of yours that holds llmk.registry.Op records; "
        "all of llmk's by default",
    )
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; all by default")
    parser.add_argument(
        "--path",
        choices=("all", "reference", "interpreter"),
        default="all",
        help="on a CPU: plain PyTorch, the kernels in Triton's interpreter, or both (default)",
    )
    parser.add_argument("--promise", action="append", help="check this one only; may be repeated")
    parser.add_argument(
        "--jobs", type=_positive, default=min(8, os.cpu_count() or 1), help="processes (default: one a core)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def find_ops(names: Sequence[str]) -> list[Op]:
    """The records of llmk's operators, of a Python file, or of a module."""
    if not names:
        return list(OPS.values())
    found: list[Op] = []
    for name in names:
        if name in OPS:
            found.append(OPS[name])
            continue
        module = _load(name)
        ops = [value for value in vars(module).values() if isinstance(value, Op)]
        if not ops:
            raise SystemExit(f"opcheck: {name} holds no llmk.registry.Op")
        found += ops
    return found


def _load(name: str) -> Any:
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise SystemExit(f"opcheck: no file {name}")
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise SystemExit(f"opcheck: {name!r} is no operator ({', '.join(OPS)}), file or module") from None


class Progress:
    """One line that says what is being checked: rewritten in a terminal, a line each time elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, message: str) -> None:
        self.done += 1
        line = f"[{self.done}/{self.total}] {message}"
        if sys.stderr.isatty():
            print(f"\r{line[:78]:<78}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


def paths(device: torch.device, choice: str) -> Sequence[str]:
    """The paths to check; each needs a process of its own, since Triton decides at import whether it interprets."""
    if device.type != "cpu" or INTERPRET:
        return (path_taken(device),)
    return ("reference", "interpreter") if choice == "all" else (choice,)


def check_here(options: argparse.Namespace, ops: Sequence[Op], device: torch.device) -> list[Result]:
    """Check on the path that this process takes."""
    dtypes = [DTYPES[name] for name in options.dtype] if options.dtype else None
    progress = Progress(sum(len(dtypes or op.dtypes) for op in ops) * len(promises_for(device, options.promise)))
    results: list[Result] = []
    for op in ops:
        results += check(op, device=device, dtypes=dtypes, promises=options.promise, progress=progress)
    progress.clear()
    return results


def check_in_processes(
    options: argparse.Namespace, units: Sequence[tuple[str, str]], device: torch.device
) -> list[Result]:
    """Check each operator (or file) and path in a process of its own, so many at a time."""
    progress = Progress(len(units))

    def run(unit: tuple[str, str]) -> list[Result]:
        results = check_in_process(options, *unit, device)
        progress(f"{unit[1]}: {unit[0]}")
        return results

    with ThreadPoolExecutor(options.jobs) as pool:
        results = [result for group in pool.map(run, units) for result in group]
    progress.clear()
    return results


def check_in_process(options: argparse.Namespace, name: str, path: str, device: torch.device) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "llmk.opcheck", name, "--device", str(device), "--json", str(file)]
        if path == "reference":
            command += ["--path", path]
        for option, values in (("--dtype", options.dtype), ("--promise", options.promise)):
            command += [word for value in values or () for word in (option, value)]
        # Processes side by side share the cores.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.jobs))}
        environment = os.environ | threads | ({"TRITON_INTERPRET": "1"} if path == "interpreter" else {})
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(f"opcheck: {name} ({path}) failed with exit code {process.returncode}:\n{process.stderr}")
        return [Result(**result) for result in json.loads(file.read_text())["results"]]


def print_table(results: Sequence[Result]) -> None:
    """A line for each operator, path and dtype: promises kept, and the broken ones below."""
    print(f"{'op':<26}{'path':<14}{'dtype':<11}{'kept':>7}{'seconds':>10}")
    for (op, path, dtype), group in _grouped(results):
        kept = sum(result.passed for result in group)
        mark = "" if kept == len(group) else "  BROKEN"
        seconds = sum(result.seconds for result in group)
        print(f"{op:<26}{path:<14}{dtype:<11}{f'{kept}/{len(group)}':>7}{seconds:>10.1f}{mark}")
    for result in results:
        if not result.passed:
            print(f"\n{result.op} {result.dtype} ({result.path}) breaks {result.promise}:\n  {result.message}")


def _grouped(results: Sequence[Result]) -> Iterable[tuple[tuple[str, str, str], list[Result]]]:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.path, result.dtype), []).append(result)
    return groups.items()


def report(results: Sequence[Result], device: torch.device) -> dict[str, Any]:
    return {
        "llmk": llmk.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "date": datetime.date.today().isoformat(),
        "paths": sorted({result.path for result in results}),
        "results": [asdict(result) for result in results],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cpu" and options.path != "all":
        raise SystemExit("opcheck: --path is for the CPU; on a GPU the kernels run")
    ops = find_ops(options.ops)
    units = [(name, path) for path in paths(device, options.path) for name in options.ops or OPS]
    if len(units) == 1 and units[0][1] == path_taken(device):
        results = check_here(options, ops, device)
    else:
        results = check_in_processes(options, units, device)
    print_table(results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report(results, device), indent=1) + "\n")
    broken = sum(not result.passed for result in results)
    print(f"\n{len(results) - broken} promises kept, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
