"""`python -m llmk.opcheck [OP ...]`: check the accuracy, gradients, memory and compilation of operators, print a table.

The exit status is 1 if a check failed, and 2 if there was nothing to check or an operator, file or option is unknown.
Options that are not given are taken from `[tool.llmk.opcheck]` in the pyproject.toml of the current directory.
"""

import argparse
import dataclasses
import faulthandler
import gc
import importlib.metadata
import inspect
import itertools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from llmk import registry
from llmk.opcheck.foreign.adapters import adapted
from llmk.opcheck.foreign.comparison import Comparison
from llmk.opcheck.foreign.loading import NotLoaded, find_ops, is_own, named
from llmk.opcheck.foreign.signatures import Unrecorded
from llmk.opcheck.processes import Unit, check_in_processes
from llmk.opcheck.promises.values import FRESH
from llmk.opcheck.report.baseline import Accepted, accept, read_baseline, unused
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.journal import Journal
from llmk.opcheck.report.reports import Place, annotations, notes, nothing_to_check, table, write_reports
from llmk.opcheck.runner import DeviceLost, Result, RunningCheck, checks, path_taken, promise_named, promises_for
from llmk.opcheck.sanitizer import LONGEST, TOOLS, call_samples, find_sanitizer, sanitize_in_processes
from llmk.opcheck.search.search import searches
from llmk.opcheck.settings import words_of_table
from llmk.registry import Op
from llmk.registry.devices import INTERPRET
from llmk.registry.private.kernels import TRITON, check_interpreter

UNITS_A_JOB = 2
TIMEOUT = 1800
PATHS = {"reference": "reference", "gpu": "GPU kernel", "interpreter": "interpreter"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Parser(argparse.ArgumentParser):
    source = ""
    """The file that the words come from, where it is not the command line."""

    def error(self, message: str) -> NoReturn:
        _refuse(self.source + message)


def _refuse(message: str) -> NoReturn:
    print(f"opcheck: {message}", file=sys.stderr)
    raise SystemExit(2)


def _parser() -> _Parser:
    parser = _Parser(prog="python -m llmk.opcheck", description=__doc__)
    parser.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="an llmk operator's name; a Python file or module of yours that holds llmk.registry.Op records, or "
        "Model and ModelNew, a KernelBench problem; MODULE:NAME, a record, an operator or a function there; or "
        "hub:FOLDER, a kernel repository in Hugging Face's layout; all of llmk's by default",
    )
    parser.add_argument(
        "--reference",
        metavar="MODULE:NAME",
        help="compare the one OP with this operator or function, instead of its record's reference",
    )
    parser.add_argument("--device", type=device_named, help="(default: cuda if there is one, else cpu)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated (default: all)")
    parser.add_argument(
        "--path",
        choices=("all", *PATHS),
        help="on a CPU: plain PyTorch (reference), the kernels in Triton's interpreter, or both (default); on a GPU: "
        "the kernels (gpu), their code in Triton's interpreter, or both (default, but for llmk's own operators: gpu)",
    )
    for name, text in (
        ("--only", "check these promises only; may be repeated"),
        ("--skip", "leave these promises out; may be repeated"),
    ):
        parser.add_argument(name, action="extend", type=_promises, metavar="PROMISE[,...]", help=text)
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=min(8, os.cpu_count() or 1),
        help="number of processes (default: one for each core)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"for one promise of one operator (default: {TIMEOUT}); where it does not end, its stack is shown",
    )
    parser.add_argument("--total", type=_positive, metavar="SECONDS", help="for the whole run (default: no limit)")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="findings that are accepted, with reasons (TOML)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the results as one page for a browser")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the results as JUnit's XML")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="write the causes as SARIF, for code scanning")
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="on a GPU: instead of checking promises, call the samples under compute-sanitizer (memcheck, racecheck)",
    )
    parser.add_argument(
        "--search",
        type=_positive,
        metavar="SECONDS",
        help="instead of checking promises, search for inputs on which an operator is wrong, for so long each",
    )
    parser.add_argument(
        "--seed",
        type=_natural,
        metavar="N",
        help="the first case of --search (default: 0), or what fresh_numbers draws (default: others every time)",
    )
    parser.add_argument(
        "--few", action="store_true", help="with --sanitize: run memcheck on few samples, like racecheck"
    )
    parser.add_argument(
        "--longest",
        type=_positive,
        metavar="SECONDS",
        help=f"with --sanitize: for an operator and tool (default: {LONGEST})",
    )
    # The options below are for processes that another one started.
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--call-samples", choices=("all", "few"), help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.journal or options.call_samples):
        _take_table(options)
    here = ("all", "reference" if options.device.type == "cpu" else "gpu", "interpreter")
    if options.path not in (None, *here):
        parser.error(f"argument --path: expected {', '.join(here)} on {options.device.type}, got {options.path}")
    _require_fitting(options)
    return options


