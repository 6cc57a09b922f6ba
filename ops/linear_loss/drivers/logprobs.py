"""The drivers of log-probabilities, chunk by chunk, and of losses of groups of tokens.

`linear_logprobs` returns log-probabilities and entropies, and its backward pass recomputes the logits. A loss of groups
computes its gradients in the forward pass. A group is the tokens on which each token's gradient depends: one token, a
sequence, or a pair of sequences. Where chunks hold whole groups the logits are computed once, else twice.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import (
    DIFFERENTIABLE,
    LOGITS_BUDGET,
    REMADE_BUDGET,
    CallOp,
    ChunkedLinear,
    CompactedTokens,
    LinearCall,
    LinearGradients,
    can_group,
    check_chunk_size,
    check_temperature,
    fake_gradients,
    local_fields,
)
from llmk.ops.linear_loss.kernels import STATISTICS, Implementation, LogitTransform
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    cdiv,
    check_dtype,
    check_finite,
    check_same,
    check_switch,
    replicate_only,
    row_axes,
)
from llmk.registry.backends import kernels_on_cpu


@dataclass(frozen=True, kw_only=True)
class LogprobsCall(LinearCall):
    """A linear layer and the classes whose log-probabilities are returned."""

    target: Tensor  # [...] or [..., K]
    ignore_index: int
    logit_scale: float
    softcap: float
    temperature: float
    skip_ignored: bool
    chunk_size: int

    @classmethod
    def checked(cls, **fields: Any) -> Any:
        call = super().checked(**fields)
        check_dtype("target", call.target, (torch.int64, torch.int32))
        check_same("target", call.target, "input", call.input)
        check_temperature(call.temperature)
        check_finite("logit_scale", call.logit_scale)
        check_switch("softcap", call.softcap)
        check_chunk_size(call.chunk_size)
        return call

    def transform(self, linear: ChunkedLinear) -> LogitTransform:
        return LogitTransform(
            self.ignore_index,
            self.logit_scale,
            self.softcap,
            self.temperature,
            self.first_class,
            self.num_classes,
            linear.leaves_rows_past_count,
        )

    def linear(self, compacted: CompactedTokens | None) -> ChunkedLinear:
        count = None if compacted is None else compacted.count
        return ChunkedLinear(
            self.input, self.linear_weight, self.linear_bias, self.chunk_size, self.mean_classes, REMADE_BUDGET, count
        )

    def candidates(self) -> Tensor:
        """Return the targets `[N, K]`."""
        K = self.target.shape[-1] if self.target.dim() == self.input.dim() else 1
        return self.target.reshape(-1, K).contiguous()

    def compacted(self, impl: Implementation) -> CompactedTokens | None:
        """Return the tokens that count if the others are to be skipped and can be, else None."""
        if not self.skip_ignored:
            return None
        mask = self.target.long() != self.ignore_index  # int32 would wrap an index that it does not hold
        mask = mask.any(-1) if self.target.dim() == self.input.dim() else mask
        return CompactedTokens.of(mask, (self.input, self.linear_weight), on_host=impl.on_host)

    def of(self, compacted: CompactedTokens | None) -> Self:
        return self if compacted is None else compacted.select(self, "input", "target")


def concatenated(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate log-probabilities `[N, K]`, entropies `[N]` and statistics `[3, N]` of all chunks."""
    logprobs, entropy, stats = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy), torch.cat(stats, -1)


