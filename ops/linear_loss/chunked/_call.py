"""A call of a loss over a vocabulary as one value, its checks, and kernel ops that take such values.

An operator of this family has many options, which its kernel ops, their fakes, sharding strategies and backward passes
all take. A frozen dataclass names them once; its fields become the first arguments of a kernel op, and those
arguments the dataclass again.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from llmk.ops.common.scaling import SavedGradients, save_gradients
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard
from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH
from llmk.registry import LARGEST, KernelOp, autocast_dtype, check_dtype, check_number, check_same, check_shape
from llmk.registry.checks import TINY
from llmk.registry.eager.bypass import PLAIN_TENSORS

DIFFERENTIABLE = ["input", "linear_weight", "linear_bias"]
"""A linear layer's tensors, by their names in a call."""

NOT_SHARDED = VocabShard(first_class=0, num_classes=0, group_name="", dx_group_name="")
"""The arguments of a kernel op for a shard of None: the weight has all classes."""


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """A linear layer over classes, which may be sharded over ranks."""

    input: Tensor  # [..., H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]
    shard: VocabShard | None  # None: the weight has all classes

    @property
    def tokens(self) -> torch.Size:
        return self.input.shape[:-1]

    @property
    def num_classes(self) -> int:
        """The classes of all ranks."""
        return self.linear_weight.shape[0] if self.shard is None else self.shard.num_classes

    @property
    def first_class(self) -> int:
        return 0 if self.shard is None else self.shard.first_class

    @property
    def mean_classes(self) -> int:
        """The mean number of classes on a rank, by which chunks are chosen."""
        return self.linear_weight.shape[0] if self.shard is None else self.shard.mean_classes

    @property
    def dx_dtype(self) -> torch.dtype:
        """float32 where the gradient of the input is summed over ranks before it is rounded."""
        return self.input.dtype if self.shard is None or not self.shard.dx_group_name else torch.float32

    @property
    def saved_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the gradients of input, weight and bias that a forward pass makes and a backward pass scales.

        The weight's is float32 for float16, whose range does not hold it before it is scaled.
        """
        dw = torch.float32 if self.input.dtype == torch.float16 else self.input.dtype
        return [self.dx_dtype, dw, torch.float32]

    def input_gradient(self, dx: Tensor) -> Tensor:
        """Sum the gradient of the input over ranks if needed and return it in the input's dtype."""
        dx = dx if self.shard is None else self.shard.sum_input_gradient(dx)
        return dx.to(self.input.dtype)

    @classmethod
    def names(cls) -> list[str]:
        """Return the call's argument names in a kernel op, without those of its shard, which follow."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "shard"]

    @classmethod
    def checked(cls, **fields: Any) -> Any:
        """Check the linear layer's tensors, cast them under autocast, and return the call."""
        fields |= zip(DIFFERENTIABLE, checked_linear(*(fields[name] for name in DIFFERENTIABLE)), strict=True)
        call = cls(**fields)
        if call.num_classes == 0:  # a rank may have none, not all of them
            raise ValueError(f"linear_weight: expected at least one class, got shape {tuple(call.linear_weight.shape)}")
        return call


def checked_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check that a linear layer's tensors fit each other and return them, cast under autocast."""
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = linear_bias if linear_bias is None else linear_bias.to(dtype)
    check_dtype("input", input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"input: expected shape [..., H] with H at least 1, got {tuple(input.shape)}")
    H = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != H:
        raise ValueError(f"linear_weight: expected shape [V, {H}] to fit input, got {tuple(linear_weight.shape)}")
    check_same("linear_weight", linear_weight, "input", input, dtype=True)
    if linear_bias is not None:
        check_shape("linear_bias", linear_bias, linear_weight.shape[:1], "one for each class")
        check_same("linear_bias", linear_bias, "input", input, dtype=True)
    return input, linear_weight, linear_bias


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 0:
        raise ValueError(f"chunk_size: expected a number of tokens, or 0 to have it chosen, got {chunk_size}")


def check_temperature(temperature: float) -> None:
    check_number("temperature", temperature, TINY, LARGEST, "a finite positive number")


def local_fields(
    fields: dict[str, Any], linears: Sequence[Sequence[str]], others: Sequence[str]
) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """Return a call's fields for this rank, and a function that converts a result for the caller.

    Both are as they were unless the weights are DTensors whose classes are all sharded over one mesh dimension.

    Args:
        fields: The call's fields, among them `shard`, by their names.
        linears: The names of each linear layer's input, weight and bias.
        others: The names of the tensors that are replicated over the mesh dimension.
    """
    if all(type(fields[weight]) in PLAIN_TENSORS for _, weight, _ in linears):
        return fields, lambda result: result
    from llmk.ops.linear_loss.chunked._dtensors import on_this_rank  # which imports torch.distributed.tensor

    return on_this_rank(fields, linears, others)


C = TypeVar("C", bound=LinearCall)


