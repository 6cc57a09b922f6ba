"""Settings of the process, in all threads: what tests, measurements and users change for a while."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from llmk.registry.private.kernels import INTERPRET


class _Settings:
    """What holds now.

    Attributes:
        fast_path: Plain eager mode may leave out the dispatcher and Triton's launcher.
        kernels_on_cpu: CPU tensors take the kernel path.
        warp_size: The threads in a warp of the GPU that launches are chosen for.
        shared_memory: Its bytes of shared memory for a thread block; None for those of the GPU at hand.
        launches: The launches that are recorded instead of made; None where they are made.
        forms: "kernel" or "aten" by the name of a kernel op: its form in a graph, whatever it was registered as.
    """

    fast_path = True
    kernels_on_cpu = INTERPRET
    warp_size = 32 if torch.version.hip is None else 64
    shared_memory: int | None = None
    launches: list[Any] | None = None
    forms: Mapping[str, str] = {}


settings = _Settings()


@contextlib.contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Have other settings inside."""
    before = {name: getattr(settings, name) for name in values}
    vars(settings).update(values)
    try:
        yield
    finally:
        vars(settings).update(before)
