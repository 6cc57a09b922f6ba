"""A call of a loss over a vocabulary as one value, and kernel ops that take such values.

An operator of this family has many options, which its kernel ops, their fakes, their rules of sharding and their
backward passes all take. A frozen dataclass says once what a call is; here its fields become the first arguments of a
kernel op, and those arguments the dataclass again.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from llmk.registry import KernelOp


@dataclass(frozen=True)
class LinearCall:
    """What every call has: a linear layer over classes."""

    input: Tensor  # [..., H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]

    @property
    def tokens(self) -> torch.Size:
        return self.input.shape[:-1]

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    def arguments(self) -> tuple[Any, ...]:
        """The fields' values, in their order: not a copy, as `dataclasses.astuple` makes."""
        return tuple(getattr(self, name) for name in self.names())


C = TypeVar("C", bound=LinearCall)


class CallOp(Generic[C]):
    """A kernel op whose first arguments are the fields of `call_type`; the others are those of `run` after the call.

    Args:
        name: Of the op.
        call_type: The dataclass.
        run: `run(rows, call, *rest)` computes it with the row functions `rows`; rest is annotated, as for a schema.
        kernels: The row functions on a GPU.
        cpu: Those in plain PyTorch.
        fake: `fake(call, *rest)` gives outputs like those of `run`.
        products: `products(call, *rest)`, how often the input is multiplied with the weight, or what takes as long.
    """

    def __init__(
        self,
        name: str,
        call_type: type[C],
        run: Callable[..., Any],
        *,
        kernels: Any,
        cpu: Any,
        fake: Callable[..., Any],
        products: Callable[..., float],
    ) -> None:
        self.call_type = call_type
        self.fields = len(call_type.names())
        parameters = list(inspect.signature(run).parameters.values())[2:]
        of_call = [
            inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=field.type)
            for field in dataclasses.fields(call_type)
        ]

        def launch(*args: Any) -> Any:
            return run(kernels, *self.unpacked(args))

        launch.__module__ = run.__module__
        launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*of_call, *parameters], return_annotation=inspect.signature(run).return_annotation
        )
        # The number of launches depends on sizes: inlined, each would need a graph of its own.
        self.op = KernelOp(launch, name=name, opaque=True)
        self.op.register_kernel("cpu")(lambda *args: run(cpu, *self.unpacked(args)))
        self.op.register_fake(lambda *args: fake(*self.unpacked(args)))

        def flops(*args: Any, out_val: Any = None) -> int:
            call, *rest = self.unpacked(args)
            return int(product_flops(call.input, call.linear_weight) * products(call, *rest))

        self.op.register_flop_formula(flops)

    def unpacked(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The call, and the arguments after it."""
        return self.call_type(*args[: self.fields]), *args[self.fields :]

    def __call__(self, call: C, *rest: Any) -> Any:
        return self.op(*call.arguments(), *rest)


def saved_dtypes(dtype: torch.dtype, dx_group_name: str) -> list[torch.dtype]:
    """Of the gradients of input, weight and bias before they are scaled, and dx summed over a group if it has a name.

    Of float16 the weight's is float32: before it is scaled, float16's range does not hold it.
    """
    dw = torch.float32 if dtype == torch.float16 else dtype
    return [torch.float32 if dx_group_name else dtype, dw, torch.float32]


def fake_gradients(
    call: LinearCall, need: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the input, the weight and the bias: empty where it is not needed."""
    shapes = [call.input.shape, call.linear_weight.shape, call.linear_weight.shape[:1]]
    dx, dw, db = (
        call.input.new_empty(shape if wanted else (0,), dtype=dtype)
        for shape, wanted, dtype in zip(shapes, need, dtypes, strict=True)
    )
    return dx, dw, db


def product_flops(input: Tensor, linear_weight: Tensor) -> int:
    """Of one product of the input with the weight."""
    return 2 * math.prod(input.shape) * linear_weight.shape[0]
