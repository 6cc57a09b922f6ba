"""The drivers of log-probabilities, chunk by chunk, and of losses of groups of tokens.

`linear_logprobs` returns log-probabilities and entropies, and its backward pass recomputes the logits. `linear_topk`
returns the largest log-probabilities, and its backward pass is that of `linear_logprobs` of the same classes. A loss of
groups computes its gradients in the forward pass. A group is the tokens on which each token's gradient depends: one
token, a sequence, or a pair of sequences. Where blocks hold whole groups the logits are computed once, else twice;
twice in float16, whose range holds the logits' gradients only if the largest of all tokens is known before the first.
What is computed twice is kept for the first rows, as many as `kept_rows` says. Where tokens are skipped on a GPU, those
that count come first in each chunk of whole groups, instead of in the batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import (
    DIFFERENTIABLE,
    ChunkedLinear,
    CompactedTokens,
    LinearCall,
    LinearGradients,
    LinearOp,
    Plan,
    check_chunk_size,
    check_temperature,
    fake_gradients,
    float16_scale,
    largest,
    local_fields,
    recomputing_op,
    scaled,
    with_shard,
)
from llmk.ops.linear_loss.kernels import MOST, MOST_SUPPORT, STATISTICS, Candidates, Implementation, LogitTransform
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    check_dtype,
    check_finite,
    check_number,
    check_same,
    check_switch,
    gradient_of,
    replicate_only,
    row_axes,
)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall(LinearCall):
    """A linear layer whose outputs are scaled, capped and divided by a temperature before their softmax."""

    logit_scale: float
    softcap: float
    temperature: float

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        call = super().checked(arguments)
        check_temperature(call.temperature)
        check_finite("logit_scale", call.logit_scale)
        check_switch("softcap", call.softcap)
        check_chunk_size(call.chunk_size)
        return call

    def transform(self, linear: ChunkedLinear, ignore_index: int) -> LogitTransform:
        return LogitTransform(
            ignore_index=ignore_index,
            scale=self.logit_scale,
            softcap=self.softcap,
            temperature=self.temperature,
            first_class=self.first_class,
            num_classes=self.num_classes,
            leave_ignored=linear.leaves_rows_past_count,
        )

    def linear(
        self, impl: Implementation, compacted: CompactedTokens, kept: Tensor, plan: Plan | None = None
    ) -> ChunkedLinear:
        """Return the linear layer by `plan`, or by that of gradients which a backward pass makes."""
        if plan is None:
            plan = self.plan(impl, remade=True, kept=min(kept.shape[0], self.tokens.numel()))
        return ChunkedLinear(
            self.input,
            self.linear_weight,
            self.linear_bias,
            plan,
            float32_logits=self.float32_logits,
            count=self.product_end(compacted),
            kept=kept,
        )


@dataclass(frozen=True, kw_only=True)
class LogprobsCall(SoftmaxCall):
    """A linear layer and the classes whose log-probabilities are returned."""

    target: Tensor  # [...] or [..., K]
    support: Tensor | None = None  # [..., L]: the classes over which the softmax is, padded with negative ids
    ignore_index: int

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        call = super().checked(arguments)
        check_dtype("target", call.target, (torch.int64, torch.int32))
        check_same("target", call.target, "input", call.input)
        if call.support is not None:
            check_support(call.support, call)
        return call

    def largest_gradient(
        self, grad: Tensor | None, entropy_grad: Tensor | None, logsumexp_grad: Tensor | None
    ) -> Tensor:
        """Return what no element of the logits' gradient exceeds: |p (log p + entropy)| is at most log V + 1."""
        bound = torch.zeros((), dtype=torch.float32, device=self.input.device)
        if grad is not None:
            bound = bound + largest(grad.float().abs().sum(-1))
        if entropy_grad is not None:
            bound = bound + largest(entropy_grad) * (math.log(self.num_classes) + 1)
        if logsumexp_grad is not None:
            bound = bound + largest(logsumexp_grad)
        return bound * (abs(self.logit_scale) / self.temperature)

    def candidates(self) -> Tensor:
        """Return the targets `[N, K]`."""
        K = self.target.shape[-1] if self.target.dim() == self.input.dim() else 1
        return self.target.reshape(-1, K).contiguous()

    def supports(self) -> Tensor | None:
        """Return the supports `[N, L]`."""
        return None if self.support is None else self.support.reshape(-1, self.support.shape[-1]).contiguous()

    def mask(self) -> Tensor:
        mask = self.target.long() != self.ignore_index  # int32 would wrap an index that it does not hold
        return mask.any(-1) if self.target.dim() == self.input.dim() else mask

    @property
    def token_tensors(self) -> tuple[str, ...]:
        return "input", "target", "support"


