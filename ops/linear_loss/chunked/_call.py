"""A call of a loss over a linear layer as one value, and its kernel ops."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from llmk.ops.common.scaling import SavedGradients, save_gradients, scale_op
from llmk.ops.linear_loss.chunked._compacted import CompactedTokens
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard, VocabSlice
from llmk.ops.linear_loss.chunked.plan import Plan, plan
from llmk.ops.linear_loss.head import CHECKS, DIFFERENTIABLE, LINEAR, checked_linear
from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH, Implementation
from llmk.registry import CallOp, FromArguments, KernelOp, is_sharded
from llmk.registry.checks import resolve_group
from llmk.registry.devices import runs_kernels
from llmk.registry.eager.bypass import PLAIN_TENSORS


@dataclass(frozen=True, kw_only=True)
class LinearCall(FromArguments):
    """A linear layer over classes, which may be sharded over ranks, and the tokens that count."""

    token_tensors: ClassVar[tuple[str, ...]] = ("input",)
    """The names of the tensors with a row for each token, which may be None, and of lists of them."""
    input: Tensor  # [..., H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]
    float32_logits: bool  # else they have the input's dtype
    skip_ignored: bool = False  # do no work for tokens that do not count
    chunk_size: int  # 0: chosen
    shard: VocabShard | None = None  # None: the weight has all classes

    def mask(self) -> Tensor:
        """Return the mask of the tokens that count, `[...]`."""
        raise NotImplementedError

    def can_compact(self, impl: Implementation) -> bool:
        """Return True if the tokens that do not count are skipped: torch's float32 products have no count on a GPU."""
        return self.skip_ignored and (impl.on_host or self.input.dtype != torch.float32)

    def compacted(self, impl: Implementation, segment: int | None = None) -> tuple[CompactedTokens, Self]:
        """Return the tokens that the loss is computed for, and the call for these: see `CompactedTokens.of`."""
        if not self.can_compact(impl):
            return CompactedTokens(tuple(self.tokens)), self
        compacted, gathered = CompactedTokens.of(self.mask(), on_host=impl.on_host, segment=segment), {}
        gather = Tensor.contiguous if compacted.index is None else compacted.gather
        for name in self.token_tensors:
            value = getattr(self, name)
            if value is None:
                continue
            found = [gather(each) for each in value] if isinstance(value, list) else gather(value)
            if found is not value:
                gathered[name] = found
        return compacted, self.of(vars(self), **gathered) if gathered else self

    def plan(self, impl: Implementation, **options: int) -> Plan:
        """Return the plan, given the `group` or the `matrices` of `plan`."""
        sizes = self.tokens.numel(), self.input.shape[-1], self.mean_classes
        return plan(sizes, self.input.dtype, on_host=impl.on_host, chunk_size=self.chunk_size, **options)

    @cached_property
    def tokens(self) -> torch.Size:
        return self.input.shape[:-1]

    @property
    def own_shard(self) -> VocabShard:
        """This rank's classes, all of them where the weight is no shard."""
        return self.shard or VocabShard(0, self.linear_weight.shape[0], group_name="", dx_group_name="")

    @property
    def num_classes(self) -> int:
        """The classes of all ranks."""
        return self.linear_weight.shape[0] if self.shard is None else self.shard.num_classes

    @property
    def mean_classes(self) -> int:
        return self.linear_weight.shape[0] if self.shard is None else self.shard.mean_classes

    @property
    def first_class(self) -> int:
        return 0 if self.shard is None else self.shard.first_class

    @property
    def saved_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes of the gradients of input, weight and bias that a forward pass makes and a backward pass scales.

        They are float32 for float16, whose range does not hold them before they are scaled.
        """
        if self.input.dtype == torch.float16:
            return torch.float32, torch.float32, torch.float32
        return self.dx_dtype, self.input.dtype, torch.float32

    @property
    def recomputed_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The same of gradients that a backward pass makes."""
        return self.dx_dtype, self.input.dtype, self.input.dtype

    @property
    def dx_dtype(self) -> torch.dtype:
        """The dtype of the input's gradient: float32 where it is summed over ranks before it is rounded."""
        return self.input.dtype if self.shard is None or not self.shard.dx_group_name else torch.float32

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        """Check the projection of a public operator's arguments, cast it under autocast, and return their call.

        The options are those that the operator has; which classes the ranks have is checked with the process group.
        """
        linear = checked_linear(*LINEAR(arguments))
        dtype, asked_for = linear[0].dtype, arguments.get("logits_dtype")
        if asked_for not in (None, torch.float32, dtype):
            raise TypeError(f"logits_dtype: expected None, torch.float32 or {dtype} as input, got {asked_for}")
        for name, check in CHECKS.items():
            if name in arguments:
                check(name, arguments[name])
        cast = dict(zip(DIFFERENTIABLE, linear, strict=True))
        call = cls.of(arguments, **cast, float32_logits=asked_for in (None, torch.float32))
        own = call.linear_weight.shape[0]
        first, num_classes = (0, own) if call.shard is None else call.shard[:2]
        if first < 0:
            raise ValueError(f"vocab_start: expected a class, 0 or more, got {first}")
        if first + own > num_classes:
            raise ValueError(
                f"num_classes: expected at least vocab_start {first} and the {own} classes of linear_weight, "
                f"got {num_classes}"
            )
        if num_classes == 0:  # a rank may have none, not all of them
            raise ValueError(f"linear_weight: expected at least one class, got shape {tuple(call.linear_weight.shape)}")
        return call


