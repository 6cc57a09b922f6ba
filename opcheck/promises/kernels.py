"""The promises about kernels' own code; the form is that of results.py.

All but `every_kernel_ends` and `far_rows` need the interpreter.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmk.accuracy.neighbours import copy_with_layout
from llmk.opcheck.calls import (
    call,
    call_unless_strides_refused,
    device_of,
    elements,
    incoming_gradients,
    require_accurate,
    resized,
)
from llmk.opcheck.inputs import MEMORY, BrokenPromise, NothingToCheck, note, spread, transposed
from llmk.opcheck.interpreted.loops import EndlessLoop, kernels_of, unbounded_loops
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET

if TYPE_CHECKING:
    from llmk.opcheck.interpreted.interpreter import Watch

MOST_INTERPRETED = 2**20
"""Elements of a GPU's sample that is interpreted."""
_TOO_LARGE = f"not interpreted: no sample has at most {MOST_INTERPRETED} elements"
_GPU_MEMORY = 60 * 2**30
"""Free bytes: on a GPU what lies between far rows is taken in earnest."""


def in_bounds(op: Op, samples: Sequence[Sample]) -> None:
    """2: no program reads or writes what is no element of its kernel's arguments, and no error of one is swallowed;
    with inputs of other strides too where the samples are not llmk's, which have them.
    """
    watch, astray = _launches(op, samples)
    _raise_first(astray, MEMORY)
    _raise_first(watch.swallowed)


def any_program_order(op: Op, samples: Sequence[Sample]) -> str:
    """The programs of a launch in reversed or shuffled order give the same bits: they do not race; sums by atomics on
    floats, which are rounded in that order, are only noted.
    """
    watch, _ = _launches(op, samples)
    _raise_first(watch.races, MEMORY)
    return next(iter(watch.reordered_sums), "")


def no_float_atomics(op: Op, samples: Sequence[Sample]) -> None:
    """No atomics on floats, whose sums depend on the order of the programs."""
    _raise_first(_launches(op, samples)[0].float_atomics)


def long_offsets(op: Op, samples: Sequence[Sample]) -> None:
    """2: no kernel takes a program's number times a stride or size in 32 bits as an offset."""
    _raise_first(_launches(op, samples)[0].short_offsets)


def every_kernel_ends(op: Op, samples: Sequence[Sample]) -> None:
    """No loop of a kernel has turns that the data decides without a bound, read from its source; in Triton's
    interpreter turns are counted too.
    """
    kernels = kernels_of(kernel_op.fn for kernel_op in op.kernel_ops)
    if INTERPRET:
        watch, _ = _launches(op, samples)
        kernels = list({kernel.fn: kernel for kernel in (*kernels, *watch.kernels.values())}.values())
        _raise_first(watch.endless)
    if not kernels:
        raise NothingToCheck
    for sample in samples:
        note(sample)
    _raise_first([loop for kernel in kernels for loop in unbounded_loops(kernel)])


def _raise_first(found: Sequence[str], wrong: str = "") -> None:
    if found:
        raise BrokenPromise(found[0], wrong)


_last: "tuple[tuple[Op, Sequence[Sample]], tuple[Watch, list[str]]] | None" = None


def _launches(op: Op, samples: Sequence[Sample]) -> "tuple[Watch, list[str]]":
    """Return the watch over all launches that the samples make, and accesses out of bounds: once for all promises."""
    from llmk.opcheck.interpreted.interpreter import OutOfBounds, watched  # it needs numpy

    global _last
    if _last is None or not _same_calls(_last[0], (op, samples)):
        astray: list[str] = []
        with watched(reorder=True) as watch:
            layouts = (copy_with_layout,) if op.is_own else (copy_with_layout, spread, transposed)
            for sample, change in itertools.product(_interpretable(op, samples), layouts):
                failed = len(watch.failed)
                try:
                    call_unless_strides_refused(op, sample, change=change)
                    watch.swallowed += [f"{sample}: {words}, and the call returns" for words in watch.failed[failed:]]
                except OutOfBounds as error:
                    astray.append(f"{sample}: {error}")
                except EndlessLoop as error:
                    watch.endless.append(f"{sample}: {error}")
        _last = (op, samples), (watch, astray)
    (watch, astray), taken = _last[1], _interpretable(op, samples)
    if not watch.launches:
        raise NothingToCheck("" if taken else _TOO_LARGE)
    for sample in taken:
        note(sample)
    return watch, astray


