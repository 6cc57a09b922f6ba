"""A linear layer over classes, a few tokens at a time, and a call of a loss over it as one value.

The products are cuBLAS's (or the CPU's BLAS), chosen in size by `_plan.py`. The logits are float32, as the tensor cores
made them, unless the input's dtype was asked for; their gradient is rounded once, to the dtype in which it is
multiplied. Where only the first rows count, and only the device knows how many, the products stop there
(`_dynamic_rows.py`).

A loss has many options, which its kernel ops, their fakes, sharding strategies and backward passes all take. A frozen
dataclass names them once; its fields become the first arguments of a kernel op, and those arguments the dataclass
again.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from llmk.ops.common.scaling import SavedGradients, save_gradients
from llmk.ops.linear_loss.chunked._dynamic_rows import (
    add_where_any,
    can_group,
    float32_outputs,
    input_gradient,
    outputs,
    weight_gradient,
)
from llmk.ops.linear_loss.chunked._plan import Plan, plan
from llmk.ops.linear_loss.chunked._vocab_shard import NOT_SHARDED, VocabShard
from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH, Implementation
from llmk.registry import (
    LARGEST,
    KernelOp,
    autocast_dtype,
    cdiv,
    check_dtype,
    check_number,
    check_same,
    check_shape,
)
from llmk.registry.backends import runs_kernels
from llmk.registry.checks import TINY
from llmk.registry.eager.bypass import PLAIN_TENSORS

ALIGNED = 16
"""The row stride of a chunk's logits is a multiple of this many elements, whatever V is."""