def _require_fitting(options: argparse.Namespace) -> None:
    """Refuse options that have no meaning beside others."""
    mode, calls = _mode(options), "draws inputs of its own" if options.search else "calls samples"
    for unfit, name, words in (
        (options.search and options.sanitize, "--search", "either it or --sanitize"),
        (options.sanitize and options.seed is not None, "--seed", f"there is none with --sanitize, which {calls}"),
        (
            options.sanitize and options.device.type != "cuda",
            "--sanitize",
            "it watches a GPU's kernels, and the device is cpu",
        ),
        (mode and options.only, "--only", f"there is none with {mode}, which {calls}"),
        (mode and options.skip, "--skip", f"there is none with {mode}, which {calls}"),
        (
            options.sanitize and find_sanitizer() is None,
            "--sanitize",
            "compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin",
        ),
        (options.few and not options.sanitize, "--few", "it is for --sanitize"),
        (options.longest and not options.sanitize, "--longest", "it is for --sanitize"),
    ):
        if unfit:
            _refuse(f"argument {name}: {words}")


def _mode(options: argparse.Namespace) -> str:
    """The option that asks for something else than promises, if there is one."""
    return "--search" if options.search else "--sanitize" if options.sanitize else ""


def _take_table(options: argparse.Namespace) -> None:
    """Fill in what the command line leaves open from the pyproject.toml of the current directory.

    The table's path is for a CPU, and its promises are for runs that check some: elsewhere they say nothing.
    """
    parser = _parser()
    parser.source = "pyproject.toml: "
    try:
        table = parser.parse_args(words_of_table(Path("pyproject.toml")))
    except ValueError as error:
        _refuse(f"pyproject.toml: {error}")
    options.dtype = options.dtype or table.dtype
    at_hand = "cuda" if torch.cuda.is_available() else "cpu"
    options.device = options.device or table.device or device_named(at_hand)
    if options.device.type == "cpu":
        options.path = options.path or table.path
    if not (_mode(options) or options.only):
        options.only, options.skip = table.only, options.skip or table.skip


def _refuse_other_references(options: argparse.Namespace) -> None:
    """Refuse an operator without a record, and a reference, where no promises are checked."""
    if options.reference:
        _refuse(f"argument --reference: there is none with {_mode(options)}, which has the record's")
    for op in options.records:
        if isinstance(op, Unrecorded):
            _refuse(f"argument {_mode(options)}: {op.name} has no llmk.registry.Op with samples")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def device_named(text: str) -> torch.device:
    """Return the device of `--device`, if PyTorch sees it here."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or text == kind):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{text}: PyTorch sees {count} {kind.upper()} devices here")
    return torch.device(text)


def _promises(text: str) -> list[str]:
    try:
        return [promise_named(name.strip()).__name__ for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _records(options: argparse.Namespace) -> list[Op]:
    """The records to check, held against the operator of `--reference`."""
    ops = find_ops(options.ops)
    if options.reference is None:
        return ops
    if len(ops) != 1:
        _refuse(f"argument --reference: it is for one operator, and these are {len(ops)}")
    if ":" not in options.reference:
        _refuse(f"argument --reference: expected MODULE:NAME, got {options.reference!r}")
    reference = named(options.reference)
    reference = reference.overload if isinstance(reference, Op) else reference
    return [dataclasses.replace(ops[0], reference=Comparison(reference))]


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


def paths(options: argparse.Namespace, name: str) -> list[str]:
    """The paths on which to check what has this name; each needs a process of its own, since Triton decides at import
    whether it interprets.

    On a GPU the interpreter searches nothing, and it gets llmk's operators where it is asked for only: the tests
    interpret them on a CPU.
    """
    if options.path in PATHS:
        return [PATHS[options.path]]
    if INTERPRET and options.path is None:
        return [path_taken(options.device)]
    if options.device.type == "cpu":
        return [PATHS["reference"], PATHS["interpreter"]]
    left_out = options.search or (is_own(name) and options.path is None) or not_interpretable()
    asked = promises_for(options.device, options.only, options.skip or (), PATHS["interpreter"])
    return [PATHS["gpu"]] if left_out or not asked else [PATHS["gpu"], PATHS["interpreter"]]


def not_interpretable() -> str:
    """Return why Triton's interpreter does not run with the packages at hand; empty where it does."""
    try:
        check_interpreter(TRITON, importlib.metadata.version("numpy"))
    except ImportError as error:  # numpy may be missing
        return str(error)
    return ""


