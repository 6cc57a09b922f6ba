"""Kernel ops: the private operators `llmk::_NAME` that launch kernels."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils.flop_counter import register_flop_formula

from llmk.registry.launch import INTERPRET, kernels_on_cpu, on_device, recording, wrap_triton

__all__ = ["KernelOp", "wrap_triton"]


class KernelOp:
    """Registers a function that launches Triton kernels as `torch.ops.llmk.NAME`, through `torch.library.triton_op`.

    What runs depends on the device of the first tensor:

    - on a GPU the function itself; under Inductor it is inlined, each launch a kernel that Inductor schedules;
    - on a CPU the function given to `register_kernel("cpu")`, plain PyTorch, which Inductor fuses like any other;
    - on a CPU with TRITON_INTERPRET=1 the function itself, its kernels in Triton's interpreter.

    Outputs must be fresh, contiguous or dense buffers that alias neither the inputs nor each other.

    Args:
        fn: The launching function. Its annotations give the schema. It must allocate with `torch.empty`, write every
            element of what it returns and mutate nothing else.
        opaque: Keep the op as one node under Inductor instead of inlining it: for a driver whose number of launches
            depends on sizes, which inlined would need a new graph for each number.
    """

    def __init__(self, fn: Callable[..., Any], *, opaque: bool = False) -> None:
        if not fn.__name__.startswith("_"):
            raise ValueError(f"fn: a kernel op's name starts with an underscore, got {fn.__name__!r}")
        self.fn = fn
        self.name = fn.__name__
        self.opaque = opaque
        self.has_backward = False
        self._cpu: Callable[..., Any] | None = None
        self._fake: Callable[..., Any] | None = None
        self._definition = torch.library.triton_op(f"llmk::{self.name}", self._wrap(fn), mutates_args=())
        self._definition.register_fake(self._wrap_fake())
        self._definition.register_autograd(self._refuse_double_backward)
        if opaque or INTERPRET:
            self._definition.register_torch_dispatch(FunctionalTensorMode, _keep_as_one_node)
        self.overload: Any = getattr(torch.ops.llmk, self.name).default

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def register_kernel(self, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register plain PyTorch for `device_type`, of which there is one: "cpu"."""
        if device_type != "cpu":
            raise ValueError(f"device_type: expected 'cpu', got {device_type!r}; GPUs run the kernels")

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._cpu = fn
            return fn

        return register

    def register_fake(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register what gives the outputs' shapes, strides and dtypes without computing them."""
        self._fake = fn
        return fn

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Register the backward formula, as in `torch.library.register_autograd`; it must call kernel ops only."""
        self.has_backward = True
        self._definition.register_autograd(backward, setup_context=setup_context)

    def register_flop_formula(self, fn: Callable[..., int]) -> Callable[..., int]:
        """Register what `torch.utils.flop_counter` counts for a call."""
        register_flop_formula(getattr(torch.ops.llmk, self.name), get_raw=True)(fn)
        return fn

    def check_complete(self) -> None:
        missing = [name for name, fn in [("fake", self._fake), ("CPU kernel", self._cpu)] if fn is None]
        if missing:
            raise RuntimeError(f"llmk::{self.name} has no {' and no '.join(missing)}")

    def _wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def body(*args: Any) -> Any:
            device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
            with _without_autocast(device):
                if device.type == "cpu" and not kernels_on_cpu():
                    assert self._cpu is not None
                    return self._cpu(*args)
                if device.type not in ("cpu", "cuda"):
                    raise NotImplementedError(f"llmk::{self.name} runs on cpu and cuda devices, got {device}")
                with on_device(device):
                    return fn(*args)

        return body

    def _wrap_fake(self) -> Callable[..., Any]:
        def fake(*args: Any) -> Any:
            assert self._fake is not None
            return self.fn(*args) if recording() else self._fake(*args)

        return fake

    def _refuse_double_backward(self, ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"llmk::{self.name} has no derivative: double backward is not supported")


def _keep_as_one_node(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.__torch_dispatch__(op, types, args, kwargs)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernel ops choose their own precision: autocast must not reach the matrix products inside them."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