def check_support(support: Tensor, call: LogprobsCall) -> None:
    """Check the dtype, the device and the shape; whether ids are classes is checked where logits are."""
    check_dtype("support", support, (torch.int64, torch.int32))
    check_same("support", support, "input", call.input)
    tokens, shape = tuple(call.tokens), tuple(support.shape)
    if len(shape) == 0 or shape[:-1] != tokens or not 1 <= shape[-1] <= MOST_SUPPORT:
        expected = f"{tokens} and from 1 to {MOST_SUPPORT} ids for each token"
        raise ValueError(f"support: expected shape {expected}, got {shape}")


def rows_of(tensor: Tensor | None, block: slice) -> Tensor | None:
    return None if tensor is None else tensor[block]


def concatenated(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate log-probabilities `[N, K]`, entropies `[N]` and statistics `[3, N]` of all blocks."""
    logprobs, entropy, stats = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy), torch.cat(stats, -1)


def _forward(impl: Implementation, full_call: LogprobsCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, the statistics `[3, ...]` of each token, and the logits that are kept."""
    compacted, call = full_call.compacted(impl)
    kept = full_call.kept_logits(keep)
    linear = call.linear(impl, compacted, call.kept_matrix(kept))
    target, support, parts = call.candidates(), call.supports(), []
    transform = call.transform(linear, call.ignore_index)
    for block, logits in linear.blocks():
        rank = impl.logprobs.statistics(logits, target[block], transform, rows_of(support, block))
        statistics = call.gather_ranks(rank)
        parts.append(impl.logprobs.combine(statistics, target[block], transform))
    logprobs, entropy, stats = concatenated(parts)
    logprobs = compacted.scatter(logprobs).view(full_call.target.shape)
    return logprobs, compacted.scatter(entropy), compacted.scatter_statistics(stats), kept


def _backward(
    impl: Implementation, full_call: LogprobsCall, grad: Tensor | None, entropy_grad: Tensor | None, stats: Tensor,
    kept: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of the outputs; logits that were not kept are recomputed."""
    compacted, call = full_call.compacted(impl)
    grad, entropy_grad = (None if g is None else compacted.gather(g) for g in (grad, entropy_grad))
    stats, need = compacted.gather_statistics(stats), (need_dx, need_dw, need_db)
    linear = call.linear(impl, compacted, call.kept_matrix(kept))
    gradients = _gradients(impl, call, linear, grad, entropy_grad, stats, need, call.recomputed_dtypes)
    return gradients.results(compacted)


def _gradients(
    impl: Implementation, call: LogprobsCall, linear: ChunkedLinear, grad: Tensor | None, entropy_grad: Tensor | None,
    stats: Tensor, need: tuple[bool, bool, bool], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    logsumexp_grad: Tensor | None = None,
) -> LinearGradients:  # fmt: skip
    """Return the linear layer's gradients from those of a softmax's results, in a second pass."""
    target, support, transform = call.candidates(), call.supports(), call.transform(linear, call.ignore_index)
    grad = None if grad is None else grad.reshape(target.shape)
    entropy_grad, logsumexp_grad = (None if g is None else g.reshape(-1) for g in (entropy_grad, logsumexp_grad))
    given = grad, entropy_grad, logsumexp_grad
    scale = float16_scale(call.input.dtype, need, lambda: call.largest_gradient(*given))
    scaled_grads = [None if g is None else scaled(g, scale) for g in given]
    gradients = LinearGradients(linear, need, dtypes, scale)
    for block, logits, dlogits in gradients.blocks(second=True):
        if logits.shape[1] > 0:
            g, h, f, kept = (rows_of(tensor, block) for tensor in (*scaled_grads, support))
            impl.logprobs.gradients(g, h, logits, target[block], stats[:, block], dlogits, transform, kept, f)
    return gradients


def _fake_forward(call: LogprobsCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs, entropy, stats = (
        call.input.new_empty(shape, dtype=torch.float32)
        for shape in (call.target.shape, call.tokens, (STATISTICS, *call.tokens))
    )
    return logprobs, entropy, stats, call.kept_logits(keep)


def _forward_sharding(input, *_):
    return [([axis, axis, 1 + axis, REPLICATE], [axis, REPLICATE, REPLICATE, axis, axis]) for axis in row_axes(input)]


def _backward_sharding(tensors: int) -> Callable[..., Any]:
    """Return the sharding of a backward pass that takes so many tensors of tokens, then statistics and kept logits."""

    def sharding(input, *args):
        need_dx = args[-3]
        return [
            (
                [axis if need_dx else REPLICATE, PARTIAL, PARTIAL],
                [axis, REPLICATE, REPLICATE, *[axis] * tensors, 1 + axis, REPLICATE],
            )
            for axis in row_axes(input)
        ]

    return sharding


def _keeps(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> tuple[bool]:
    """Return True if logits are kept: for a gradient, unless each rank would keep some of its part of the tokens."""
    input = args[0]
    return (any(needs_input_grad[:3]) and (type(input) is Tensor or not hasattr(input, "__tensor_flatten__")),)


class LogprobsOps:
    """The kernel ops of one public operator and the derivative, which recomputes the logits that are not kept."""

    def __init__(self, name: str) -> None:
        self.forward = LinearOp(
            f"_{name}_fwd", LogprobsCall, _forward, outputs=4, fake=_fake_forward, products=lambda impl, call, keep: 1
        )
        self.backward = recomputing_op(f"_{name}_bwd", LogprobsCall, _backward, keeps=True)
        self.forward.op.register_sharding(_forward_sharding)
        self.backward.op.register_sharding(_backward_sharding(4))  # target, support, two gradients
        self.forward.op.register_autograd(
            lambda ctx, *grads: self.forward.recomputed_gradients(ctx, self.backward, *grads),
            setup_context=lambda ctx, inputs, output: self.forward.save_call(ctx, inputs, *output[2:]),
            depends_on=[DIFFERENTIABLE, DIFFERENTIABLE],
            takes_none=True,
            keeps=_keeps,
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.backward.op

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies from the public operator's arguments."""
        local, as_given, _ = local_fields(with_shard(arguments), [DIFFERENTIABLE], ["target", "support"])
        call = LogprobsCall.checked(local)
        tokens, shape = tuple(call.tokens), tuple(call.target.shape)
        if shape != tokens and (call.target.dim() != call.input.dim() or shape[:-1] != tokens or shape[-1] == 0):
            raise ValueError(f"target: expected shape {tokens}, or {tokens} and K candidates, got {shape}")
        logprobs, entropy, *_ = self.forward(call)
        return as_given(logprobs), as_given(entropy)


def check_k(k: int) -> None:
    check_number("k", k, 1, MOST, f"1 to {MOST}")


NOT_IGNORED = -1
"""An index to ignore that no class has."""


@dataclass(frozen=True, kw_only=True)
class TopkCall(SoftmaxCall):
    """A linear layer and the number of its largest outputs that are returned."""

    k: int

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        call = super().checked(arguments)
        check_k(call.k)
        if call.k > call.num_classes:
            raise ValueError(f"k: expected at most {call.num_classes}, the number of classes, got {call.k}")
        return call

    def given(self, indices: Tensor) -> LogprobsCall:
        """Return the call for the log-probabilities of given classes."""
        return LogprobsCall.of(vars(self), target=indices, ignore_index=NOT_IGNORED)


def _topk(impl: Implementation, call: TopkCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, logsumexps, classes, the statistics `[3, ...]` of each token, and kept logits."""
    kept, tokens = call.kept_logits(keep), tuple(call.tokens)
    linear = call.linear(impl, CompactedTokens(tokens), call.kept_matrix(kept))
    transform = call.transform(linear, NOT_IGNORED)
    blocks = [impl.topk.candidates(logits, call.k, transform) for _, logits in linear.blocks()]
    part, keys, counts = zip(*blocks, strict=True)
    found = torch.cat(part, -1), torch.cat(keys), torch.cat(counts)
    gathered = Candidates(*(call.gather_ranks(each) for each in found))
    logprobs, indices, logsumexp, stats = impl.topk.combine(gathered, call.k)
    largest, stats = (*tokens, call.k), stats.view(STATISTICS, *tokens)
    return logprobs.view(largest), logsumexp.view(tokens), indices.view(largest), stats, kept


def _fake_topk(call: TopkCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    largest = (*call.tokens, call.k)
    logprobs, logsumexp, stats = (
        call.input.new_empty(shape, dtype=torch.float32) for shape in (largest, call.tokens, (STATISTICS, *call.tokens))
    )
    return logprobs, logsumexp, call.input.new_empty(largest, dtype=torch.int64), stats, call.kept_logits(keep)


def _topk_backward(
    impl: Implementation, topk_call: TopkCall, grad: Tensor | None, logsumexp_grad: Tensor | None, indices: Tensor,
    stats: Tensor, kept: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of the outputs; logits that were not kept are recomputed."""
    call, tokens = topk_call.given(indices), CompactedTokens(tuple(topk_call.tokens))
    stats, need = tokens.gather_statistics(stats), (need_dx, need_dw, need_db)
    linear = call.linear(impl, tokens, call.kept_matrix(kept))
    gradients = _gradients(
        impl, call, linear, grad, None, stats, need, call.recomputed_dtypes, logsumexp_grad=logsumexp_grad
    )
    return gradients.results(tokens)


def _topk_sharding(input, *_):
    return [([axis, axis, axis, 1 + axis, REPLICATE], [axis, REPLICATE, REPLICATE]) for axis in row_axes(input)]


class TopkOps:
    """The kernel ops of the largest log-probabilities; the derivative is that of given classes."""

    def __init__(self, name: str) -> None:
        self.forward = LinearOp(
            f"_{name}_fwd", TopkCall, _topk, outputs=5, fake=_fake_topk, products=lambda impl, call, keep: 1
        )
        self.backward = recomputing_op(f"_{name}_bwd", TopkCall, _topk_backward, keeps=True)
        self.forward.op.register_sharding(_topk_sharding)
        self.backward.op.register_sharding(_backward_sharding(3))  # two gradients, indices
        self.forward.op.register_autograd(
            lambda ctx, *grads: self.forward.recomputed_gradients(ctx, self.backward, *grads),
            setup_context=lambda ctx, inputs, output: self.forward.save_call(ctx, inputs, *output[2:]),
            depends_on=[DIFFERENTIABLE, DIFFERENTIABLE],
            takes_none=True,
            keeps=_keeps,
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward.op, self.backward.op

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities, classes and logsumexps from the public operator's arguments."""
        local, as_given, _ = local_fields(with_shard(arguments), [DIFFERENTIABLE], [])
        logprobs, logsumexp, indices, *_ = self.forward(TopkCall.checked(local))
        return as_given(logprobs), as_given(indices), as_given(logsumexp)


class GroupTerms(Protocol):
    """The loss of some groups as a function of log-probabilities and entropies `[groups, *group]`."""

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Return the sum over the groups, which autograd differentiates."""
        ...


@dataclass(frozen=True, kw_only=True)
class GroupsCall(LogprobsCall):
    """A loss of groups of tokens `[..., *group]`."""

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        return super().checked(with_shard(arguments))

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

    def plan_of_groups(self, impl: Implementation) -> Plan | None:
        """Return the plan by which logits are made once, whose blocks hold whole groups; None if they are made twice.

        On a CPU a group fits if it is no longer than a chunk that stays in cache, and the tokens that count are
        gathered, which leaves groups of any length. On a GPU they are the first of a chunk, which is one block.
        """
        if self.input.dtype == torch.float16:
            return None
        plan, compacts = self.plan(impl, group=self.group_rows), self.can_compact(impl)
        if self.tokens_are_groups:
            return plan
        holds_groups = plan.block_rows % max(self.group_rows, 1) == 0
        if compacts:
            holds_groups = holds_groups and not impl.on_host and plan.block_rows == plan.chunk_rows
        return plan if holds_groups else None


@dataclass(frozen=True)
class Groups:
    """The groups of a call, and the order that its tokens have in the blocks of the linear layer."""

    call: GroupsCall
    compacted: CompactedTokens

    def gradients(self, block: slice, *results: Tensor) -> list[Tensor | None]:
        """Return the gradients of a block's log-probabilities and entropies `[rows]`, None for zeros."""
        tokens, rows = self.compacted.part(block), self.call.group_rows
        terms = self.call.terms(slice(block.start // rows, block.stop // rows))
        _, grads = gradient_of(terms.loss, *(tokens.scatter(each).view(-1, *self.call.group) for each in results))
        return [None if grad is None else tokens.gather(grad.reshape(-1)) for grad in grads]


def _grouped(
    impl: Implementation, full_call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, ...]:
    """Return the loss, log-probabilities, entropies, and the gradients of input, weight and bias."""
    plan, need = full_call.plan_of_groups(impl), (need_dx, need_dw, need_db)
    segment = None if plan is None or full_call.tokens_are_groups else plan.chunk_rows
    compacted, call = full_call.compacted(impl, segment)
    needed = any(need) and call.tokens.numel() > 0
    at_once = needed and plan is not None
    kept = call.kept_matrix(call.kept_logits(needed and plan is None))
    linear = call.linear(impl, compacted, kept, plan or call.plan(impl, kept=kept.shape[0]))
    gradients = LinearGradients(linear, need if at_once else (False, False, False), call.saved_dtypes)
    in_order = Groups(call, CompactedTokens(tuple(call.tokens)))
    groups = in_order if full_call.tokens_are_groups else Groups(full_call, compacted)
    logprobs, entropy, stats = _grouped_forward(impl, call, gradients, groups if at_once else None)
    logprobs, entropy = compacted.scatter(logprobs.view(-1)), compacted.scatter(entropy)
    value, results = full_call.terms(slice(None)).loss, [full_call.grouped(each) for each in (logprobs, entropy)]
    if not any(need) or at_once:
        return value(*results), logprobs, entropy, *gradients.results(compacted)
    loss, grads = gradient_of(value, *results)
    given = (None if grad is None else compacted.gather(grad.view(full_call.tokens)) for grad in grads)
    gradients = _gradients(impl, call, linear, *given, stats, need, call.saved_dtypes)
    return loss, logprobs, entropy, *gradients.results(compacted)


def _grouped_forward(
    impl: Implementation, call: GroupsCall, gradients: LinearGradients, groups: Groups | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities `[N, 1]`, entropies `[N]` and statistics `[3, N]`; with groups add gradients."""
    target, support, transform = call.candidates(), call.supports(), call.transform(gradients.linear, call.ignore_index)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def results(block: slice, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank = impl.logprobs.statistics(logits, target[block], transform, rows_of(support, block))
        parts.append(impl.logprobs.combine(call.gather_ranks(rank), target[block], transform))
        return parts[-1]

    if groups is None:
        for block, logits in gradients.linear.blocks():
            results(block, logits)
        return concatenated(parts)
    for block, logits, dlogits in gradients.blocks():
        logprobs, entropy, stats = results(block, logits)
        grad, entropy_grad = groups.gradients(block, logprobs.view(-1), entropy)
        if logits.shape[1] > 0:
            grad, kept = None if grad is None else grad.view(-1, 1), rows_of(support, block)
            impl.logprobs.gradients(grad, entropy_grad, logits, target[block], stats, dlogits, transform, kept)
    return concatenated(parts)


def _fake_grouped(call: GroupsCall, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = call.input.new_empty((), dtype=torch.float32)
    logprobs, entropy = (call.input.new_empty(call.tokens, dtype=torch.float32) for _ in range(2))
    return loss, logprobs, entropy, *fake_gradients(call, need, call.saved_dtypes)


def _grouped_products(impl: Implementation, call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool) -> float:
    """Count one product for the logits, one more of those that are made twice, and one for each gradient."""
    needed = need_dx or need_dw or need_db
    twice = needed and call.plan_of_groups(impl) is None
    again = 1 - call.kept_rows / max(call.tokens.numel(), 1) if twice else 0
    return 1 + again + need_dx + need_dw


def groups_op(name: str, call_type: type[GroupsCall], scale: KernelOp) -> LinearOp:
    """Return the kernel op of a loss of groups, whose backward pass scales the saved gradients with `scale`."""
    op = LinearOp(name, call_type, _grouped, outputs=6, fake=_fake_grouped, products=_grouped_products)
    op.op.register_sharding(replicate_only)
    op.differentiate_by_scaling(scale, lambda inputs, output: None)
    return op