@dataclass(frozen=True)
class CompactedTokens:
    """The tokens that a loss is computed for, out of N tokens `[...]`: all of them, or those that count in their order.

    Where the host knows their number n only they are gathered, and `count` is None. On a GPU, where the host would have
    to wait for it, the others follow them: n is N, and `count`, int32 `[]`, is the number that count.
    """

    shape: tuple[int, ...]
    index: Tensor | None = None  # [n], None for all tokens
    count: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor, *, on_host: bool) -> "CompactedTokens":
        """Compact tokens `[...]` by the mask of those that count."""
        shape, mask = tuple(mask.shape), mask.reshape(-1)
        if on_host:
            return cls(shape, mask.nonzero().squeeze(-1))
        order = mask.logical_not().to(torch.uint8).argsort(stable=True)
        return cls(shape, order, mask.sum(dtype=torch.int32))

    def gather(self, x: Tensor) -> Tensor:
        """Gather the rows of `[..., *rest]` of these tokens: `[n, *rest]`."""
        rows = x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])
        return rows if self.index is None else rows[self.index]

    def scatter(self, rows: Tensor) -> Tensor:
        """Scatter `[n, *rest]` to the tokens' positions in `[..., *rest]`, zero elsewhere."""
        shape = (*self.shape, *rows.shape[1:])
        if self.index is None:
            return rows.view(shape)
        if self.count is not None:
            past = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device) >= self.count
            rows = rows.masked_fill(past.view(-1, *[1] * (rows.dim() - 1)), 0.0)
        out = torch.zeros((math.prod(self.shape), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        out[self.index] = rows
        return out.view(shape)

    def gather_statistics(self, stats: Tensor) -> Tensor:
        """Gather the columns of `[S, ...]` of these tokens: `[S, n]`."""
        return self.gather(stats.movedim(0, -1)).t()

    def scatter_statistics(self, stats: Tensor) -> Tensor:
        """Scatter `[S, n]` to the tokens' positions in `[S, ...]`, zero elsewhere."""
        return self.scatter(stats.t()).movedim(-1, 0).contiguous()


class ChunkedLinear:
    """`x @ weight.t() + bias` in chunks and blocks of rows: x `[N, H]` is the input `[..., H]` flattened.

    The weight is `[V, H]`. With a `count`, int32 `[]`, only so many rows have outputs, and the rows past them are
    undefined.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        *,
        float32_logits: bool,
        count: Tensor | None = None,
    ) -> None:
        self.shape = input.shape
        self.x = input.reshape(-1, input.shape[-1])
        self.weight, self.bias, self.plan, self.count = weight, bias, plan, count
        self.logits_dtype = torch.float32 if float32_logits else self.x.dtype
        if self.logits_dtype != self.x.dtype and not self.x.is_cuda:
            self.factor = weight.float()  # a CPU has no product of 16-bit matrices to float32
        else:
            self.factor = weight
        # cuBLAS takes five times as long for a product whose sizes are odd: the remainder has a product of its own.
        V = weight.shape[0]
        whole = V // ALIGNED * ALIGNED
        self.class_parts = [part for part in (slice(whole, V), slice(0, whole)) if part.start < part.stop]

    @property
    def has_separate_gradients(self) -> bool:
        """True if the gradient of the logits has another dtype than they, and does not overwrite them."""
        return self.logits_dtype != self.x.dtype

    @property
    def leaves_rows_past_count(self) -> bool:
        """True if nothing reads outputs past the count, or their gradients: the sum for a bias does."""
        return self.count is not None and self.bias is None

    def end(self, rows: slice) -> Tensor:
        """Return the number of some rows that count, int32 `[1]`; needs a `count`."""
        assert self.count is not None
        return (self.count - rows.start).clamp_(0, rows.stop - rows.start).view(1)

    def chunk_of(self, rows: slice) -> slice:
        """Return the rows of the chunk that a block is in."""
        start = rows.start // self.plan.chunk_rows * self.plan.chunk_rows
        return slice(start, min(start + self.plan.chunk_rows, self.x.shape[0]))

    def buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized `[rows, V]` whose rows begin at aligned addresses."""
        V = self.weight.shape[0]
        size = min(rows, self.x.shape[0]), cdiv(V, ALIGNED) * ALIGNED
        return torch.empty(size, dtype=dtype, device=self.x.device)[:, :V]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each block's rows and outputs, which the next block overwrites and the end frees."""
        N, allocates = self.x.shape[0], self.count is not None and not self.has_separate_gradients
        buffer = self.buffer(0 if allocates else self.plan.block_rows, self.logits_dtype)
        for start in range(0, max(N, 1), self.plan.chunk_rows):  # at least one: the gradients over no token are zeros
            chunk = self.chunk_of(slice(start, start))
            for first in range(start, max(chunk.stop, 1), self.plan.block_rows):
                rows = slice(first, min(first + self.plan.block_rows, chunk.stop))
                if allocates:
                    logits = self._counted_product(rows)
                else:
                    logits = self._product(rows, buffer[: rows.stop - rows.start])
                yield rows, logits
                if allocates:  # the product allocates its result: two would exist at once
                    logits.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(0)  # the caller's loop still holds the last one

    def _counted_product(self, rows: slice) -> Tensor:
        logits = outputs(self.x[rows], self.weight, self.end(rows))
        return logits if self.bias is None else logits.add_(self.bias)

    def _product(self, rows: slice, logits: Tensor) -> Tensor:
        """Write the outputs of some rows."""
        x, add_bias = self.x[rows], self.bias is not None and self.has_separate_gradients
        if self.count is not None:
            float32_outputs(x, self.factor, self.end(rows), logits)
        else:
            for part in self.class_parts:
                if self.bias is None or add_bias:
                    add_product(logits[:, part], x, self.factor[part].t(), first=True)
                else:
                    torch.addmm(self.bias[part], x, self.weight[part].t(), out=logits[:, part])
        if add_bias:
            logits += self.bias
        return logits


class LinearGradients:
    """The gradients of x, W and b that are needed, as sums over the chunks; the others are empty.

    They are rounded to `dtypes`; that of x is the dtype of x or float32.
    """

    def __init__(
        self, linear: ChunkedLinear, need: tuple[bool, bool, bool], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    ) -> None:
        self.linear, self.need, self.dtypes = linear, need, dtypes
        x, (V, H) = linear.x, linear.weight.shape
        buffers = [
            (tuple(linear.shape), dtypes[0], need[0]),
            # Where only the device knows the number of rows the first product is the sum.
            ((V, H), x.dtype if linear.plan.rounded_sums else torch.float32, need[1] and linear.count is None),
            ((V,), torch.float32, need[2]),
        ]
        self.dx, self.dw, self.db = (
            torch.empty(shape if wanted else (0,), dtype=dtype, device=x.device) for shape, dtype, wanted in buffers
        )
        self.dx_rows = self.dx.view(x.shape) if need[0] else self.dx

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each block's rows, logits, and where to write their gradient, which may be the logits.

        After the last block of a chunk the gradients that are needed are accumulated; without any nothing need be
        written.
        """
        linear, needed = self.linear, any(self.need)
        separate = needed and linear.has_separate_gradients
        buffer = linear.buffer(linear.plan.chunk_rows, linear.x.dtype) if separate else None
        for rows, logits in linear.blocks():
            chunk = linear.chunk_of(rows)
            dlogits = logits if buffer is None else buffer[rows.start - chunk.start : rows.stop - chunk.start]
            yield rows, logits, dlogits
            if needed and rows.stop == chunk.stop:
                self._add(chunk, dlogits if buffer is None else buffer[: chunk.stop - chunk.start])
        if buffer is not None:
            buffer.untyped_storage().resize_(0)

    def results(self, compacted: CompactedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; that of the input is scattered to all tokens."""
        dx = compacted.scatter(self.dx_rows) if self.need[0] else self.dx
        return dx, self.dw.to(self.dtypes[1]), self.db.to(self.dtypes[2])

    def _add(self, rows: slice, dlogits: Tensor) -> None:
        """Accumulate the gradients of a chunk; the first one overwrites."""
        need_dx, need_dw, need_db = self.need
        if dlogits.shape[1] == 0:  # without classes
            if need_dx:
                self.dx_rows[rows].zero_()
            return
        first = rows.start == 0
        if self.linear.count is not None:
            self._add_counted(rows, dlogits, first)
            return
        for i, part in enumerate(self.linear.class_parts):
            if need_dx:  # the few left-over classes first: the others' product rounds their sum
                add_product(self.dx_rows[rows], dlogits[:, part], self.linear.weight[part], first=i == 0)
            if need_dw:
                add_product(self.dw[part], dlogits[:, part].t(), self.linear.x[rows], first)
        if need_db:
            self._add_bias_gradient(dlogits, first)

    def _add_counted(self, rows: slice, dlogits: Tensor, first: bool) -> None:
        need_dx, need_dw, need_db = self.need
        weight, end = self.linear.weight, self.linear.end(rows)
        if need_dx:
            if self.dx.dtype == weight.dtype:
                self.dx_rows[rows] = input_gradient(dlogits, weight, end)
            else:  # the float32 dx, which is summed over ranks before it is rounded
                add_product(self.dx_rows[rows], dlogits, weight, first=True)
        if need_dw:
            part = weight_gradient(dlogits, self.linear.x[rows], end)
            if first:
                self.dw = part.to(self.dw.dtype)
            else:
                add_where_any(self.dw, part, end)
        if need_db:
            self._add_bias_gradient(dlogits, first)

    def _add_bias_gradient(self, dlogits: Tensor, first: bool) -> None:
        total = dlogits.sum(0, dtype=torch.float32)
        self.db = total if first else self.db.add_(total)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute total += a @ b, in float32 within the product, rounded once to total's dtype."""
    options: dict[str, Any] = {}
    if total.dtype != a.dtype and a.device.type == "cuda":
        options["out_dtype"] = total.dtype
    else:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, out=total, **options)
    else:
        torch.addmm(total, a, b, out=total, **options)


DIFFERENTIABLE = ["input", "linear_weight", "linear_bias"]
"""A linear layer's tensors, by their names in a call."""


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """A linear layer over classes, which may be sharded over ranks, and the tokens that count."""

    input: Tensor  # [..., H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]
    float32_logits: bool  # else they have the input's dtype
    skip_ignored: bool  # do no work for tokens that do not count
    chunk_size: int  # 0: chosen
    shard: VocabShard | None  # None: the weight has all classes

    def mask(self) -> Tensor:
        """Return the mask of the tokens that count, `[...]`."""
        raise NotImplementedError

    @property
    def token_tensors(self) -> tuple[str, ...]:
        """The names of the tensors with a row for each token, which may be None."""
        raise NotImplementedError

    @property
    def linear_layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The input and weight of each linear layer."""
        return ((self.input, self.linear_weight),)

    def can_compact(self, impl: Implementation) -> bool:
        """Return True if the tokens that do not count are skipped: not every GPU has products for it."""
        return self.skip_ignored and (impl.on_host or all(can_group(*layer) for layer in self.linear_layers))

    def compacted(self, impl: Implementation) -> tuple[CompactedTokens, Self]:
        """Return the tokens that the loss is computed for, and the call for these."""
        if not self.can_compact(impl):
            return CompactedTokens(tuple(self.tokens)), self
        compacted = CompactedTokens.of(self.mask(), on_host=impl.on_host)
        tensors = {name: getattr(self, name) for name in self.token_tensors}
        rows = {name: None if tensor is None else compacted.gather(tensor) for name, tensor in tensors.items()}
        return compacted, replace(self, **rows)

    def plan(self, impl: Implementation, *, group: int = 1, layers: int = 1, remade: bool = False) -> Plan:
        """Return the plan of the linear layer, or of several over the same classes."""
        return plan(
            self.tokens.numel(),
            self.input.shape[-1],
            self.mean_classes,
            self.input.dtype,
            float32_logits=self.float32_logits,
            on_host=impl.on_host,
            chunk_size=self.chunk_size,
            group=group,
            layers=layers,
            dynamic=not impl.on_host and self.can_compact(impl),
            remade=remade,
        )

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
    def ranks(self) -> int:
        return 1 if self.shard is None else self.shard.ranks

    def gather_ranks(self, parts: Tensor) -> Tensor:
        """Gather the statistics of all ranks, concatenated in the ranks' order."""
        return parts if self.shard is None else self.shard.gather(parts)

    @property
    def dx_dtype(self) -> torch.dtype:
        """float32 where the gradient of the input is summed over ranks before it is rounded."""
        return self.input.dtype if self.shard is None or not self.shard.dx_group_name else torch.float32

    @property
    def saved_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes of the gradients of input, weight and bias that a forward pass makes and a backward pass scales.

        The weight's is float32 for float16, whose range does not hold it before it is scaled.
        """
        dw = torch.float32 if self.input.dtype == torch.float16 else self.input.dtype
        return self.dx_dtype, dw, torch.float32

    @property
    def recomputed_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The same of gradients that a backward pass makes."""
        return self.dx_dtype, self.input.dtype, self.input.dtype

    @classmethod
    def names(cls) -> list[str]:
        """Return the call's argument names in a kernel op, tensors first, without those of its shard, which follow."""
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.type not in (Tensor, Tensor | None))
        return [field.name for field in fields if field.name != "shard"]

    @classmethod
    def checked(cls, **fields: Any) -> Any:
        """Check the linear layer's tensors, cast them under autocast, and return the call.

        In place of `float32_logits` the fields have the `logits_dtype` of the caller.
        """
        fields |= zip(DIFFERENTIABLE, checked_linear(*(fields[name] for name in DIFFERENTIABLE)), strict=True)
        fields["float32_logits"] = wants_float32(fields.pop("logits_dtype"), fields["input"])
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


