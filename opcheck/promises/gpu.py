"""The promises that only a GPU can break; the form is that of results.py."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from llmk.accuracy.neighbours import copy_with_layout
from llmk.opcheck.calls import call, first_line, incoming_gradients, require_accurate, resized
from llmk.opcheck.inputs import BrokenPromise, Outcome, as_list, differentiable_inputs, prepare
from llmk.opcheck.promises.compiled import call_compiled, compiled_call
from llmk.registry import Op, Sample
from llmk.registry.private.tensors import delay_stream

_DELAY = 50_000_000
"""Cycles: some 25 ms, in which a kernel that does not wait is long done."""


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """Put the generator of the current GPU back where a capture fails: it would hold every later call to be in one."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


@generator_kept()
def cuda_graphs(op: Op, samples: Sequence[Sample]) -> None:
    """3: captured and replayed on other inputs, by hand and by `mode="reduce-overhead"`, which does capture it."""
    sample = next(resized(op, samples, [37]), samples[0])
    _require_replayed(op, sample)
    torch.compiler.reset()
    fn = compiled_call(op, mode="reduce-overhead")
    with counted_replays() as count:
        for _ in range(4):
            _require_right_step(op, sample, fn)
    require_captured(sample, count)


def _require_right_step(op: Op, sample: Sample, fn: Callable[..., Any]) -> None:
    """A step of its own, of which nothing is left: Inductor then ends its warm-up.

    It would not while outputs of an earlier step are held and it has not seen that step's backward pass, as where that
    has nothing to compute.
    """
    torch.compiler.cudagraph_mark_step_begin()
    require_accurate(op, sample, call_compiled(op, sample, fn))


def require_captured(sample: Sample, replays: list[int]) -> None:
    if not replays[0]:
        raise BrokenPromise(f"{sample}: with mode='reduce-overhead' no CUDA graph was replayed")


@contextlib.contextmanager
def counted_replays() -> Iterator[list[int]]:
    """Count the CUDA graphs replayed inside."""
    count, original = [0], torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        count[0] += 1
        original(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", replay):
        yield count


def _require_replayed(op: Op, sample: Sample) -> None:
    """Capture both passes on one sample's memory, put another's numbers there and replay."""
    other = reversed_rows(sample)
    graph, outcome = capture(op, sample)
    with torch.no_grad():
        for name, value in op.bind(other).items():
            if isinstance(value, Tensor):
                overwrite(outcome.inputs[name], value)
    graph.replay()
    torch.cuda.synchronize()
    try:
        require_accurate(op, other, outcome)
    except BrokenPromise as error:
        raise BrokenPromise(f"captured, and replayed with other inputs: {error}", error.wrong) from None


def overwrite(tensor: Tensor, numbers: Tensor) -> None:
    """Write other numbers into a tensor's memory, which an expanded axis has once."""
    for axis in (axis for axis in range(tensor.dim()) if tensor.stride(axis) == 0 and tensor.shape[axis] > 0):
        tensor, numbers = tensor.narrow(axis, 0, 1), numbers.narrow(axis, 0, 1)
    tensor.copy_(numbers)


@generator_kept()
def capture(
    op: Op, sample: Sample, grads: Callable[[Sequence[Tensor]], list[Tensor]] = incoming_gradients
) -> tuple[torch.cuda.CUDAGraph, Outcome]:
    """Capture both passes: the graph, whose replay reads the outcome's inputs and writes its results."""
    wanted = differentiable_inputs(op, sample)
    args, kwargs, tensors = prepare(op, sample, wanted)
    inputs = [tensors[name] for name in wanted]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        outputs = as_list(op.overload(*args, **kwargs))
        wanting = [output for output in outputs if output.requires_grad]
        return outputs, list(torch.autograd.grad(wanting, inputs, given, allow_unused=True)) if wanting else []

    given = grads([output for output in as_list(op.overload(*args, **kwargs)) if output.requires_grad])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs, gradients = run()
    except RuntimeError as error:
        raise BrokenPromise(f"{sample}: cannot be captured: {first_line(error)}") from error
    return graph, Outcome(tensors, outputs, dict(zip(wanted, gradients, strict=True)))


def reversed_rows(sample: Sample) -> Sample:
    """The sample with every tensor's first axis in reversed order: other numbers, as valid as they were.

    Integers that ascend stay: ends of groups are valid in their order only.
    """

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or _ascends(value):
            return value
        return value.flip(0)

    kwargs = {name: other(value) for name, value in sample.kwargs.items()}
    return Sample(tuple(other(value) for value in sample.args), kwargs, why=f"{sample.why}, reversed")


def _ascends(value: Tensor) -> bool:
    integers = value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
    return integers and bool((value.diff() >= 0).all())


def no_host_sync(op: Op, samples: Sequence[Sample]) -> None:
    """3: neither direction makes the host wait for the device."""
    for sample in samples:
        args, kwargs, _ = prepare(op, sample, differentiable_inputs(op, sample))
        outputs = as_list(op.overload(*args, **kwargs))  # builds the kernels, which may wait
        wanting = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(wanting, incoming_gradients(wanting))  # type: ignore[arg-type]
        grads = incoming_gradients(wanting)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = as_list(op.overload(*args, **kwargs))
            torch.autograd.backward([o for o in outputs if o.requires_grad], grads)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise BrokenPromise(f"{sample}: the host waits: {first_line(error)}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def other_stream(op: Op, samples: Sequence[Sample]) -> None:
    """2: on a stream that is not the default one, where inputs and incoming gradients arrive late."""

    def grads(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [late(grad) for grad in incoming_gradients(outputs)]

    stream = torch.cuda.Stream()
    for sample in samples:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outcome = call(op, sample, change=late, grads=grads)
        torch.cuda.current_stream().wait_stream(stream)
        require_accurate(op, sample, outcome)


def late(tensor: Tensor, delay: Callable[[int], None] = delay_stream) -> Tensor:
    """A copy whose numbers come on the current stream after a while; who does not wait for it reads NaN or zeros."""
    copy = copy_with_layout(tensor)
    copy.untyped_storage().fill_(255 if copy.is_floating_point() else 0)  # type: ignore[attr-defined]  255: NaN
    if copy.is_cuda:
        torch.cuda.synchronize()
    delay(_DELAY)
    return copy_into(copy, tensor)


def copy_into(copy: Tensor, tensor: Tensor) -> Tensor:
    """The whole memory, since elements of an expanded tensor share theirs."""
    copy.untyped_storage().copy_(tensor.untyped_storage(), non_blocking=True)
    return copy