def launches(op: Op, samples: Sequence[Sample]) -> bool | None:
    """Return True if a call of these launches a kernel in Triton's interpreter; None if that is not known."""
    from llmk.opcheck.interpreted.interpreter import watched  # it needs numpy

    taken = _interpretable(op, samples) if samples else []
    with watched() as watch:
        for sample in taken:
            try:
                call(op, sample)
            except Exception:  # the promises say what is wrong
                return bool(watch.launches) or None
            if watch.launches:
                return True
    return False if taken else None


def _interpretable(op: Op, samples: Sequence[Sample]) -> list[Sample]:
    """On a GPU, where samples may be as large as in use, those that do not take the interpreter hours."""
    on_gpu = device_of(op, samples[0]).type == "cuda"
    return [sample for sample in samples if not on_gpu or elements(op, sample) <= MOST_INTERPRETED]


def _same_calls(some: tuple[Op, Sequence[Sample]], others: tuple[Op, Sequence[Sample]]) -> bool:
    """Return True for one operator and the same samples, in whatever lists they are."""
    (op, samples), (other, given) = some, others
    return op is other and len(samples) == len(given) and all(map(operator.is_, samples, given))


def far_rows(op: Op, samples: Sequence[Sample]) -> None:
    """2: inputs and incoming gradients whose rows lie so far apart that only 64-bit offsets reach them."""
    on_gpu = device_of(op, samples[0]).type == "cuda"
    if on_gpu and torch.cuda.mem_get_info()[0] < _GPU_MEMORY:
        raise NothingToCheck
    try:
        _require_far_rows(op, samples)
    except torch.OutOfMemoryError:
        raise NothingToCheck("the GPU has not enough free memory for rows that lie so far apart") from None
    finally:
        if on_gpu:
            torch.cuda.empty_cache()  # processes beside this one need it


def _require_far_rows(op: Op, samples: Sequence[Sample]) -> None:
    for sample in _one_of_each_rank(op, samples):
        for axis in range(_rank(op, sample) - 1):

            def far(tensor: Tensor, axis: int = axis) -> Tensor:
                return _far_along(tensor, axis)

            def grads(outputs: Sequence[Tensor], axis: int = axis) -> list[Tensor]:
                return [_far_along(grad, axis) for grad in incoming_gradients(outputs)]

            outcome = call_unless_strides_refused(op, sample, grads=grads, change=far)
            if outcome is not None:
                require_accurate(op, sample, outcome)


def _one_of_each_rank(op: Op, samples: Sequence[Sample]) -> list[Sample]:
    found: dict[int, Sample] = {}
    for sample in (*resized(op, samples, [5]), *samples):
        if any(_can_be_far(tensor) for tensor in op.bind(sample).values() if isinstance(tensor, Tensor)):
            found.setdefault(_rank(op, sample), sample)
    return list(found.values())


def _rank(op: Op, sample: Sample) -> int:
    return max(tensor.dim() for tensor in op.bind(sample).values() if isinstance(tensor, Tensor))


def _can_be_far(tensor: Tensor) -> bool:
    return (
        not isinstance(tensor, torch.nn.Parameter)
        and 0 < tensor.numel() < 10_000
        and any(size >= 3 for size in tensor.shape[:-1])
    )


def _far_along(tensor: Tensor, axis: int) -> Tensor:
    """A copy with rows so far apart along `axis` that the last one's offset does not fit into 32 bits."""
    if not _can_be_far(tensor) or axis >= tensor.dim() - 1 or tensor.shape[axis] < 3:
        return copy_with_layout(tensor)
    strides = list(tensor.contiguous().stride())
    strides[axis] = max(strides[axis], 16 * (2**27 // (tensor.shape[axis] - 1) + 1))  # aligned as rows often are
    size = (tensor.shape[axis] - 1) * strides[axis] + tensor.numel()
    memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)  # on a CPU only the pages written take any
    return memory.as_strided(tensor.shape, strides).copy_(tensor.detach())
