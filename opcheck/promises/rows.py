"""The promise about rows: the results of a row are its own, bit for bit; the form is that of results.py.

A record does not say which tensors have rows, nor whether these are independent. The float64 reference does. Along
an axis of the first argument others are as long as it: where the reference gives a part of their rows, alone, what it
gives these rows among all others, the rows are independent, and the operator owes them the same bits.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import to_float64
from llmk.opcheck.calls import (
    call,
    device_of,
    elements,
    float_dtype,
    incoming_gradients,
    kind_of,
    representatives,
    resized,
)
from llmk.opcheck.inputs import BrokenPromise, NothingToCheck, Outcome, rebound, same_bits, tensors_of
from llmk.opcheck.promises.gpu import capture
from llmk.opcheck.reference import REFUSALS
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET
from llmk.registry.private.operators import overriding

COUNTS = (1, 7, 64, 1000)
"""So many rows are computed alone, where a sample has more, and half of all."""
MOST_ROWS = {"cpu": 4, "cuda": 1025}
"""Rows of the resized sample. Triton's interpreter is slow."""
MOST_SAMPLES = {"cpu": 1, "cuda": 3}
AXES = (0, 1)
"""Those along which there may be rows, the first before the second."""
AGREES = 1e-9
"""The difference up to which two results of the float64 reference agree, beside the largest element."""

Grads = Callable[[Sequence[Tensor]], list[Tensor]]
Run = Callable[[Sample, Grads], Outcome]
Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class IndependentRows:
    """The arguments that have rows along an axis, and the results that are each row's own, by name."""

    axis: int
    arguments: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def has_outputs(self) -> bool:
        return any(result.startswith("output") for result in self.results)


def batch_invariant(op: Op, samples: Sequence[Sample]) -> None:
    """The same row, the same bits: alone, in other chunks, without gradients; on a GPU captured too."""
    on_gpu = device_of(op, samples[0]).type == "cuda"
    if not on_gpu and not INTERPRET:
        raise NothingToCheck  # PyTorch's own sums on a CPU depend on the number of rows
    if op.kernel_ops and all(kernel_op.is_plain for kernel_op in op.kernel_ops):
        raise NothingToCheck  # nor are its sums on a GPU the operator's to promise
    chosen = samples_with_rows(op, samples)
    if on_gpu:
        dtype = float_dtype(op, samples[0])
        chosen = [(sample, owed(op, rows, dtype)) for sample, rows in chosen + _workload_with_rows(op, samples)]
    if not any(rows.results for _, rows in chosen):
        raise NothingToCheck
    found: list[str] = []
    with contextlib.nullcontext() if on_gpu else products_by_row():
        for sample, rows in chosen:
            differences = _on_gpu(op, sample, rows, sample is chosen[-1][0]) if on_gpu else _by_row(op, sample, rows)
            found += [f"{sample}: {difference}" for difference in differences]
    if found:
        raise BrokenPromise("; ".join(found))


def owed(op: Op, rows: IndependentRows, dtype: torch.dtype) -> IndependentRows:
    """Leave out what the record says to depend on the batch on a GPU."""
    known = op.batch_dependent_in(dtype)
    return replace(rows, results=tuple(result for result in rows.results if result not in known))


def samples_with_rows(op: Op, samples: Sequence[Sample]) -> list[tuple[Sample, IndependentRows]]:
    """Return small samples of different kinds that have independent rows, those with rows of outputs first."""
    device = device_of(op, samples[0]).type
    found: dict[Any, tuple[Sample, IndependentRows]] = {}
    for sample in (*resized(op, samples, (MOST_ROWS[device],)), *representatives(op, samples)):
        kind = kind_of(op, sample)
        rows = independent_rows(op, sample) if kind not in found else None
        if rows is not None:
            found[kind] = sample, rows
        if sum(rows.has_outputs for _, rows in found.values()) == MOST_SAMPLES[device]:
            break
    return sorted(found.values(), key=lambda pair: not pair[1].has_outputs)[: MOST_SAMPLES[device]]


