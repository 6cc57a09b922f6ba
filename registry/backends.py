"""Chooses the code of an operator: its kernels on a GPU, the same in Triton's interpreter, or plain PyTorch on a CPU.

This is the one place where that is decided; `KernelOp.implementation` asks it, and `private.kernels.INTERPRET` is
TRITON_INTERPRET=1.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from llmk.registry.private.kernels import INTERPRET


class _Switch:
    kernels_on_cpu = INTERPRET


_switch = _Switch()


def kernels_on_cpu() -> bool:
    return _switch.kernels_on_cpu


@contextlib.contextmanager
def use_kernels_on_cpu() -> Iterator[None]:
    """Take the kernel path on CPU tensors too, to trace it through a stub driver where there is no GPU."""
    previous, _switch.kernels_on_cpu = _switch.kernels_on_cpu, True
    try:
        yield
    finally:
        _switch.kernels_on_cpu = previous


def runs_kernels(name: str, tensor: Tensor) -> bool:
    """Return True if kernels compute what is asked for the device of this tensor, else plain PyTorch."""
    if not tensor.is_cuda and not tensor.is_cpu:
        raise NotImplementedError(f"llmk::{name} runs on cpu and cuda devices, got {tensor.device}")
    return tensor.is_cuda or _switch.kernels_on_cpu