def local_fields(
    fields: Mapping[str, Any], linears: Sequence[Sequence[str]], others: Sequence[str]
) -> tuple[Mapping[str, Any], Callable[[Tensor], Tensor], bool]:
    """Return the arguments for this rank, a function that converts a result for the caller, and if any is a DTensor.

    Arguments and results are as given unless the weights are DTensors with all classes sharded over one mesh dimension.

    Args:
        fields: The arguments by their names.
        linears: The names of each linear layer's input, weight and bias.
        others: The names of the tensors that are replicated over the mesh dimension.
    """
    for _, weight, _ in linears:
        if type(fields[weight]) not in PLAIN_TENSORS:
            from llmk.ops.linear_loss.chunked._dtensors import on_this_rank  # which imports torch.distributed.tensor

            return on_this_rank(fields, linears, others)
    return fields, lambda result: result, False


SLICE = itemgetter(*VocabSlice.__annotations__)


def with_shard(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments with the `shard` that they say; it is None where no group is named."""
    first, num_classes, group_name = SLICE(arguments)
    shard, (input, linear_weight, _) = None, LINEAR(arguments)
    if group_name:
        if is_sharded(input, linear_weight):
            raise ValueError(
                f"group_name: expected '' for DTensors, which say who has which classes, got {group_name!r}"
            )
        resolve_group("group_name", group_name)
        shard = VocabShard(first, num_classes, group_name, dx_group_name=group_name)
    elif (first, num_classes) not in ((0, 0), (0, *linear_weight.shape[:1])):
        raise ValueError(
            f"group_name: expected one for the classes that are not among the {linear_weight.shape[0]} of "
            f"linear_weight, with vocab_start {first} and num_classes {num_classes}, got ''"
        )
    return {**arguments, "shard": shard}


C = TypeVar("C", bound=LinearCall)


class LinearOp(CallOp[C]):
    """A `CallOp` of a linear layer and what is computed of its outputs, and the derivatives of such.

    Args:
        name: The op's name.
        call_type: The dataclass.
        run: `run(impl, call, *rest)` computes it with an `Implementation`; rest is annotated, as for a schema.
        outputs: The number of tensors it returns.
        fake: `fake(call, *rest)` gives outputs like those of `run`.
        products: `products(impl, call, *rest)` counts the products of input and weight, or of equal cost.
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
        def flops(call: C, *rest: Any) -> int:
            impl = KERNELS if runs_kernels(name, call.input) else PYTORCH
            return int(product_flops(call.input, call.linear_weight) * products(impl, call, *rest))

        on_host = partial(run, PYTORCH)
        super().__init__(
            name, call_type, partial(run, KERNELS), on_host=on_host, outputs=outputs, fake=fake, flops=flops
        )

    def recomputed_gradients(self, ctx: Any, backward: "LinearOp[C]", *grads: Tensor | None) -> Any:
        """Return the arguments' gradients in a backward formula, by `backward(call, *grads, *results, *need)`."""
        call, results = self.saved_call(ctx)
        ctx.dtype, ctx.shard = call.input.dtype, call.shard
        return _argument_gradients(ctx, *backward(call, *grads, *results, *ctx.needs_input_grad[:3]))

    def save_gradients(
        self,
        ctx: Any,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, ...],
        counted: tuple[Tensor | None, int] = (None, 0),
    ) -> None:
        """Save the gradients that the forward pass made, the last three of the outputs, in a `setup_context`.

        Labels `[...]` of tokens may be given, all of which count but those with an index.
        """
        given = inputs[self._optional["shard"].places]
        ctx.dtype, ctx.shard = inputs[0].dtype, VocabShard(*given) if any(given) else None
        save_gradients(ctx, *output[-3:], counted=counted)

    def scaled_gradients(self, ctx: Any, scale: KernelOp, grad: Tensor) -> Any:
        """Return the arguments' gradients in a backward formula: those saved, scaled by `scale`."""
        saved, (need_dx, need_dw, need_db) = SavedGradients(ctx, grad, scale), ctx.needs_input_grad[:3]
        is_summed = ctx.shard is not None and ctx.shard.dx_group_name  # over ranks, in float32, which it is in
        dx = saved.times(0, None if is_summed else ctx.dtype, of_tokens=True) if need_dx else None
        dw = saved.times(1, ctx.dtype) if need_dw else None
        return _argument_gradients(ctx, dx, dw, saved.times(2, ctx.dtype) if need_db else None)

    def differentiate_by_scaling(self) -> tuple[KernelOp, KernelOp]:
        """Register the derivative of an op whose forward pass makes the gradients of input, weight and bias.

        It returns a loss, results without gradients, and lastly the three gradients, which another op multiplies by
        the incoming one. Both are returned.
        """
        scale = scale_op(f"{self.op.name.removesuffix('_fwd')}_scale")
        self.op.register_autograd(
            lambda ctx, grad, *_: self.scaled_gradients(ctx, scale, grad),
            setup_context=self.save_gradients,
            depends_on=[DIFFERENTIABLE, [], []],
            takes_none=True,
            keeps=lambda needs_input_grad, args: needs_input_grad[:3],
        )
        return self.op, scale


def _argument_gradients(ctx: Any, dx: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Any:
    """Return a gradient or None for each argument; that of the input is summed over ranks and rounded once."""
    need_dx, need_dw, need_db, *others = ctx.needs_input_grad
    if need_dx and dx is not None:
        dx = (dx if ctx.shard is None else ctx.shard.sum_input_gradient(dx)).to(ctx.dtype)
    return dx if need_dx else None, dw if need_dw else None, db if need_db else None, *[None] * len(others)


def recomputing_op(
    name: str, call_type: type[C], run: Callable[..., Any], *, kept: Callable[..., bool] | None = None
) -> LinearOp[C]:
    """Return the op `run(impl, call, ..., need_dx, need_dw, need_db)` of a backward pass that recomputes the logits.

    It does not where `kept(call, ...)` says that the forward pass kept what it needs.
    """

    def products(impl: Implementation, call: C, *rest: Any) -> int:
        return 1 - (kept is not None and kept(call, *rest)) + rest[-3] + rest[-2]

    return LinearOp(
        name,
        call_type,
        run,
        outputs=3,
        fake=lambda call, *rest: fake_gradients(call, rest[-3:], call.recomputed_dtypes),
        products=products,
    )


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
