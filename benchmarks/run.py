"""`python -m benchmarks.run [OP ...]`: time llmk's operators beside plain PyTorch, eager and compiled.

For each workload of an operator's record: forward, forward and backward, both replayed as a CUDA graph (the device's
time without the host's), and peak memory above the inputs. The floor is the larger of (bytes it must move / measured
copy bandwidth) and (operations it must do / measured GEMM rate), both measured first, in the same process; the ratio
printed is that of the replayed forward and backward. On a CPU one small sample is timed, to keep the code tested.
Last comes the host time of a small eager call, see host.py.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from tqdm import tqdm

import llmk
from benchmarks.host import host_times
from llmk.registry import OPS, Cost, Op, Sample

DTYPE = torch.bfloat16


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Time llmk's operators beside plain PyTorch."
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators by name; all by default")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--host-only", action="store_true", help="only the host time of small calls")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    for name in options.ops:
        if name not in OPS:
            parser.error(f"no operator {name!r}; there are {', '.join(OPS)}")
    return options


class Timer:
    """Times calls on a device: the median of several, the cache flushed before each."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.flush = torch.empty(256 * 2**20 if device.type == "cuda" else 0, dtype=torch.int8, device=device)

    def milliseconds(self, fn: Callable[[], Any]) -> float:
        for _ in range(3):
            fn()
        return statistics.median(self._once(fn) for _ in range(self.repeats))

    def replayed(self, fn: Callable[[], Any]) -> float:
        """Captured as a CUDA graph and replayed: no launch waits for the host."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                fn()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return self.milliseconds(graph.replay)

    def sustained(self, fn: Callable[[], Any], seconds: float = 1.0) -> float:
        """Back to back for at least so long: what a chip at its power limit gives."""
        fn()
        self._synchronize()
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for _ in range(4):
                fn()
            calls += 4
            self._synchronize()
        return 1e3 * (time.perf_counter() - start) / calls

    def _once(self, fn: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            fn()
            return 1e3 * (time.perf_counter() - start)
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_mib(self, fn: Callable[[], Any]) -> float | None:
        """Peak memory of a call above what was allocated before it."""
        if self.device.type != "cuda":
            return None
        fn()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        fn()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


def measure_ceilings(device: torch.device, timer: Timer) -> dict[str, float]:
    """Bytes read and written by a copy, and the operations of a large GEMM, per second."""
    count, size = (2**31, 8192) if device.type == "cuda" else (2**24, 512)
    source = torch.empty(count, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    copy = timer.milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, dtype=DTYPE, device=device) for _ in range(2))
    gemm = timer.milliseconds(lambda: a @ b)
    return {"copy_bytes_per_s": 2e3 * count / copy, "gemm_flops_per_s": 2e3 * size**3 / gemm}


def floor_ms(nbytes: int, flops: int, ceilings: dict[str, float]) -> float:
    return 1e3 * max(nbytes / ceilings["copy_bytes_per_s"], flops / ceilings["gemm_flops_per_s"])


def measure(op: Op, sample: Sample, timer: Timer, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each way to compute the sample."""
    cost = op.cost(*sample.args, **sample.kwargs) if op.cost else Cost()
    floors = (
        floor_ms(cost.bytes_forward, cost.flops_forward, ceilings),
        floor_ms(cost.bytes_full, cost.flops_full, ceilings),
    )
    bound = (
        "memory"
        if cost.bytes_full / ceilings["copy_bytes_per_s"] > cost.flops_full / ceilings["gemm_flops_per_s"]
        else "matrix"
    )
    rows = []
    for name, fn in (
        ("llmk eager", op.overload),
        ("llmk compiled", torch.compile(op.overload, fullgraph=True, dynamic=False)),
        ("torch eager", op.reference),
        ("torch compiled", torch.compile(op.reference, dynamic=False)),
    ):
        torch._dynamo.reset()
        try:
            row = _time(op, sample, fn, timer, sustained=bound == "matrix" and timer.device.type == "cuda")
        except torch.cuda.OutOfMemoryError:
            row = {"error": "out of memory"}
        rows.append(
            {"op": op.name, "workload": sample.why, "way": name, "bound": bound,
             "floor_forward_ms": floors[0], "floor_full_ms": floors[1], **row}
        )  # fmt: skip
    return rows


