"""Roundings within a formula: what its operations lose in numbers that cancel.

An error bound of the inputs' rounding alone is 0 where a result does not depend on the inputs. The gradient of a query
that sees one key is such a result: a difference of two equal sums, which two orders of summing round to 0 or to 1e-8.
"""

from typing import Any

import torch
from torch import Tensor

from llmk.registry.private.operators import schema_of
from llmk.registry.private.tensors import DispatchMode

_MOVES = (
    "clone", "_to_copy", "copy_", "fill_", "masked_fill", "masked_fill_", "where", "cat", "stack", "gather", "index",
    "index_select", "embedding", "flip", "constant_pad_nd", "scatter", "slice_scatter", "select_backward",
    "slice_backward",
)  # fmt: skip
_DECIDES = (
    "floor", "ceil", "trunc", "round", "sign", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite",
    "bucketize", "searchsorted", "argmax", "argmin", "argsort",
)  # fmt: skip
_EXACT = frozenset(_MOVES + _DECIDES)
"""Operations that round nothing: they move numbers, or decide by them."""


class Roundings(DispatchMode):
    """Gives each operation numbers moved by a unit in the last place of a dtype, up or down by chance.

    The result of a sum or product then moves as far as its own roundings may move it, of terms that cancel too.
    """

    def __init__(self, seed: int, unit: float) -> None:
        super().__init__()
        self.generator, self.unit = torch.Generator().manual_seed(seed), unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = schema_of(func), kwargs or {}
        is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
        if is_view or schema.name.removeprefix("aten::") in _EXACT:
            return func(*args, **kwargs)
        written = {argument.name for argument in schema.arguments if argument.alias_info}
        names = [argument.name for argument in schema.arguments]
        args = [arg if name in written else self._moved(arg) for name, arg in zip(names, args, strict=False)]
        return func(*args, **{name: arg if name in written else self._moved(arg) for name, arg in kwargs.items()})

    def _moved(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._moved(item) for item in value]
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        signs = 2 * torch.randint(0, 2, value.shape, generator=self.generator, device="cpu") - 1
        return value * (1 + self.unit * signs.to(value.device, value.dtype))
