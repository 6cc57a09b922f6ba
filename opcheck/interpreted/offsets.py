"""Finds offsets of a kernel that could outgrow 32 bits, with small tensors in Triton's interpreter.

A product of a program's number and a number given to the kernel, such as a row's stride, is right on a small tensor
whatever its width. So integers carry what they were made of, and a pointer refuses a product that was taken in 32 bits.
The interpreter's loops give Python's integers, which have no width: here they have the width that a GPU's would have.
"""

import builtins
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl

PROGRAM, NUMBER, PRODUCT = "program", "number", "product"


class Traced(np.ndarray):
    """Integers that remember whether a program's number, an argument or a 32-bit product of both went into them."""

    origins: frozenset[str] = frozenset()

    def __array_finalize__(self, source: Any) -> None:
        self.origins = getattr(source, "origins", frozenset())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, Traced) else value for value in inputs]
        if out is not None:
            options["out"] = tuple(np.asarray(value) if isinstance(value, Traced) else value for value in out)
        result = getattr(ufunc, method)(*plain, **options)
        if method != "__call__" or not isinstance(result, np.ndarray) or result.dtype.kind not in "iu":
            return result
        each = [getattr(value, "origins", frozenset()) for value in inputs]
        return traced(result, _origins(ufunc, each, result.dtype))


def _origins(ufunc: Any, each: list[frozenset[str]], dtype: np.dtype) -> frozenset[str]:
    origins = frozenset[str]().union(*each)
    if ufunc in (np.fmod, np.remainder):  # counts within a row, however many programs there are
        return origins - {PROGRAM}
    if ufunc is not np.multiply:
        return origins
    origins -= {PRODUCT}  # what is multiplied again was an index; the new product is the offset
    split = any(PROGRAM in a and NUMBER in b for a, b in (each, each[::-1]))
    return origins | {PRODUCT} if split and dtype.itemsize == 4 else origins


def traced(data: np.ndarray, origins: frozenset[str]) -> np.ndarray:
    """The same integers, with what they were made of."""
    if not origins:
        return data
    data = data.view(Traced)
    data.origins = origins  # type: ignore[attr-defined]
    return data


def origins_of(data: np.ndarray) -> frozenset[str]:
    return getattr(data, "origins", frozenset())


def typed_range(*bounds: Any, **options: Any) -> Iterator[Any]:
    """`range` and `tl.range` of a kernel, with indices of the bounds' own width; plain where none is the kernel's."""
    bounds += tuple(options[name] for name in ("arg1", "arg2", "step") if options.get(name) is not None)
    handles = [bound.handle for bound in bounds if isinstance(bound, tl.tensor)]
    plain = builtins.range(*map(operator.index, bounds))
    if not handles:
        return iter(plain)
    kind = tl.int64 if any(handle.data.itemsize == 8 for handle in handles) else tl.int32
    origins = frozenset[str]().union(*(origins_of(handle.data) for handle in handles)) - {PRODUCT}

    def scalar(value: int) -> Any:
        data = np.array([value], dtype=np.int64 if kind == tl.int64 else np.int32)
        return tl.tensor(type(handles[0])(traced(data, origins), kind), kind)

    return map(scalar, plain)