def _time(op: Op, sample: Sample, fn: Callable[..., Any], timer: Timer, sustained: bool) -> dict[str, Any]:
    bound = op.bind(sample)
    wanted = [bound[name] for name in op.trained or op.differentiable if isinstance(bound.get(name), Tensor)]

    def forward() -> Any:
        with torch.no_grad():
            return fn(*sample.args, **sample.kwargs)

    for tensor in wanted:
        tensor.requires_grad_()
    outputs = _as_tuple(fn(*sample.args, **sample.kwargs))
    grads = [torch.randn_like(output) for output in outputs]
    del outputs

    def full() -> None:
        torch.autograd.grad(_as_tuple(fn(*sample.args, **sample.kwargs)), wanted, grads)

    row: dict[str, Any] = {"forward_ms": timer.milliseconds(forward), "full_ms": timer.milliseconds(full)}
    row["peak_mib"] = timer.peak_mib(full)
    if timer.device.type == "cuda":
        row["replayed_ms"] = timer.replayed(full)
    if sustained:
        row["full_sustained_ms"] = timer.sustained(full)
    return row


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """One workload: a line for each way to compute it."""
    title = f"{rows[0]['op']}, {rows[0]['workload']}"
    tqdm.write(f"\n{title:<36}{'forward':>9}{'full':>9}{'replayed':>10}{'x floor':>9}{'MiB':>7}")
    for row in rows:
        head = f"  {row['way']:<34}"
        if "error" in row:
            tqdm.write(f"{head}{row['error']}")
            continue
        memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        replayed = ratio = ""
        if "replayed_ms" in row:
            replayed = f"{row['replayed_ms']:.3f}"
            ratio = f"{row['replayed_ms'] / row['floor_full_ms']:.2f}" if row["floor_full_ms"] else ""
        tqdm.write(f"{head}{row['forward_ms']:>9.3f}{row['full_ms']:>9.3f}{replayed:>10}{ratio:>9}{memory:>7}")


def measure_host(names: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    """The host time of each operator's small call, in microseconds, as a table."""
    heads = "".join(f"{way:>16}" for way in ("llmk", "functional", "bare Function"))
    print(f"\n{'host us, forward / both':<24}{heads}{'ratio':>14}{'torch':>16}")
    rows: list[dict[str, Any]] = []
    for name in names:
        row = host_times(OPS[name], device, DTYPE)
        if row is None:
            continue
        rows.append(row)
        times = [f"{row[way][0]:.0f} / {row[way][1]:.0f}" for way in ("llmk", "functional", "bare", "torch")]
        ratio = f"{row['ratio'][0]:.2f} / {row['ratio'][1]:.2f}"
        print(f"{name:<24}{times[0]:>16}{times[1]:>16}{times[2]:>16}{ratio:>14}{times[3]:>16}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer = Timer(device, options.repeats)
    ceilings = measure_ceilings(device, timer)
    print(
        f"copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, GEMM {ceilings['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s"
        "\nms of forward, of forward and backward (full), and of full replayed as a CUDA graph"
    )
    rows: list[dict[str, Any]] = []
    for name in tqdm(
        [] if options.host_only else options.ops or list(OPS), desc="ops", disable=not sys.stderr.isatty()
    ):
        op = OPS[name]
        calls = op.workloads if device.type == "cuda" else op.samples
        if calls is None:
            continue
        torch.manual_seed(0)
        for i, sample in enumerate(calls(device, DTYPE)):
            if device.type != "cuda" and i > 0:
                break
            measured = measure(op, sample, timer, ceilings)
            print_rows(measured)
            rows += measured
    host = measure_host(options.ops or list(OPS), device)
    if options.json:
        about = {
            "llmk": llmk.__version__, "torch": torch.__version__, "triton": triton.__version__,
            "python": platform.python_version(), "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "dtype": str(DTYPE),
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({**about, "ceilings": ceilings, "rows": rows, "host_us": host}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