def _forward(impl: Implementation, whole: LogprobsCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, and the statistics `[3, ...]` of each token."""
    compacted = whole.compacted(impl)
    call = whole.of(compacted)
    linear = call.linear(compacted)
    target, transform, parts = call.candidates(), call.transform(linear), []
    for chunk, logits in linear.chunks():
        part = impl.logprobs.statistics(logits, target[chunk], transform)
        part = part if call.shard is None else call.shard.gather(part)
        parts.append(impl.logprobs.combine(part, target[chunk], transform))
    logprobs, entropy, stats = concatenated(parts)
    logprobs, stats = logprobs.view(call.target.shape), stats.view(STATISTICS, *call.tokens)
    if compacted is None:
        return logprobs, entropy.view(call.tokens), stats
    stats = compacted.scatter(stats.t()).movedim(-1, 0).contiguous()
    return compacted.scatter(logprobs), compacted.scatter(entropy), stats


def _backward(
    impl: Implementation, whole: LogprobsCall, grad: Tensor | None, entropy_grad: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of the outputs; the logits are recomputed."""
    compacted = whole.compacted(impl)
    call = whole.of(compacted)
    if compacted is not None:
        grad, entropy_grad = (None if g is None else compacted.gather(g) for g in (grad, entropy_grad))
        stats = compacted.gather(stats.movedim(0, -1)).t()
    linear = call.linear(compacted)
    target, transform = call.candidates(), call.transform(linear)
    gradients = LinearGradients(linear, (need_dx, need_dw, need_db), call.dx_dtype)
    grad = None if grad is None else grad.reshape(target.shape)
    entropy_grad = None if entropy_grad is None else entropy_grad.reshape(-1)
    stats = stats.reshape(STATISTICS, -1)
    for chunk, logits in linear.chunks():
        if logits.shape[1] > 0:
            by_logprobs, by_entropy = (None if g is None else g[chunk] for g in (grad, entropy_grad))
            impl.logprobs.gradients(by_logprobs, by_entropy, logits, target[chunk], stats[:, chunk], transform)
        gradients.add(chunk, logits)
    dtype = call.input.dtype
    dx = gradients.dx if compacted is None or not need_dx else compacted.scatter(gradients.dx)
    return dx, gradients.dw.to(dtype), gradients.db.to(dtype)


def _fake_forward(call: LogprobsCall) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy, stats = (
        call.input.new_empty(shape, dtype=torch.float32)
        for shape in (call.target.shape, call.tokens, (STATISTICS, *call.tokens))
    )
    return logprobs, entropy, stats


def _fake_backward(call: LogprobsCall, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(call, rest[-3:], [call.dx_dtype, call.input.dtype, call.input.dtype])


def _forward_sharding(input, *_):
    return [([axis, axis, 1 + axis], [axis, REPLICATE, REPLICATE, axis]) for axis in row_axes(input)]


def _backward_sharding(input, *args):
    need_dx = args[-3]
    return [
        ([axis if need_dx else REPLICATE, PARTIAL, PARTIAL], [axis, REPLICATE, REPLICATE, axis, axis, axis, 1 + axis])
        for axis in row_axes(input)
    ]


class LogprobsOps:
    """The kernel ops of one public operator and the derivative, which recomputes the logits."""

    def __init__(self, name: str) -> None:
        self.forward = CallOp(
            f"_{name}_fwd", LogprobsCall, _forward, outputs=3, fake=_fake_forward, products=lambda call: 1
        )
        self.backward = CallOp(
            f"_{name}_bwd",
            LogprobsCall,
            _backward,
            outputs=3,
            fake=_fake_backward,
            products=lambda call, *rest: 1 + rest[-3] + rest[-2],
        )
        self.forward.op.register_sharding(_forward_sharding)
        self.backward.op.register_sharding(_backward_sharding)
        self.forward.op.register_autograd(
            self._gradients,
            setup_context=lambda ctx, inputs, output: self.forward.save_call(ctx, inputs, output[-1]),
            depends_on=[DIFFERENTIABLE, DIFFERENTIABLE],
            takes_none=True,
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.backward.op

    def _gradients(self, ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> Any:
        call, (stats,) = self.forward.saved_call(ctx)
        need = ctx.needs_input_grad[:3]
        dx, dw, db = self.backward(call, grad, entropy_grad, stats, *need)
        dx = call.input_gradient(dx) if need[0] else None
        return dx, dw if need[1] else None, db if need[2] else None, *[None] * (self.forward.fields - 3)

    def __call__(self, **fields: Any) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies from a call's fields."""
        fields, as_given = local_fields(fields, [DIFFERENTIABLE], ["target"])
        call = LogprobsCall.checked(**fields)
        tokens, shape = tuple(call.tokens), tuple(call.target.shape)
        if shape != tokens and (call.target.dim() != call.input.dim() or shape[:-1] != tokens or shape[-1] == 0):
            raise ValueError(f"target: expected shape {tokens}, or {tokens} and K candidates, got {shape}")
        logprobs, entropy, _ = self.forward(call)
        return as_given(logprobs), as_given(entropy)


GROUP_BUDGET = 2 * LOGITS_BUDGET
"""Bytes of a chunk's logits where one group needs more than LOGITS_BUDGET: without it all logits are made twice,
which takes a third longer. On an H200 pairs of 2 x 4096 tokens, 2048 x 151936, took 130 ms so, three products 77."""


class GroupTerms(Protocol):
    """The loss of some groups as a function of log-probabilities and entropies `[groups, *group]`."""

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Return the sum over the groups."""
        ...

    def gradients(self, logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of log-probabilities and of entropies, None for zeros."""
        ...


@dataclass(frozen=True, kw_only=True)
class GroupsCall(LogprobsCall):
    """A loss of groups of tokens `[..., *group]`."""

    @property
    def group(self) -> torch.Size:
        """The shape of a group of tokens, () for a single token."""
        raise NotImplementedError

    def terms(self, groups: slice) -> GroupTerms:
        """Per-group terms for `groups`."""
        raise NotImplementedError

    def grouped(self, values: Tensor) -> Tensor:
        """Reshape a value of each token to `[groups, *group]`."""
        return values.reshape(self.tokens[: len(self.tokens) - len(self.group)].numel(), *self.group)

    @property
    def group_rows(self) -> int:
        """The number of tokens of a group."""
        return self.group.numel()

    @property
    def tokens_are_groups(self) -> bool:
        return len(self.group) == 0

    @property
    def on_host(self) -> bool:
        """True if plain PyTorch computes the loss."""
        return self.input.device.type == "cpu" and not kernels_on_cpu()

    def makes_logits_once(self, chunk_rows: int, compacted: bool) -> bool:
        """True if a chunk holds whole groups; no chunk of compacted tokens does, unless the groups are tokens."""
        return self.tokens_are_groups or (not compacted and chunk_rows % max(self.group_rows, 1) == 0)

    def linear(self, compacted: CompactedTokens | None) -> ChunkedLinear:
        """Return the linear layer in chunks of whole groups where one fits.

        On a CPU a group fits if it is no longer than a chunk that stays in cache. Chunks of compacted tokens hold no
        whole groups, unless groups are single tokens.
        """
        count = None if compacted is None else compacted.count
        linear = ChunkedLinear(self.input, self.linear_weight, self.linear_bias, self.chunk_size, count=count)
        N, rows = linear.x.shape[0], linear.chunk_rows
        if compacted is not None or self.tokens_are_groups or N == 0:
            return linear
        group = self.group_rows
        fits = GROUP_BUDGET // (self.num_classes * self.input.element_size())
        given = self.chunk_size > 0 or self.on_host
        whole = rows // group if given else min(fits // group, cdiv(N // group, cdiv(N, rows)))
        linear.chunk_rows = whole * group or rows
        return linear


def _grouped(
    impl: Implementation, call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, log-probabilities, entropies, and the gradients of input, weight and bias."""
    compacted = call.compacted(impl)
    counted = call.of(compacted)
    linear, target = counted.linear(compacted), counted.target.reshape(-1, 1).contiguous()
    gradients = LinearGradients(linear, (need_dx, need_dw, need_db), call.dx_dtype)
    needed = any(gradients.need) and linear.x.shape[0] > 0
    whole = call.makes_logits_once(linear.chunk_rows, compacted=compacted is not None)
    logprobs, entropy, stats = _grouped_forward(impl, counted, gradients, target, needed and whole)
    if compacted is not None:
        logprobs, entropy = compacted.scatter(logprobs), compacted.scatter(entropy)
    logprobs, entropy = logprobs.view(call.tokens), entropy.view(call.tokens)
    terms = call.terms(slice(None))
    if any(gradients.need) and not (needed and whole):
        grad, entropy_grad = terms.gradients(call.grouped(logprobs))
        if compacted is not None:
            grad = compacted.gather(grad.view(call.tokens))
            entropy_grad = None if entropy_grad is None else compacted.gather(entropy_grad.view(call.tokens))
        _grouped_backward(impl, counted, gradients, target, stats, grad, entropy_grad)
    loss = terms.loss(call.grouped(logprobs), call.grouped(entropy))
    dx = gradients.dx if compacted is None or not need_dx else compacted.scatter(gradients.dx)
    return loss, logprobs, entropy, dx, gradients.dw.to(call.saved_dtypes[1]), gradients.db


def _grouped_forward(
    impl: Implementation, call: GroupsCall, gradients: LinearGradients, target: Tensor, at_once: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities `[N, 1]`, entropies `[N]` and statistics `[3, N]`; with `at_once` add gradients."""
    transform, parts = call.transform(gradients.linear), []
    for chunk, logits in gradients.linear.chunks():
        statistics = impl.logprobs.statistics(logits, target[chunk], transform)
        part = impl.logprobs.combine(statistics, target[chunk], transform)
        parts.append(part)
        if at_once:
            groups = slice(chunk.start // call.group_rows, chunk.stop // call.group_rows)
            logprobs, _, stats = part
            grad, entropy_grad = call.terms(groups).gradients(logprobs.view(-1, *call.group))
            entropy_grad = None if entropy_grad is None else entropy_grad.reshape(-1)
            impl.logprobs.gradients(grad.reshape(-1, 1), entropy_grad, logits, target[chunk], stats, transform)
            gradients.add(chunk, logits)
    return concatenated(parts)


def _grouped_backward(
    impl: Implementation, call: GroupsCall, gradients: LinearGradients, target: Tensor, stats: Tensor, grad: Tensor,
    entropy_grad: Tensor | None,
) -> None:  # fmt: skip
    """Add gradients, given those of log-probabilities and entropies `[...]`; the logits are recomputed."""
    transform, grad = call.transform(gradients.linear), grad.reshape(-1, 1)
    for chunk, logits in gradients.linear.chunks():
        by_entropy = None if entropy_grad is None else entropy_grad.reshape(-1)[chunk]
        impl.logprobs.gradients(grad[chunk], by_entropy, logits, target[chunk], stats[:, chunk], transform)
        gradients.add(chunk, logits)


def _fake_grouped(call: GroupsCall, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = call.input.new_empty((), dtype=torch.float32)
    logprobs, entropy = (call.input.new_empty(call.tokens, dtype=torch.float32) for _ in range(2))
    return loss, logprobs, entropy, *fake_gradients(call, need, call.saved_dtypes)


def _grouped_products(call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool) -> int:
    """Count one product for the logits, one more if they are made twice, and one for each gradient."""
    compacted = call.skip_ignored and (call.on_host or can_group(call.input, call.linear_weight))
    once = call.makes_logits_once(call.linear(None).chunk_rows, compacted)
    return 1 + ((need_dx or need_dw or need_db) and not once) + need_dx + need_dw


def groups_op(name: str, call_type: type[GroupsCall], scale: KernelOp) -> CallOp:
    """Return the kernel op of a loss of groups, whose backward pass scales the saved gradients with `scale`."""
    op = CallOp(name, call_type, _grouped, outputs=6, fake=_fake_grouped, products=_grouped_products)
    op.op.register_sharding(replicate_only)
    op.differentiate_by_scaling(scale, lambda _: True, constants=2)
    return op