def _workload_with_rows(op: Op, samples: Sequence[Sample]) -> list[tuple[Sample, IndependentRows]]:
    """Return the smallest size that users run, with the options of a sample of the same tensors that has such rows."""
    if op.workloads is None:
        return []
    workloads = op.workloads(device_of(op, samples[0]), float_dtype(op, samples[0]))
    workload = min(workloads, key=lambda sample: elements(op, sample))
    for sample in (*resized(op, samples, (MOST_ROWS["cpu"],)), *representatives(op, samples)):
        alike = tensors_of(op, sample).keys() == tensors_of(op, workload).keys()
        rows = independent_rows(op, sample) if alike else None
        if rows is not None and set(rows.arguments) <= set(_as_long_as_the_first(op, workload, rows.axis)):
            options = {name: value for name, value in op.bind(sample).items() if not isinstance(value, Tensor)}
            options.pop("chunk_size", None)
            why = f"{workload.why}, options of: {sample.why}"
            return [(rebound(op, workload, op.bind(workload) | options, why), rows)]
    return []


def independent_rows(op: Op, sample: Sample) -> IndependentRows | None:
    """Return the rows of a sample that the float64 reference computes alone as it does among all, if there are any."""
    found = (_rows_along(op, sample, axis) for axis in AXES)
    return next((rows for rows in found if rows is not None), None)


def _rows_along(op: Op, sample: Sample, axis: int) -> IndependentRows | None:
    names = _as_long_as_the_first(op, sample, axis)
    if not names:
        return None
    # On a CPU, where rows that do not fit the other arguments raise: on a GPU they end the process.
    batch = Batch(
        op, sample, axis, lambda sample, grads: call(op, sample, fn=op.reference, grads=grads, change=_on_cpu)
    )
    found = IndependentRows(axis, (), ())
    for size in range(len(names), 0, -1):
        for others in combinations(names[1:], size - 1):
            rows = IndependentRows(axis, (names[0], *others), tuple(batch.whole))
            for count in batch.parts():
                if len(rows.results) > len(found.results):
                    rows = replace(rows, results=batch.agreeing(rows, count))
            found = max(found, rows, key=lambda rows: len(rows.results))
    return found if found.results else None


def _on_cpu(tensor: Tensor) -> Tensor:
    return to_float64(tensor.cpu())


def _as_long_as_the_first(op: Op, sample: Sample, axis: int) -> list[str]:
    """Return the names of the tensors that are as long along an axis as the first one, if it has two rows or more.

    The last axis of the first one's floating-point numbers is a row.
    """
    tensors = tensors_of(op, sample)
    first = next(iter(tensors.values()))
    rows = first.shape[axis] if first.dim() > axis + first.is_floating_point() else 0
    lengths = {name: tensor.shape[axis] for name, tensor in tensors.items() if tensor.dim() > axis}
    return [name for name, length in lengths.items() if length == rows] if rows > 1 else []


