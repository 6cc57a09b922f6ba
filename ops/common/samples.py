"""Samples and workloads of tensors of normal numbers, which is what most operators take."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from llmk.registry import Sample

Shape = tuple[int, ...]


def normal_sample(args: Sequence[Any], device: torch.device, dtype: torch.dtype, why: str, **kwargs: Any) -> Sample:
    """A call on normal tensors of these shapes; an argument that is not a shape is passed as it is."""
    tensors = (torch.randn(arg, device=device, dtype=dtype) if isinstance(arg, tuple) else arg for arg in args)
    return Sample(tuple(tensors), kwargs, why=why)


def normal_resized(args: Callable[[int], Sequence[Any]], **kwargs: Any) -> Callable[..., Sample]:
    """`Op.resized` of `normal_sample`, whose arguments follow from the number of rows."""
    return lambda rows, device, dtype: normal_sample(args(rows), device, dtype, "resized", **kwargs)


def normal_workloads(
    sizes: Sequence[Shape], args: Callable[..., Sequence[Any]]
) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    """`Op.workloads` of `normal_sample`, whose arguments follow from each of these sizes."""

    def workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for size in sizes:
            yield normal_sample(args(*size), device, dtype, "x".join(map(str, size)))

    return workloads
