"""`python -m benchmarks.train_step [MODEL ...]`: a training step of Hugging Face models, with llmk and without.

Each model is made from its configuration (models.py) and trained on one repeated batch, forward, backward and fused
AdamW, in seven variants: plain transformers, with `llmk.transformers.patch`, and with Liger Kernel, each eager and
compiled, and plain transformers compiled with `llmk.compile`. The variants of a run share one process and start from
the same weights, so that their losses can be compared step by step; each begins with empty compile caches and no memory
of the one before. Liger comes last, and what it replaces in transformers is put back.

The losses are those of the first steps, which also compile and warm up. The time is the median of the steps after
them, the host's time included; peak memory is what is allocated at most during a step, weights and optimizer included.
A variant that may take hours to compile, as plain hybrids do, runs in a process of its own and is given up at a limit.
On a CPU, and with --small, tiny models are trained in float32, to keep the code tested.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from tqdm import tqdm

from benchmarks.limited import with_limit
from benchmarks.models import HYBRIDS, MODELS, SEQ_LEN, VARIANTS, Variant, as_variant
from benchmarks.peers import PEERS
from benchmarks.profiling import kernel_times, print_kernels, write_kernels
from benchmarks.report import Results, header
from benchmarks.step_report import same_model, table
from llmk.bench.timing import first_line
from llmk.registry.graphs import ops_in_graph_as

LOSSES = 15
"""Steps whose losses are kept; they warm up too."""
WARM_SECONDS = 1.0
LEFT_GIB = 0.5
"""More than that must not be left by a variant. cuBLAS keeps some memory for itself."""

ALL_MODELS = MODELS | HYBRIDS
Step = Callable[[], Tensor]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step", description="Time a training step of Hugging Face models."
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(ALL_MODELS)}; by default all that are no hybrid"
    )
    spelled = [name.replace(" ", "-") for name in VARIANTS]
    parser.add_argument("--variants", metavar="NAME,NAME", help=f"of {', '.join(spelled)}; all by default")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default 20)")
    parser.add_argument("--batch-size", type=int, help="sequences of a step; by default what fits, see models.py")
    parser.add_argument("--seq-len", type=int, help=f"tokens of a sequence (default {SEQ_LEN})")
    parser.add_argument(
        "--compile-limit",
        type=float,
        metavar="SECONDS",
        help="give up compiled variants that have not made a step by then (default: 600 for hybrids, none for others)",
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 1e-3)")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default inductor)")
    parser.add_argument("--forms", default="", metavar="OP=FORM,...", help="kernel ops in graphs: kernel or aten")
    parser.add_argument("--small", action="store_true", help="tiny models in float32; always on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, variant by variant")
    parser.add_argument("--append", action="store_true", help="keep FILE's rows that are not measured anew")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="list a step's kernels, and write them here")
    options = parser.parse_args(arguments)
    try:
        options.forms = dict(form.split("=", 1) for form in options.forms.split(",") if form)
    except ValueError:
        parser.error(f"--forms: expected OP=FORM,..., got {options.forms!r}")
    options.variants = [name.replace("-", " ") for name in (options.variants or ",".join(VARIANTS)).split(",")]
    for kind, names, known in (("model", options.models, ALL_MODELS), ("variant", options.variants, VARIANTS)):
        for name in names:
            if name not in known:
                parser.error(f"no {kind} {name!r}; there are {', '.join(known)}")
    for name in ("steps", "batch_size", "seq_len", "compile_limit"):
        value = getattr(options, name)
        if value is not None and not value >= 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.small |= options.device.type == "cpu"
    options.models = options.models or list(MODELS)
    return options


def measure(name: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a variant of a model."""
    limit = options.compile_limit or ALL_MODELS[name].compile_limit
    if limit is None or not VARIANTS[variant].compiled:
        return measure_here(name, variant, options)
    start = time.perf_counter()
    try:
        return with_limit(limit, measure_here, name, variant, options)
    except (TimeoutError, RuntimeError) as error:
        return {**_row(name, variant, options), "error": str(error), "seconds": time.perf_counter() - start}


