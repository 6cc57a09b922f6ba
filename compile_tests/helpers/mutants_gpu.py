"""Operators that are broken in ways that only a GPU shows, and the promise of opcheck's that names each first."""

from collections.abc import Callable

import torch
from torch import Tensor

from compile_tests.helpers.mutants import square
from llmk.registry import Op


def captured() -> bool:
    return torch.cuda.is_current_stream_capturing()


def other_when_captured(x: Tensor) -> Tensor:
    return 3 * x if captured() else x * x


def waits(x: Tensor) -> Tensor:
    """Wait for the device, where that is possible."""
    return x * x if captured() or x.sum().item() > -1e9 else x


def on_the_default_stream(x: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.current_stream() if captured() else torch.cuda.default_stream()):
        return x * x


def on_the_current_device(x: Tensor) -> Tensor:
    return x * x * torch.ones(x.shape[1], dtype=x.dtype, device="cuda")


BROKEN_ON_A_GPU: dict[str, tuple[str, Callable[[str], Op]]] = {
    "other_when_captured": ("cuda_graphs", lambda n: square(n, other_when_captured)),
    "waits": ("no_host_sync", lambda n: square(n, waits)),
    "on_the_default_stream": ("other_stream", lambda n: square(n, on_the_default_stream)),
    "on_the_current_device": ("other_device", lambda n: square(n, on_the_current_device)),
}
