"""Roundings within a formula: what its operations lose in numbers that cancel.

An error bound of the inputs' rounding alone is 0 where a result does not depend on the inputs. The gradient of a query
that sees one key is such a result: a difference of two equal sums, which two orders of summing round to 0 or to 1e-8.

One formula's roundings do not bound another's either. The backward pass of a softmax needs the sum of p * (g @ v) over
the keys, which attention kernels take from g @ (p @ v), a number that they have. Where one key has nearly all the
weight, all but what either sum loses cancels. So an error is followed through the formula with nothing taken to cancel:
each use of a number is of another rounding of it, as if whoever uses it had computed it in an order of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.foreign.adapters import tensors_in
from llmk.opcheck.inputs import mapped
from llmk.registry.private.operators import schema_of
from llmk.registry.private.tensors import DispatchMode

_MOVES = (
    "clone", "_to_copy", "copy_", "fill_", "masked_fill", "masked_fill_", "where", "cat", "stack", "gather", "index",
    "index_select", "embedding", "flip", "constant_pad_nd", "scatter", "slice_scatter", "select_scatter",
    "_unsafe_view",
)  # fmt: skip
"""Operations that round nothing: they move numbers."""
_DECIDES = (
    "floor", "ceil", "trunc", "round", "sign", "bucketize", "searchsorted", "argmax", "argmin", "argsort", "zeros_like",
    "ones_like", "full_like",
)  # fmt: skip
"""Operations whose results have no error: they decide by numbers, or look at the shape alone."""
_DRAWS = 8


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    """PyTorch's formulas of gradients that are one operation, as several of which each rounds once."""
    table = torch.export.default_decompositions().items()
    return {operation: formula for operation, formula in table if "_backward" in operation.name()}


class Roundings(DispatchMode):
    """Knows the error of every number that is computed inside, the root mean square.

    The error of a result is what it moves by where each of its numbers moves by its own, up or down by chance, and one
    unit in the last place of a dtype for the operation. Numbers that were not computed have a unit too. All errors are
    in proportion to the unit, of which a rounding is a part.
    """

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.generator, self.unit = torch.Generator().manual_seed(0), unit
        self._errors: dict[tuple[int, torch.dtype], tuple[torch.UntypedStorage, Tensor]] = {}

    def error_of(self, tensor: Tensor) -> Tensor:
        """The errors of a tensor's elements, a view of those of all of its memory."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), tensor.dtype
        if place not in self._errors:  # the storage is kept, so that no other has its address
            self._errors[place] = storage, tensor.new_empty(0).set_(storage).abs() * self.unit
        errors = self._errors[place][1].untyped_storage()
        return tensor.new_empty(0).set_(errors, tensor.storage_offset(), tensor.size(), tensor.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = schema_of(func), kwargs or {}
        is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
        if is_view or not _floating([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        formula = _formulas().get(func)
        if formula is not None:
            with self:
                return formula(*args, **kwargs)
        name = schema.name.removeprefix("aten::")
        is_known = name in _DECIDES or torch.Tag.nondeterministic_seeded in func.tags
        moved = [] if is_known else [self._results_of_moved(func, args, kwargs) for _ in range(_DRAWS)]
        results = func(*args, **kwargs)
        for place, result in enumerate(_floating(results)):
            squares = [(draw[place] - result).square() for draw in moved] or [torch.zeros_like(result)]
            own = 0.0 if name in _MOVES + _DECIDES else self.unit
            error = (torch.stack(squares).mean(0) + (own * result).square()).sqrt()
            self.error_of(result).copy_(error.nan_to_num(0.0, posinf=0.0))
        return results

    def _results_of_moved(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        return _floating(func(*mapped(self._moved, args), **mapped(self._moved, kwargs)))

    def _moved(self, tensor: Tensor) -> Tensor:
        if not _has_arithmetic(tensor):
            return tensor
        signs = 2 * torch.randint(0, 2, tensor.shape, generator=self.generator, device="cpu") - 1
        return tensor + signs.to(tensor.device, tensor.dtype) * self.error_of(tensor)


def _floating(values: Any) -> list[Tensor]:
    """The tensors among values that have arithmetic."""
    return [tensor for tensor in tensors_in(values) if _has_arithmetic(tensor)]


def _has_arithmetic(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1
