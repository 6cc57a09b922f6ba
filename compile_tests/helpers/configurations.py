"""Every launch configuration that an operator can choose, found by making its samples again at other sizes.

An operator chooses a configuration by sizes, dtypes, layouts and options. Its samples have the options and the layouts,
its workloads the large sizes; here each size in them is replaced in turn, wherever it occurs, and the operator runs on
fake tensors. So nothing is declared by hand: a new operator is swept as soon as it has samples.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from compile_tests.helpers.aot import forward_and_backward, gradients_wanted
from llmk.registry.launch import Launch, record_launches
from llmk.registry.private.tensors import FakeTensorMode
from llmk.registry.record import Op, Sample

PROBES = [64, 4097, 262144]
"""A size that makes no difference between these is taken to make none at all, as the number of rows mostly does."""
SIZES = PROBES + [size for k in range(7, 19) for size in (2**k, 2**k + 1) if size not in PROBES]
"""Powers of two, and one more, where a block doubles and rows are no longer aligned."""
MORE_SIZES = sorted({size for k in range(19) for size in (2**k, 2**k + 1, 2**k + 8, 3 * 2**k)})
MANY_LAUNCHES = 16
"""The launches past which a call goes through its input in chunks, and more of them show nothing new."""


def sweep(op: Op, dtype: torch.dtype, *, every: bool = False) -> list[Launch]:
    """The launches of `op` at many sizes: each configuration with its sizes and pointers most and least aligned.

    A configuration is a kernel, its constants and options, the dtypes of its tensors, and which of them are given.
    Calls that the operator refuses, such as a packed tensor of odd width, are left out.

    Args:
        op: The operator.
        dtype: Of its samples.
        every: Take more sizes, and have each gradient wanted alone too: many times as many calls.
    """
    found: dict[tuple[Any, ...], list[Launch]] = {}
    with FakeTensorMode():
        for sample, old in _samples_and_sizes(op, dtype):
            choices = set()
            for i, new in enumerate(MORE_SIZES if every else SIZES):
                launched = _launches(op, _resized(sample, old, new), every)
                for launch in launched:
                    found[_configuration(launch)] = _extremes([*found.get(_configuration(launch), ()), launch])
                choices.add(frozenset((launch.kernel, *launch.kwargs.items()) for launch in launched))
                matters = every or i < len(PROBES) or len(choices) > 1
                if not matters or len(launched) > MANY_LAUNCHES:
                    break
    return [launch for launches in found.values() for launch in launches]


def largest_blocks(launches: Iterable[Launch]) -> list[Launch]:
    """Among launches with the same kernel, flags, options and dtypes, the most and least aligned of the heaviest.

    The heaviest have the largest blocks, and between these the most tensors.
    """
    groups: dict[tuple[Any, ...], dict[tuple[int, int], list[Launch]]] = {}
    for launch in launches:
        flags = tuple(item for item in launch.kwargs.items() if not _is_block(*item))
        dtypes = frozenset(value.dtype for value in launch.args if isinstance(value, Tensor))
        by_load = groups.setdefault((launch.kernel, flags, dtypes), {})
        by_load.setdefault(_load(launch), []).append(launch)
    return [launch for by_load in groups.values() for launch in _extremes(by_load[max(by_load)])]


def _launches(op: Op, sample: Sample, every: bool) -> list[Launch]:
    """None where the operator refuses the call."""
    wanted = list(gradients_wanted(op, sample))
    with record_launches() as recorded:
        for names in wanted if every else wanted[:1]:
            try:
                forward_and_backward(op, sample, names)
            except (ValueError, TypeError, IndexError):
                return []
    return recorded


def _configuration(launch: Launch) -> tuple[Any, ...]:
    given = tuple(value.dtype if isinstance(value, Tensor) else value is None for value in launch.args)
    return launch.kernel, tuple(launch.kwargs.items()), given


def _alignment(launch: Launch) -> int:
    """The number of sizes, strides and pointers that Triton can take for aligned."""
    numbers = [value.storage_offset() if isinstance(value, Tensor) else value for value in launch.args]
    return sum(type(number) is int and number % 16 == 0 for number in numbers)


def _extremes(launches: list[Launch]) -> list[Launch]:
    """The least and the most aligned."""
    least, most = min(launches, key=_alignment), max(launches, key=_alignment)
    return [least] if least is most else [least, most]


def _is_block(name: str, value: Any) -> bool:
    return type(value) is int and name.lower() not in ("num_warps", "num_stages")


def _load(launch: Launch) -> tuple[int, int]:
    blocks = [value for name, value in launch.kwargs.items() if _is_block(name, value)]
    return math.prod(max(1, block) for block in blocks), sum(value is not None for value in launch.args)


def _samples_and_sizes(op: Op, dtype: torch.dtype) -> Iterator[tuple[Sample, int]]:
    """The samples and workloads, each with every size it has; one of those that differ in nothing but sizes."""
    for make in (op.samples, op.workloads):
        seen = set()
        for sample in make(torch.device("cpu"), dtype) if make is not None else ():
            values = op.bind(sample)
            flat = (each for value in values.values() for each in (value if isinstance(value, list) else [value]))
            tensors = [value for value in flat if isinstance(value, Tensor)]
            sizes = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
            form = tuple((name, _form(value, sizes)) for name, value in values.items())
            if form not in seen:
                seen.add(form)
                yield from ((sample, size) for size in sizes)


def _form(value: Any, sizes: list[int]) -> Any:
    """An argument but for how large its sizes are."""
    if isinstance(value, list):
        return tuple(_form(each, sizes) for each in value)
    if not isinstance(value, Tensor):
        return value
    shape = [f"size {sizes.index(size)}" if size in sizes else size for size in value.shape]
    return value.dtype, *shape, *_moving_axes(value), value.is_contiguous()


def _moving_axes(tensor: Tensor) -> list[int]:
    """The axes along which memory moves, innermost first."""
    axes = [axis for axis in range(tensor.dim()) if tensor.stride(axis)]
    return sorted(axes, key=lambda axis: (tensor.stride(axis), tensor.shape[axis]))


def _resized(sample: Sample, old: int, new: int) -> Sample:
    args = tuple(_with_size(value, old, new) for value in sample.args)
    kwargs = {name: _with_size(value, old, new) for name, value in sample.kwargs.items()}
    return Sample(args, kwargs, f"{sample.why}, {old} made {new}")


def _with_size(value: Any, old: int, new: int) -> Any:
    """A tensor's axes of size `old` made `new`; their order stays, and gaps, which become odd: no row is aligned."""
    if isinstance(value, list):
        return [_with_size(each, old, new) for each in value]
    if not isinstance(value, Tensor) or old not in value.shape:
        return value
    shape = [new if size == old else size for size in value.shape]
    strides = [0] * value.dim()
    before = after = 1  # the extent of the axes within, in elements
    for axis in _moving_axes(value):
        gap = value.stride(axis) > before
        strides[axis] = (value.stride(axis) * after // before) | 1 if gap else after
        before, after = max(1, value.stride(axis) * value.shape[axis]), max(1, strides[axis] * shape[axis])
    return value.new_empty(after + value.storage_offset()).as_strided(shape, strides, value.storage_offset())
