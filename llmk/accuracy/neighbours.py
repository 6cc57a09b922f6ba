"""Inputs near others, on which a composition's error is measured too, and inputs in float64."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

NEIGHBOURS = 8
"""Inputs near one on which a composition's error is measured too; opcheck takes twice as many, and as many far ones."""
FAR = torch.finfo(torch.bfloat16).eps
"""The relative distance of the far inputs, which rounds every number anew, also a float32 difference of 2^-16."""

Change = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def with_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype inside, the caller's again after."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def copy_with_layout(tensor: Tensor) -> Tensor:
    """A copy with its own memory and the same strides and offset, gaps and overlaps included."""
    storage = tensor.untyped_storage().clone()
    return tensor.detach().new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def to_float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128)
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()


def nudged(seed: int, dtype: torch.dtype | None = None, by: float | None = None) -> Change:
    """Return a function that moves every element by one unit in its last place, or by such a part of it, up or down.

    A part that is less than a unit needs a wider `dtype` for the result.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return copy_with_layout(tensor)
        copy, memory = copy_to_move(tensor, dtype, by)
        signs = 2 * torch.randint(0, 2, memory.shape, generator=generator, device="cpu").to(memory.device) - 1
        move(memory, signs, by)
        return copy if dtype is None else copy.to(dtype)

    return change


def copy_to_move(tensor: Tensor, dtype: torch.dtype | None, by: float | None) -> tuple[Tensor, Tensor]:
    """Return a copy and its memory, in a wider dtype already where the tensor's own does not hold such a move."""
    copy = copy_with_layout(tensor)
    if dtype is not None and by is not None and by < torch.finfo(copy.dtype).eps:
        copy = copy.to(dtype)
    return copy, copy.new_empty(0).set_(copy.untyped_storage())


def move(memory: Tensor, signs: Tensor, by: float | None) -> None:
    """Move every number by so large a part of it, in the direction of its sign; a finite one stays finite."""
    info = torch.finfo(memory.dtype)
    # In float32 a step of less than 2^-24 would be none.
    moved = memory.double() * (1 + signs.double() * (by or info.eps))
    memory.copy_(torch.where(memory.isfinite(), moved.clamp(info.min, info.max), moved))