class Batch:
    """All rows of a sample along an axis, which `run` computed, to hold parts of them against."""

    def __init__(self, op: Op, sample: Sample, axis: int, run: Run) -> None:
        self.op, self.sample, self.axis, self.run = op, sample, axis, run
        self.rows = op.bind(sample)[_as_long_as_the_first(op, sample, axis)[0]].shape[axis]
        self.given: list[Tensor] = []
        self.whole = _named(run(sample, self._give))

    def _give(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        self.given = incoming_gradients(outputs)
        return self.given

    def parts(self) -> list[int]:
        """Return the numbers of rows to compute alone: the last ones, which begin elsewhere than all do."""
        return sorted({count for count in (*COUNTS, self.rows // 2) if 0 < count < self.rows})

    def again(self, arguments: Sequence[str], count: int, run: Run | None = None, chunk_size: int = 0) -> Results:
        """Compute the last rows with the whole's incoming gradients, and in chunks of another size if it is given."""
        bound = self.op.bind(self.sample)
        start = self.rows - count
        rows = {name: bound[name].narrow(self.axis, start, count) for name in arguments}
        options = {"chunk_size": chunk_size} if chunk_size else {}
        sample = rebound(self.op, self.sample, bound | rows | options, f"{self.sample.why}, {count} rows")

        def grads(outputs: Sequence[Tensor]) -> list[Tensor]:
            return [self._last(grad, output.shape) for grad, output in zip(self.given, outputs, strict=True)]

        return _named((run or self.run)(sample, grads))

    def _last(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """Return the last rows of a result of the whole, along the axis in which `shape` is shorter."""
        for axis, (length, count) in enumerate(zip(tensor.shape, shape, strict=True)):
            if length == self.rows and count < length:
                return tensor.narrow(axis, length - count, count)
        return tensor

    def agreeing(self, rows: IndependentRows, count: int) -> tuple[str, ...]:
        """Return the results that are those of the whole, to the accuracy of float64."""
        try:
            alone = self.again(rows.arguments, count)
        except REFUSALS:  # such rows do not fit the other arguments
            return ()
        return tuple(name for name in rows.results if self._agrees(self.whole[name], alone[name]))

    def _agrees(self, whole: Tensor | None, alone: Tensor | None) -> bool:
        if whole is None or alone is None or whole.dim() != alone.dim() or whole.shape == alone.shape:
            return False
        last = self._last(whole, alone.shape)
        if last.shape != alone.shape or not whole.any():
            return False  # a result that is 0 in every row says nothing of them
        if not alone.is_floating_point():
            return torch.equal(alone, last)
        largest = float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return torch.allclose(alone, last, rtol=AGREES, atol=AGREES * largest, equal_nan=True)

    def differences(
        self, rows: IndependentRows, count: int, run: Run | None = None, way: str = "", chunk_size: int = 0
    ) -> Iterator[str]:
        """Yield the results of the last rows whose bits are not those of the whole, and by how much they differ."""
        try:
            other = self.again(rows.arguments, count, run, chunk_size)
        except (ValueError, TypeError, IndexError):
            if run is not None:
                raise
            return  # the operator refuses rows that do not fit the other arguments, where the reference does not look
        way = f"chunk_size={chunk_size}" if chunk_size else way
        for name in (name for name in rows.results if name in other):
            whole, alone = self.whole[name], other[name]
            last = whole if whole is None or alone is None else self._last(whole, alone.shape)
            if not same_bits(last, alone):
                words = f"{name} of the last {count} rows{way and f', {way},'} is not that of all {self.rows}"
                yield words + _distance(last, alone)


def _named(outcome: Outcome) -> Results:
    results: Results = {f"output {i}": output.detach() for i, output in enumerate(outcome.outputs)}
    return results | {f"gradient of {name}": grad for name, grad in outcome.gradients.items()}


def _distance(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape:
        return ""
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return (
        f": {int(differ.sum())} of {a.numel()} elements, by {float((a.double() - b.double()).abs().max()):.3g} at most"
    )


def _eager(op: Op, sample: Sample, rows: IndependentRows) -> Batch:
    return Batch(op, sample, rows.axis, lambda sample, grads: call(op, sample, grads=grads))


def _without_gradients(op: Op) -> Run:
    return lambda sample, grads: call(op, sample, ())


def _by_row(op: Op, sample: Sample, rows: IndependentRows) -> Iterator[str]:
    """Triton's interpreter is slow: one row, half of them in other chunks, and all without gradients."""
    batch = _eager(op, sample, rows)
    half = batch.rows // 2
    yield from batch.differences(rows, 1)
    yield from batch.differences(rows, half, chunk_size=_chunk(op, max(half // 2, 1)))
    yield from batch.differences(rows, batch.rows, _without_gradients(op), "without gradients")


def _on_gpu(op: Op, sample: Sample, rows: IndependentRows, in_graphs: bool) -> Iterator[str]:
    batch = _eager(op, sample, rows)
    for count in batch.parts():
        yield from batch.differences(rows, count)
    yield from batch.differences(rows, batch.rows, chunk_size=_chunk(op, batch.rows // 2 + 1))
    yield from batch.differences(rows, batch.rows, _without_gradients(op), "without gradients")
    if in_graphs:
        yield from _captured(batch, rows)


def _chunk(op: Op, size: int) -> int:
    return size if "chunk_size" in op.argument_names() else 0


def _captured(batch: Batch, rows: IndependentRows) -> Iterator[str]:
    """Captured in a CUDA graph, rows have eager's bits; compiled they have those of the code that Inductor makes."""
    op = batch.op

    def captured(sample: Sample, grads: Grads) -> Outcome:
        graph, outcome = capture(op, sample, grads)
        graph.replay()
        torch.cuda.synchronize()
        return outcome

    for count in (batch.rows, batch.parts()[-1]):
        yield from batch.differences(rows, count, captured, "captured in a CUDA graph")


@contextlib.contextmanager
def products_by_row() -> Iterator[None]:
    """Products of matrices on a CPU whose rows do not depend on each other, as its BLAS's do.

    What is checked in Triton's interpreter is the operator's own code. Which product a GPU's library chooses for so
    many rows is only seen there.
    """

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return (a.double().unsqueeze(2) * b.double()).sum(1).to(a.dtype)

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(mm(a, b))

    def addmm_out(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor) -> Tensor:
        return out.copy_(beta * total.double() + alpha * mm(a.double(), b.double()))

    with overriding("aten") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, which says that its product is overridden
            for name, product in {"mm": mm, "mm.out": mm_out, "addmm.out": addmm_out}.items():
                library.impl(name, product, "CPU")
        yield