def call_here(options: argparse.Namespace) -> None:
    """Call the samples where a sanitizer looks on."""
    for op in find_ops(options.ops):
        adapted_op = adapted(op, options.device, _dtypes(options) or op.dtypes)
        call_samples(adapted_op, options.device, _dtypes(options), few=options.call_samples == "few")


def _dtypes(options: argparse.Namespace) -> list[torch.dtype] | None:
    return [DTYPES[name] for name in options.dtype] if options.dtype else None


def check_here(options: argparse.Namespace) -> None:
    """Check on the path that this process takes, and keep the journal."""
    gc.freeze()  # the collector need not walk what was imported, each time, which takes a process of minutes seconds
    gc.set_threshold(100_000, 20, 20)  # nor come often: it takes up to a fifth of the time of what compiles
    journal = Journal(options.journal)
    done = {result.check for result in journal.results()}
    FRESH.set(options.seed)

    def begin(running: RunningCheck) -> None:
        if not running.sample and not options.search:  # faulthandler ends the process, whatever holds it up
            faulthandler.dump_traceback_later(options.timeout, exit=True)
        journal.note_running(running)

    try:
        for op in _records(options):
            where = options.device, _dtypes(options)
            if options.search:
                whole = adapted(op, options.device, _dtypes(options) or op.dtypes)
                unlaunched = (result for result in checks(op, *where, [], begin, done) if not result.passed)
                found = searches(whole, *where, options.search, options.seed or 0, begin, done)
                results = itertools.chain(unlaunched, found)
            else:
                results = checks(op, *where, options.only, begin, done, skip=options.skip or ())
            for result in results:
                journal.note_result(result)
    except DeviceLost as error:
        raise SystemExit(str(error)) from None
    faulthandler.cancel_dump_traceback_later()
    journal.note_end()