def measure_here(
    name: str, variant: str, options: argparse.Namespace, compiled: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The row, measured in this process, which calls `compiled()` after the first step."""
    row = _row(name, variant, options)
    start = time.perf_counter()
    try:
        forget(options.device)
        with ops_in_graph_as(options.forms):
            row |= _measure(name, VARIANTS[variant], row, options, compiled)
    except Exception as error:  # whatever a library raises belongs in its row
        row["error"] = first_line(error)
    with contextlib.suppress(RuntimeError):  # a kernel's illegal access ends the context: all rows after it say so
        forget(options.device, check=False)
    row["seconds"] = time.perf_counter() - start
    return row


def _row(name: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row before anything is measured."""
    return {
        "model": name,
        "variant": variant,
        "compiled": VARIANTS[variant].compiled,
        "batch_size": options.batch_size or (2 if options.small else ALL_MODELS[name].batch_size),
        "seq_len": options.seq_len or (16 if options.small else SEQ_LEN),
    }


def forget(device: torch.device, check: bool = True) -> None:
    """Everything of the last variant: its memory, what was compiled for it and what was counted.

    Raises:
        RuntimeError: Its memory is still there.
    """
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    gc.collect()
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated(device) / 2**30
    if check and left > LEFT_GIB:
        raise RuntimeError(f"{left:.1f} GiB were left by what ran before")


def _measure(
    name: str, variant: Variant, row: dict[str, Any], options: argparse.Namespace, compiled: Callable[[], None]
) -> dict[str, Any]:
    device = options.device
    model = ALL_MODELS[name].build(device, options.small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    tokens = ALL_MODELS[name].tokens(model, row["batch_size"], row["seq_len"])
    with as_variant(model, variant, options.backend) as trained:

        def step() -> Tensor:
            loss = trained(input_ids=tokens, labels=tokens).loss  # the output goes, and its logits with it
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        measured = measure_step(step, options.steps, device, compiled)
        if options.profile:
            measured["kernels"] = kernel_times(step, device)
    return {**measured, "tokens_per_s": 1e3 * tokens.numel() / measured["ms"]}


def measure_step(step: Step, steps: int, device: torch.device, compiled: Callable[[], None]) -> dict[str, Any]:
    """Losses of the first steps; compile counts, milliseconds and peak memory of the steps after them."""
    start = time.perf_counter()
    losses = [step()]
    synchronize(device)
    first_step_s = time.perf_counter() - start
    compiled()
    losses += [step() for _ in range(LOSSES - 1)]
    warm_up(step, device)
    times, peak_gib = timed(step, steps, device)
    return {
        "ms": statistics.median(times),
        "times_ms": times,
        "peak_gib": peak_gib,
        **compile_counts(),
        "losses": torch.stack(losses).float().tolist(),
        "first_step_s": first_step_s,
    }


def warm_up(step: Step, device: torch.device) -> None:
    """Keep a GPU busy until its clock is that of sustained work."""
    synchronize(device)
    start = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - start < WARM_SECONDS:
        step()
        synchronize(device)


def timed(step: Step, steps: int, device: torch.device) -> tuple[list[float], float | None]:
    """Milliseconds of each step, and the peak memory in GiB, None on a CPU."""
    if device.type != "cuda":
        return list(_cpu_times(step, steps)), None
    torch.cuda.reset_peak_memory_stats(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    step()  # the host may run ahead of the device from here on
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize(device)
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
    return times, torch.cuda.max_memory_allocated(device) / 2**30


def _cpu_times(step: Step, steps: int) -> Iterator[float]:
    for _ in range(steps):
        start = time.perf_counter()
        step()
        yield 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compile_counts() -> dict[str, int]:
    """Since the last `forget`: graphs, breaks between them, and code that was compiled again."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiles": sum(metrics.recompile_reason is not None for metrics in get_compilation_metrics()),
    }


def available(variants: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Those of the variants whose library is installed, and the versions; says a word of a library that is not."""
    versions = {"transformers": importlib.metadata.version("transformers")}
    liger = PEERS["liger-kernel"]
    with_liger = [name for name in variants if VARIANTS[name].kernels == liger.name]
    version = liger.version()
    if with_liger and version is None:
        print(f"{liger.name}: missing")
    if with_liger and version is not None:
        versions[liger.name] = version
    return [name for name in VARIANTS if name in variants and (version or name not in with_liger)], versions


def available_models(names: Sequence[str]) -> list[str]:
    """Those of the models that transformers has; says a word of one that it has not."""
    for name in names:
        if not ALL_MODELS[name].available:
            print(f"{name}: this release of transformers has no {ALL_MODELS[name].config}")
    return [name for name in names if ALL_MODELS[name].available]


def run(options: argparse.Namespace) -> None:
    variants, versions = available(options.variants)
    models = available_models(options.models)
    dtype = torch.float32 if options.small else torch.bfloat16
    config = {"lr": options.lr, "optimizer": "AdamW, fused", "backend": options.backend, "small": options.small}
    if options.forms:
        config["forms"] = options.forms
    about = header(options.device, dtype, versions, config)
    order = list(itertools.product(ALL_MODELS, VARIANTS))
    results = Results(options.json, about, options.append, lambda row: (row["model"], row["variant"]), order)
    profiles: list[dict[str, Any]] = []
    bar = tqdm(total=len(models) * len(variants), desc="variants", disable=not sys.stderr.isatty())
    for name in models:
        for variant in variants:
            bar.set_postfix_str(f"{name} {variant}")
            row = measure(name, variant, options)
            kernels = row.pop("kernels", None)
            results.replace("rows", (name, variant), [row])
            if kernels:
                profiles.append({"model": name, "variant": variant, "step_ms": row["ms"], "kernels": kernels})
                write_kernels(options.profile, about, profiles)
            if variant == variants[-1]:
                tqdm.write("\n" + "\n".join(table(same_model(row, results.content["rows"]))))
            bar.update()
    bar.close()
    for profile in profiles:
        print_kernels(profile)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