class CallOp(Generic[C]):
    """A kernel op whose first arguments are the fields of `call_type`; the others are those of `run` after the call.

    Args:
        name: The op's name.
        call_type: The dataclass.
        run: `run(impl, call, *rest)` computes it with an `Implementation`; rest is annotated, as for a schema.
        outputs: The number of tensors it returns.
        fake: `fake(call, *rest)` gives outputs like those of `run`.
        products: `products(call, *rest)` counts the products of input and weight, or of equal cost.
    """

    def __init__(
        self,
        name: str,
        call_type: type[C],
        run: Callable[..., Any],
        *,
        outputs: int,
        fake: Callable[..., Any],
        products: Callable[..., float],
    ) -> None:
        self.call_type, self.names = call_type, call_type.names()
        self.fields = len(self.names) + len(NOT_SHARDED)

        def launch(*args: Any) -> Any:
            return run(KERNELS, *self.unpack(args))

        launch.__module__ = call_type.__module__
        launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            self._parameters(run), return_annotation=tuple[(Tensor,) * outputs]
        )
        # The number of launches depends on sizes: inlined, each would need a graph of its own.
        self.op = KernelOp(launch, name=name, opaque=True)
        self.op.register_kernel("cpu")(lambda *args: run(PYTORCH, *self.unpack(args)))
        self.op.register_fake(lambda *args: fake(*self.unpack(args)))

        def flops(*args: Any, out_val: Any = None) -> int:
            call, *rest = self.unpack(args)
            return int(product_flops(call.input, call.linear_weight) * products(call, *rest))

        self.op.register_flop_formula(flops)

    def _parameters(self, run: Callable[..., Any]) -> list[inspect.Parameter]:
        types = {field.name: field.type for field in dataclasses.fields(self.call_type)}
        own = {name: types[name] for name in self.names} | VocabShard.__annotations__
        return [
            *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=own[name]) for name in own),
            *(p for p in list(inspect.signature(run).parameters.values())[2:] if p.kind is p.POSITIONAL_OR_KEYWORD),
        ]

    def unpack(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the call and the arguments after it."""
        fields = dict(zip(self.names, args, strict=False))
        return self.call_type(**fields, shard=self._shard(args)), *args[self.fields :]

    def _shard(self, args: Sequence[Any]) -> VocabShard | None:
        shard = VocabShard(*args[len(self.names) : self.fields])
        return shard if shard.num_classes else None

    def __call__(self, call: C, *rest: Any) -> Any:
        return self.op(*(getattr(call, name) for name in self.names), *(call.shard or NOT_SHARDED), *rest)

    def save_call(self, ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
        """In a `setup_context`: save the call, whose first fields are its tensors, and some results."""
        tensors = [isinstance(value, Tensor | None) for value in inputs].index(False)
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *results)

    def saved_call(self, ctx: Any) -> tuple[C, tuple[Tensor, ...]]:
        """In a backward formula: the call that was saved, and the results."""
        tensors = self.fields - len(ctx.options)
        saved = ctx.saved_tensors  # once: under a checkpoint they are computed again, and given only once
        return self.unpack((*saved[:tensors], *ctx.options))[0], saved[tensors:]

    def differentiate_by_scaling(self, scale: KernelOp, is_total: Callable[[Any], bool], constants: int = 0) -> None:
        """Register the derivative of an op whose forward pass makes the gradients of input, weight and bias.

        It returns its loss, `constants` results without gradients, a denominator and the three gradients.

        Args:
            scale: Multiplies by the incoming gradient and divides by the denominator.
            is_total: Returns True if the argument before the three flags asks for a total. The caller divides it by the
                denominator: its gradient is that of a sum.
            constants: The number of results without gradients after the loss.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            denominator, *gradients = output[-4:]
            ctx.dtype, ctx.shard, ctx.arguments = inputs[0].dtype, self._shard(inputs), len(inputs)
            save_gradients(ctx, None if is_total(inputs[-4]) else denominator, *gradients)

        def scale_saved(ctx: Any, grad: Tensor, *constants: Tensor) -> Any:
            saved = SavedGradients(ctx, grad, scale)
            need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
            dx = saved.times(0) if need_dx else None
            if dx is not None and ctx.shard is not None:
                dx = ctx.shard.sum_input_gradient(dx)
            return (
                dx if dx is None else dx.to(ctx.dtype),
                saved.times(1, ctx.dtype) if need_dw else None,
                saved.times(2, ctx.dtype) if need_db else None,
                *[None] * (ctx.arguments - 3),
            )

        self.op.register_autograd(
            scale_saved,
            setup_context=save,
            depends_on=[DIFFERENTIABLE, *[[]] * constants],
            keeps=lambda needs_input_grad, args: needs_input_grad[:3],
        )


def fake_loss(call: LinearCall, reduction: Any, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return fakes of a loss, a denominator and the gradients of input, weight and bias that a backward pass scales."""
    loss, denominator = (call.input.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, denominator, *fake_gradients(call, need, call.saved_dtypes)


def fake_gradients(
    call: LinearCall, need: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fakes of the gradients of input, weight and bias, empty where one is not needed."""
    shapes = [call.input.shape, call.linear_weight.shape, call.linear_weight.shape[:1]]
    dx, dw, db = (
        call.input.new_empty(shape if wanted else (0,), dtype=dtype)
        for shape, wanted, dtype in zip(shapes, need, dtypes, strict=True)
    )
    return dx, dw, db


def product_flops(input: Tensor, linear_weight: Tensor) -> int:
    """Count the FLOPs of one product of the input with the weight."""
    return 2 * math.prod(input.shape) * linear_weight.shape[0]
