"""Tensors: their memory, a GPU's, and what watches what is done with them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from llmk.registry.private.names import attribute, find, required


def version_of(tensor: Tensor) -> int | None:
    """Grows when PyTorch writes into a tensor; None where that cannot be told."""
    return attribute(tensor, "_version", lambda tensor: None)


def storage_of(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    return attribute(tensor.untyped_storage(), "_cdata", lambda storage: StorageWeakRef(storage).cdata)


def _always(tensor: Tensor) -> bool:
    return True


is_view: Callable[[Tensor], bool] = find("torch.Tensor._is_view", _always)
"""True for a tensor that autograd knows as a view; where that cannot be told for each."""


def _torch_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty_on_gpu: Callable[..., Tensor] = find("torch._C._dynamo.guards._empty_strided_cuda", _torch_empty)
"""Inductor's own allocation on the current device, in a fifth of the time of `torch.empty`."""
current_device: Callable[[], int] = find("torch._C._cuda_getDevice", torch.cuda.current_device)
_addmm_activation = find("torch.ops.aten._addmm_activation")


def addmm_activation(bias: Tensor, x: Tensor, weight: Tensor, out: Tensor, *, gelu: bool) -> None:
    """out = f(x @ weight + bias) by cuBLASLt, where f is relu or gelu's tanh approximation."""
    if _addmm_activation is not None:
        _addmm_activation.out(bias, x, weight, use_gelu=gelu, out=out)
        return
    torch.addmm(bias, x, weight, out=out)
    out.copy_(F.gelu(out, approximate="tanh") if gelu else F.relu(out))


class _NoMode:
    """Stands for a dispatch mode, where there is none: it cannot be entered."""

    def __enter__(self) -> None:
        raise RuntimeError(f"this needs a TorchDispatchMode, which llmk does not find in torch {torch.__version__}")

    def __exit__(self, *exception: object) -> None:
        pass


DispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode", _NoMode)
FakeTensorMode = required("torch._subclasses.fake_tensor.FakeTensorMode")
_FakeTensor: Any = find("torch._subclasses.fake_tensor.FakeTensor", ())


def has_numbers(tensor: torch.Tensor) -> bool:
    """Return False for a fake tensor and one on the meta device, which have sizes alone."""
    return not (tensor.is_meta or isinstance(tensor, _FakeTensor))


def _multiply_for(cycles: int) -> None:
    x = torch.ones(4096, 4096, dtype=torch.float32, device="cuda")
    for _ in range(cycles // 5_000_000 + 1):  # some milliseconds each
        torch.mm(x, x)


delay_stream: Callable[[int], None] = find("torch.cuda._sleep", _multiply_for)
"""Keeps the current stream busy for so many of the GPU's cycles."""
PLAIN_MODULES = ("torch.nn.parameter.", "torch._subclasses.", "torch.distributed.")
"""The modules of classes of tensors that hold plain numbers, besides `torch`: parameters, what traces see, shards."""
