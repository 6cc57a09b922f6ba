"""Host time of a small call in plain eager mode, where launching costs more than computing.

The baseline is a bare `torch.autograd.Function`: what a careful author would write by hand around the same kernels,
with `torch.empty` and Triton's own launch, without dispatcher, checks, schema or launch cache. It is derived from the
operator's kernel ops. llmk is called as `torch.ops.llmk.NAME`, and as `llmk.functional.NAME`, which can pass the
dispatcher by.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from llmk.opcheck.calls import as_list, incoming_gradients, prepare
from llmk.registry import OPS, KernelOp, Op, launch, set_short_path_enabled

CALLS, ROUNDS = 50, 16  # the first round warms up


def measure_host(names: Sequence[str], device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The host time of each operator's small call, in microseconds, as a table."""
    ways = ("llmk", "functional", "bare", "torch")
    print(f"\n{'host us, forward / both':<24}{''.join(f'{way:>13}' for way in ways)}{'llmk / bare':>14}")
    for name in names:
        row = host_times(OPS[name], device, dtype)
        if row is None:
            continue
        times = [f"{row[way][0]:.0f} / {row[way][1]:.0f}" for way in ways]
        ratio = f"{row['ratio'][0]:.2f} / {row['ratio'][1]:.2f}"
        print(f"{name:<24}{''.join(f'{text:>13}' for text in times)}{ratio:>14}")
        yield row


def host_times(op: Op, device: torch.device, dtype: torch.dtype) -> dict[str, Any] | None:
    """Microseconds of forward, and of forward and backward: llmk both ways, the bare Function, and torch.

    None for an operator that has no one kernel op to wrap, or no small sample.
    """
    if op.resized is None:
        return None
    args, kwargs, tensors = prepare(op, op.resized(64, device, dtype), ())
    inputs = [tensors[name].requires_grad_() for name in op.trained or op.differentiable if name in tensors]
    called = _forward_kernel_op(op, args, kwargs)
    if called is None or not inputs:
        return None
    kernel_op, kernel_args = called
    bare, function = _bare_function(kernel_op), op.function
    ways: dict[str, Callable[[], Any]] = {
        "llmk": lambda: op.overload(*args, **kwargs),
        "functional": lambda: function(*args, **kwargs),
        "bare": lambda: bare.apply(*kernel_args),
        "torch": lambda: op.reference(*args, **kwargs),
    }
    rounds: dict[str, list[list[float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):  # in turn, so that none has a quieter machine
        for way, fn in ways.items():
            with _kernels_called_directly() if way == "bare" else contextlib.nullcontext():
                rounds[way].append(_microseconds(fn, inputs))
    row: dict[str, Any] = {"op": op.name}
    row |= {way: [statistics.median(times) for times in zip(*rounds[way][1:], strict=True)] for way in ways}
    return row | {"ratio": [a / b for a, b in zip(row["llmk"], row["bare"], strict=True)]}


def _forward_kernel_op(op: Op, args: list[Any], kwargs: dict[str, Any]) -> tuple[KernelOp, tuple[Any, ...]] | None:
    """The one kernel op with a backward formula that a call makes, and what it is given."""
    calls: list[tuple[KernelOp, tuple[Any, ...]]] = []
    original = KernelOp.__call__

    def recording(self: KernelOp, *given: Any) -> Any:
        if self.has_backward:
            flags = () if self.derivative.keeps is None else self.derivative.flags(given)
            calls.append((self, (*given, *flags)))
        return original(self, *given)

    KernelOp.__call__ = recording
    try:
        with set_short_path_enabled(False):  # which may repeat the launches of a whole call
            op.overload(*args, **kwargs)
    finally:
        KernelOp.__call__ = original
    return calls[0] if len(calls) == 1 else None


def _bare_function(kernel_op: KernelOp) -> type[torch.autograd.Function]:
    derivative = kernel_op.derivative

    def forward(ctx: Any, *args: Any) -> Any:
        output = kernel_op.implementation(*args)(*args)
        ctx.set_materialize_grads(False)
        derivative.save(ctx, args, output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        return derivative.formula(ctx, *grads[: len(derivative.results)])

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("BareFunction", (torch.autograd.Function,), methods)


@contextlib.contextmanager
def _kernels_called_directly() -> Iterator[None]:
    """Inside a backward formula a kernel op is its function, allocating by PyTorch and launching by Triton."""
    with (
        mock.patch.object(KernelOp, "__call__", lambda self, *args: self.implementation(*args)(*args)),
        mock.patch.object(launch, "launcher_for", lambda kernel: kernel),
        mock.patch.object(launch, "empty_on_gpu", lambda size, _, dtype: torch.empty(size, dtype=dtype, device="cuda")),
    ):
        yield


def _microseconds(fn: Callable[[], Any], inputs: list[Tensor]) -> list[float]:
    """Forward, and forward and backward, averaged over calls that do not wait for the device."""
    outputs = [output for output in as_list(fn()) if output.requires_grad]
    grads = incoming_gradients(outputs)

    def full() -> None:
        torch.autograd.grad([output for output in as_list(fn()) if output.requires_grad], inputs, grads)

    times = []
    for call in (fn, full):
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    return times
