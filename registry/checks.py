"""Checks of a public operator's arguments: each names the argument, what it was and what was expected."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from llmk.registry.private.processes import group_named
from llmk.registry.record import FLOAT_DTYPES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PACKAGE = __name__.removesuffix(".registry.checks")


def _dtypes(dtypes: Sequence[object]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[object] = FLOAT_DTYPES) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name}: expected a tensor of dtype {_dtypes(allowed)}, got {_dtypes([tensor.dtype])}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Floating-point numbers of any dtype, for compositions of PyTorch's operations."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected floating-point numbers, got {_dtypes([tensor.dtype])}")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor, *, dtype: bool = False) -> None:
    """`tensor` must be on the device of `other`, and have its dtype if asked."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected it on {other.device} like {other_name}, got {tensor.device}")
    if dtype and tensor.dtype != other.dtype:
        raise TypeError(
            f"{name}: expected dtype {_dtypes([other.dtype])} like {other_name}, got {_dtypes([tensor.dtype])}"
        )


def check_shape(name: str, tensor: Tensor, expected: Sequence[int], meaning: str) -> None:
    if tensor.shape != expected and tuple(tensor.shape) != tuple(expected):  # a list equals no shape
        raise ValueError(f"{name}: expected shape {tuple(expected)} ({meaning}), got {tuple(tensor.shape)}")


def check_rows(name: str, tensor: Tensor, columns: str) -> None:
    """Floating-point numbers with an axis of rows, none of them empty; `columns` is the letter of its length."""
    check_dtype(name, tensor)
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        shape = f"[..., {columns}] with {columns} at least 1"
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """`tensor` must have the shape, the device and the dtype of `other`."""
    check_shape(name, tensor, other.shape, f"the shape of {other_name}")
    check_same(name, tensor, other_name, other, dtype=True)


def check_parameter(
    name: str, tensor: Tensor | None, expected: Sequence[int], meaning: str, other_name: str, other: Tensor,
    dtypes: Sequence[object] = FLOAT_DTYPES,
) -> None:  # fmt: skip
    """Numbers of a shape on the device of `other`, or None."""
    if tensor is not None:
        check_dtype(name, tensor, dtypes)
        check_shape(name, tensor, expected, meaning)
        check_same(name, tensor, other_name, other)


def check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def resolve_group(argument: str, name: str) -> "ProcessGroup":
    """Return the process group of this name."""
    try:
        return group_named(name)
    except RuntimeError:
        raise ValueError(f"{argument}: expected the name of a process group of this process, got {name!r}") from None


LARGEST: float = torch.finfo(torch.float32).max
"""Kernels compute in float32: what it does not hold is infinite, and what is below TINY may become 0."""
TINY: float = torch.finfo(torch.float32).tiny


_NUMBERS: tuple[Any, ...] = (float, int, Real, torch.SymInt, torch.SymFloat)
"""What a number is; asking for an abstract class takes longer, and so comes after what most are."""


def check_number(name: str, value: Any, low: float, high: float, expected: str) -> None:
    """`expected` says in words what the limits, both allowed, mean; NaN is never within them."""
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {expected}, got {value}")


def check_size(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """A size, a number of something or an index: an int, no bool, within the limits."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}")
    size = operator.index(value)
    if size < least or (most is not None and size > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {expected}, got {value}")


check_not_negative: Callable[[str, Any], None] = partial(
    check_number, low=0.0, high=LARGEST, expected="a finite number of at least 0"
)
check_positive: Callable[[str, Any], None] = partial(
    check_number, low=TINY, high=LARGEST, expected="a finite positive number"
)
check_finite: Callable[[str, Any], None] = partial(check_number, low=-LARGEST, high=LARGEST, expected="a finite number")


def check_integer(name: str, value: Any, expected: str) -> None:
    if not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | torch.SymBool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_switch(name: str, value: float) -> None:
    """Check a number of which 0 means that it is not used."""
    if isinstance(value, Tensor) or value != 0.0:
        check_number(name, value, TINY, LARGEST, "0 (off) or a finite positive number")


def check_home(fn: Callable[..., Any]) -> None:
    """An operator lives under llmk.ops: `import ops` at the root finds the folder, and would register it twice."""
    if not fn.__module__.startswith(f"{PACKAGE}.ops."):
        raise RuntimeError(
            f"{fn.__name__} comes from module {fn.__module__!r}: llmk's operators live under llmk.ops "
            "(import llmk, not its folders; for an operator of your own, build an llmk.registry.Op)"
        )