def wants_float32(logits_dtype: torch.dtype | None, input: Tensor) -> bool:
    """Return True if logits are to be float32, the default, and False if they are to have the input's dtype."""
    if logits_dtype not in (None, torch.float32, input.dtype):
        raise TypeError(f"logits_dtype: expected None, torch.float32 or {input.dtype} as input, got {logits_dtype}")
    return logits_dtype in (None, torch.float32)


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 0:
        raise ValueError(f"chunk_size: expected a number of tokens, or 0 to have it chosen, got {chunk_size}")


def check_temperature(temperature: float) -> None:
    check_number("temperature", temperature, TINY, LARGEST, "a finite positive number")


def local_fields(
    fields: dict[str, Any], linears: Sequence[Sequence[str]], others: Sequence[str]
) -> tuple[dict[str, Any], Callable[[Tensor], Tensor], bool]:
    """Return a call's fields for this rank, a function that converts a result for the caller, and if any is a DTensor.

    Fields and results are as given unless the weights are DTensors with all classes sharded over one mesh dimension.

    Args:
        fields: The call's fields, among them `shard`, by their names.
        linears: The names of each linear layer's input, weight and bias.
        others: The names of the tensors that are replicated over the mesh dimension.
    """
    if all(type(fields[weight]) in PLAIN_TENSORS for _, weight, _ in linears):
        return fields, lambda result: result, False
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
            impl = KERNELS if runs_kernels(name, call.input) else PYTORCH
            return int(product_flops(call.input, call.linear_weight) * products(impl, call, *rest))

        self.op.register_flop_formula(flops)

    def _parameters(self, run: Callable[..., Any]) -> list[inspect.Parameter]:
        types = {field.name: field.type for field in dataclasses.fields(self.call_type)}
        own = {name: types[name] for name in self.names} | VocabShard.__annotations__
        return [
            *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=own[name]) for name in own),
            *list(inspect.signature(run).parameters.values())[2:],
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
        self._save_options(ctx, inputs)
        ctx.fields = inputs[tensors : self.fields]
        ctx.save_for_backward(*inputs[:tensors], *results)

    def recomputed_gradients(self, ctx: Any, backward: "CallOp[C]", *grads: Tensor | None) -> Any:
        """In a backward formula: the arguments' gradients by `backward(call, *grads, *results, *need)`."""
        tensors = self.fields - len(ctx.fields)
        saved = ctx.saved_tensors  # once: under a checkpoint they are computed again, and given only once
        call, *_ = self.unpack((*saved[:tensors], *ctx.fields))
        return _argument_gradients(ctx, *backward(call, *grads, *saved[tensors:], *ctx.needs_input_grad[:3]))

    def save_gradients(self, ctx: Any, inputs: tuple[Any, ...], denominator: Tensor | None, *gradients: Tensor) -> None:
        """In a `setup_context`: save the gradients that the forward pass made; a denominator of None is 1."""
        self._save_options(ctx, inputs)
        save_gradients(ctx, denominator, *gradients)

    def scaled_gradients(self, ctx: Any, scale: KernelOp, grad: Tensor) -> Any:
        """In a backward formula: the arguments' gradients, which are those saved, scaled by `scale`."""
        saved, (need_dx, need_dw, need_db) = SavedGradients(ctx, grad, scale), ctx.needs_input_grad[:3]
        dx = saved.times(0) if need_dx else None
        dw = saved.times(1, ctx.dtype) if need_dw else None
        return _argument_gradients(ctx, dx, dw, saved.times(2, ctx.dtype) if need_db else None)

    def _save_options(self, ctx: Any, inputs: tuple[Any, ...]) -> None:
        ctx.dtype, ctx.shard, ctx.arguments = inputs[0].dtype, self._shard(inputs), len(inputs)

    def differentiate_by_scaling(self, scale: KernelOp, denominator: Callable[..., Tensor | None]) -> None:
        """Register the derivative of an op whose forward pass makes the gradients of input, weight and bias.

        It returns a loss, two results without gradients, and lastly the three gradients.

        Args:
            scale: Multiplies by the incoming gradient and divides by the denominator.
            denominator: `denominator(inputs, output)` returns what the gradients are still to be divided by, or None.
        """
        self.op.register_autograd(
            lambda ctx, grad, *_: self.scaled_gradients(ctx, scale, grad),
            setup_context=lambda ctx, inputs, output: self.save_gradients(
                ctx, inputs, denominator(inputs, output), *output[-3:]
            ),
            depends_on=[DIFFERENTIABLE, [], []],
            takes_none=True,
            keeps=lambda needs_input_grad, args: needs_input_grad[:3],
        )


def _argument_gradients(ctx: Any, dx: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Any:
    """Return a gradient or None for each argument; that of the input is summed over ranks and rounded once."""
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    if need_dx and dx is not None:
        dx = (dx if ctx.shard is None else ctx.shard.sum_input_gradient(dx)).to(ctx.dtype)
    return dx if need_dx else None, dw if need_dw else None, db if need_db else None, *[None] * (ctx.arguments - 3)


def recomputing_op(name: str, call_type: type[C], run: Callable[..., Any]) -> CallOp[C]:
    """Return the op `run(impl, call, ..., need_dx, need_dw, need_db)` of a backward pass that recomputes the logits."""
    return CallOp(
        name,
        call_type,
        run,
        outputs=3,
        fake=lambda call, *rest: fake_gradients(call, rest[-3:], call.recomputed_dtypes),
        products=lambda impl, call, *rest: 1 + rest[-3] + rest[-2],
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
