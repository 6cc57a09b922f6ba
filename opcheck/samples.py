"""Samples that do not come from an operator's record."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.registry import Sample

Samples = Callable[[torch.device, torch.dtype], Iterable[Sample]]
GivenSamples = Samples | Iterable[Sample | Sequence[Any]]
"""A function as a record has it, or calls: each a `Sample`, or the positional arguments."""


def samples_from(given: GivenSamples) -> Samples:
    """Return a record's function of samples; given calls are made on every device and in every dtype."""
    if callable(given):
        return given
    calls = [call if isinstance(call, Sample) else Sample(tuple(call), why=f"call {i}") for i, call in enumerate(given)]

    def samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        return [_moved(call, device, dtype) for call in calls]

    return samples


def _moved(sample: Sample, device: torch.device, dtype: torch.dtype) -> Sample:
    """The sample on a device, its floating-point tensors in a dtype."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device, dtype if value.is_floating_point() else value.dtype)
        return [move(item) for item in value] if isinstance(value, list | tuple) else value

    kwargs = {name: move(value) for name, value in sample.kwargs.items()}
    return Sample(tuple(move(value) for value in sample.args), kwargs, why=sample.why)