def names_of_each_process(names: Sequence[str], jobs: int) -> list[tuple[str, ...]]:
    """Return the names that one process checks, in their order.

    Starting one, and Inductor in it, takes as long as checking an operator, so many of llmk's share a process, of which
    there are about UNITS_A_JOB for each job: one that ends early takes the next. A file's or a module's code is alone.
    """
    most = -(-len(names) // (UNITS_A_JOB * jobs))
    parts: list[tuple[str, ...]] = []
    for name in names:
        last = parts[-1] if parts else ()
        if last and len(last) < most and is_own(name) and is_own(last[0]):
            parts[-1] = (*last, name)
        else:
            parts.append((name,))
    return parts


def check_all(options: argparse.Namespace) -> list[Result]:
    names = names_of_each_process(options.ops or list(registry.OPS), options.jobs)
    units = [Unit(part, path) for part in names for path in paths(options, part[0])]
    units.sort(key=lambda unit: unit.path == PATHS["interpreter"])
    given = (("--dtype", options.dtype), ("--only", options.only), ("--skip", options.skip))
    passed_on = [word for option, values in given for value in values or () for word in (option, value)]
    if options.reference:
        passed_on += ["--reference", options.reference]
    passed_on += ["--timeout", str(options.timeout)]
    if options.search:
        passed_on += ["--search", str(options.search)]
    if options.seed is not None:
        passed_on += ["--seed", str(options.seed)]
    progress, found = Progress(len(units)), {}
    for unit, results in check_in_processes(units, options.device, passed_on, options.jobs, options.total):
        progress(str(unit))
        found[unit] = _with_files(unit, results, options)
        in_order = [result for unit in units for result in found.get(unit, [])]
        _write(in_order, options)  # if stopped, what there is
    progress.clear()
    return [result for unit in units for result in found[unit]]


def _with_files(unit: Unit, results: Sequence[Result], options: argparse.Namespace) -> list[Result]:
    """The results of a unit, with its file before the names of operators that other files have too."""
    count = Counter(op.name for op in options.records)
    names = {op: f"{unit.names[0]}:{op.rpartition(':')[2]}" for op, times in count.items() if times > 1}
    return [dataclasses.replace(result, op=names.get(result.op, result.op)) for result in results]


def sanitize_all(options: argparse.Namespace) -> list[Result]:
    executable, names = find_sanitizer() or "", options.ops or list(registry.OPS)
    progress, results = Progress(len(names) * len(TOOLS)), []
    for unit, result in sanitize_in_processes(
        executable,
        names,
        options.device,
        options.dtype or [],
        few=options.few,
        longest=options.longest or LONGEST,
        jobs=options.jobs,
    ):
        progress(f"{unit}{'' if result.passed else f': {result.message}'}")
        results.append(result)
        _write(results, options)  # if stopped, what there is
    progress.clear()
    return sorted(results, key=lambda result: (names.index(result.op), TOOLS.index(result.promise)))


def _write(results: Sequence[Result], options: argparse.Namespace) -> None:
    write_reports(results, options.device, vars(options), _modules(options.records), _places(options.records))


def _modules(ops: Sequence[Op]) -> list[str]:
    """The modules that the operators come from; their packages if they are many."""
    names = {op.origin if isinstance(op, Unrecorded) else op.module or op.reference.__module__ for op in ops}
    return sorted(names if len(names) <= 3 else {name.partition(".")[0] for name in names})


def _places(ops: Sequence[Op]) -> dict[str, Place]:
    """The files below the current directory of references, or of operators without a record, and where they begin."""
    found: dict[str, Place] = {}
    count = Counter(op.name for op in ops)
    for op in (op for op in ops if count[op.name] == 1):
        function = inspect.unwrap(op.overload if isinstance(op, Unrecorded) else op.reference)
        if inspect.isfunction(function):
            file = Path(function.__code__.co_filename).resolve()
            if file.is_relative_to(Path.cwd()):
                found[op.name] = str(file.relative_to(Path.cwd())), function.__code__.co_firstlineno
    return found


def _baseline(options: argparse.Namespace) -> list[Accepted]:
    try:
        return read_baseline(options.baseline) if options.baseline else []
    except ValueError as error:
        _refuse(f"argument --baseline: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.journal:
        check_here(options)
        return 0
    if options.call_samples:
        call_here(options)
        return 0
    _baseline(options)
    try:
        options.records = _records(options)  # what there is not, is said before anything is checked
    except NotLoaded as error:
        _refuse(str(error))
    if _mode(options):
        _refuse_other_references(options)
    results = sanitize_all(options) if options.sanitize else check_all(options)
    entries = _baseline(options)
    results = accept(results, entries)
    print(table(results))
    for line in (*notes(results), *unused(results, entries)):
        print(line)
    if options.device.type != "cpu" and not_interpretable():
        print(f"kernels were not interpreted: {not_interpretable()}")
    for cause in causes(results):
        print(f"\n{cause}")
    for result in results if options.search else ():
        seeds = result.message.partition("\n")[0]
        print(f"{result.op} {result.dtype} ({result.path}): {result.calls} cases, {seeds}")
    _write(results, options)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotations(results, _places(options.records)):
            print(line)
    count = Counter(result.verdict for result in results)
    accepted = f" and {count['accepted']} accepted" if count["accepted"] else ""
    print(f"\n{count['kept']} promises kept, {count['broken']} broken{accepted}, {nothing_to_check(results)}")
    if count["kept"] + count["broken"] + count["accepted"] == 0:
        _refuse("nothing was checked: no promise of those asked for applies here")
    return 1 if count["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
