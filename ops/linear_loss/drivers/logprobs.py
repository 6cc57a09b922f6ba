"""The drivers of log-probabilities, chunk by chunk, and of losses of groups of tokens.

`linear_logprobs` returns log-probabilities and entropies, and its backward pass makes the gradients: of exponentials
that were kept, where they fit, or with the logits made once more. `linear_topk` returns the largest log-probabilities,
and its backward pass is that of the same classes: of logits, which its forward pass has, that were kept. A loss of
groups makes its gradients in the forward pass. A group is the tokens on which each token's gradient depends: one token,
a sequence, or a pair of sequences. Where chunks hold whole groups the logits are made once, else all of them come
first. Where tokens are skipped on a GPU, those that count come first in each chunk of whole groups, instead of in the
batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import (
    CompactedTokens,
    LinearOp,
    fake_gradients,
    recomputing_op,
    with_shard,
)
from llmk.ops.linear_loss.chunked.plan import Plan, fits
from llmk.ops.linear_loss.drivers._rows_call import RowsCall, check_classes
from llmk.ops.linear_loss.head import DIFFERENTIABLE
from llmk.ops.linear_loss.kernels import MAX_K, Candidates, Implementation
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows.engine import SoftmaxRows, first_pass, in_forward, second_pass
from llmk.ops.linear_loss.rows.logits import LogitRows
from llmk.ops.linear_loss.rows.projection import Gradients
from llmk.ops.linear_loss.rows.softmax import STATISTICS, RowGradients, RowResults, statistics
from llmk.ops.linear_loss.rows.support import MOST_SUPPORT, check_support_ids
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    check_dtype,
    check_flag,
    check_number,
    check_same,
    gradient_of,
    replicate_only,
    row_axes,
)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall(RowsCall):
    """A linear layer whose outputs are scaled, capped and divided by a temperature before their softmax."""

    logit_scale: float
    softcap: float
    temperature: float

    @property
    def transform(self) -> Transform:
        return Transform(self.logit_scale, 1.0 / self.temperature, self.softcap, not self.float32_logits)

    @property
    def entropies_serve(self) -> bool:
        """True if the exponentials give the gradient of entropies too: those of float32, without a cap."""
        return not self.softcap and self.kept_element == 4


@dataclass(frozen=True, kw_only=True)
class LogprobsCall(SoftmaxCall):
    """A linear layer and the classes whose log-probabilities are returned."""

    token_tensors = "input", "target", "support"
    target: Tensor  # [...] or [..., K]
    support: Tensor | None = None  # [..., L]: the classes over which the softmax is, padded with negative ids

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        call = super().checked(arguments)
        check_dtype("target", call.target, (torch.int64, torch.int32))
        check_same("target", call.target, "input", call.input)
        if call.support is not None:
            check_support(call.support, call)
        return call

    @property
    def candidates(self) -> int:
        """The number of classes of each token that are asked for."""
        return self.target.shape[-1] if self.target.dim() == self.input.dim() else 1

    def row_classes(self) -> Tensor:
        return self.target.reshape(-1, self.candidates)

    @property
    def keeps_exponentials(self) -> bool:
        """True if the exponentials of the forward pass can be the gradient's."""
        return self.candidates == 1 and self.support is None and self.input.dtype != torch.float16

    def mask(self) -> Tensor:
        mask = self.target.long() != self.ignore_index  # int32 would wrap an index that it does not hold
        return mask.any(-1) if self.target.dim() == self.input.dim() else mask

    def logprob_rows(
        self, impl: Implementation, compacted: CompactedTokens, chosen: Plan | None = None, *, moments: bool = True,
        **options: Any,
    ) -> SoftmaxRows:  # fmt: skip
        """Return the rows of this call's tokens, which are compacted already; `moments` where entropies are asked for.

        Raises:
            IndexError: On the host, a class or an id of a support is none.
        """
        check_classes(impl, self.target, self)
        support = None if self.support is None else self.support.reshape(-1, self.support.shape[-1])
        if support is not None and impl.on_host:
            check_support_ids(support, self.num_classes)
        return self.softmax_rows(impl, compacted, chosen, moments=moments, support=support, **options)


@dataclass(frozen=True, kw_only=True)
class CandidatesCall(LogprobsCall):
    """The same, with entropies, and the log-probability of all other classes together after those of the candidates."""

    add_tail: bool = False
    entropy: bool = True

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        call = super().checked(arguments)
        check_flag("add_tail", call.add_tail)
        check_flag("entropy", call.entropy)
        if call.add_tail and call.support is not None:
            raise ValueError(f"support: expected None with add_tail, got a tensor of {tuple(call.support.shape)}")
        tokens, shape = tuple(call.tokens), tuple(call.target.shape)
        if shape != tokens and (call.target.dim() != call.input.dim() or shape[:-1] != tokens or shape[-1] == 0):
            raise ValueError(f"target: expected shape {tokens}, or {tokens} and K candidates, got {shape}")
        return call

    @property
    def keeps_exponentials(self) -> bool:
        return super().keeps_exponentials and not self.add_tail

    @property
    def logprobs_shape(self) -> tuple[int, ...]:
        return (*self.tokens, self.candidates + 1) if self.add_tail else tuple(self.target.shape)

    @property
    def entropy_shape(self) -> tuple[int, ...]:
        return tuple(self.tokens) if self.entropy else (0,)

    @property
    def statistics(self) -> int:
        """The number of values that are saved for a token."""
        return STATISTICS + self.add_tail

    def rows(self, impl: Implementation, compacted: CompactedTokens) -> SoftmaxRows:
        return self.logprob_rows(impl, compacted, moments=self.entropy, with_tail=self.add_tail)


def check_support(support: Tensor, call: LogprobsCall) -> None:
    """Check the dtype, the device and the shape; whether ids are classes is checked where logits are."""
    check_dtype("support", support, (torch.int64, torch.int32))
    check_same("support", support, "input", call.input)
    tokens, shape = tuple(call.tokens), tuple(support.shape)
    if len(shape) == 0 or shape[:-1] != tokens or not 1 <= shape[-1] <= MOST_SUPPORT:
        expected = f"{tokens} and from 1 to {MOST_SUPPORT} ids for each token"
        raise ValueError(f"support: expected shape {expected}, got {shape}")


def _forward(impl: Implementation, full_call: CandidatesCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, the statistics `[S, ...]` of each token, and exponentials that are kept."""
    compacted, call = full_call.compacted(impl)
    kept = full_call.kept_buffer(keep and full_call.keeps_exponentials)
    stats, results, _ = first_pass(call.rows(impl, compacted), call.kept_matrix(kept))
    of_rows, tail = results.logprobs, results.tail
    if tail is not None:
        of_rows = torch.cat((of_rows, tail.unsqueeze(-1)), -1)
    logprobs = compacted.scatter_output(of_rows).view(full_call.logprobs_shape)
    entropy = compacted.scatter_output(results.entropy) if call.entropy else logprobs.new_empty((0,))
    return logprobs, entropy, compacted.scatter_statistics(stats), kept


def _backward(
    impl: Implementation, full_call: CandidatesCall, grad: Tensor | None, entropy_grad: Tensor | None, stats: Tensor,
    kept: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of the outputs."""
    compacted, call = full_call.compacted(impl)
    entropy_grad = entropy_grad if call.entropy else None
    grad, entropy_grad = (None if g is None else compacted.gather(g) for g in (grad, entropy_grad))
    tail = None
    if grad is not None:
        grad = grad.reshape(-1, call.candidates + call.add_tail)
        grad, tail = grad[:, : call.candidates], grad[:, call.candidates] if call.add_tail else None
    grads = RowGradients(grad, None if entropy_grad is None else entropy_grad.reshape(-1), tail=tail)
    rows = call.rows(impl, compacted)
    gradients = Gradients(rows, (need_dx, need_dw, need_db), call.recomputed_dtypes)
    stats = compacted.gather_statistics(stats)
    second_pass(rows, stats, lambda block, _: grads.of(block), gradients, call.kept_matrix(kept))
    return gradients.results()


def _fake_forward(call: CandidatesCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs, entropy, stats = (
        call.input.new_empty(shape, dtype=torch.float32)
        for shape in (call.logprobs_shape, call.entropy_shape, (call.statistics, *call.tokens))
    )
    return logprobs, entropy, stats, call.kept_buffer(keep and call.keeps_exponentials)


def _forward_sharding(input, entropy):
    return [
        ([axis, axis if entropy else REPLICATE, 1 + axis, REPLICATE], [axis, REPLICATE, REPLICATE, axis, axis])
        for axis in row_axes(input)
    ]


def _backward_sharding(input, entropy, need_dx):
    return [
        _backward_splits(axis, need_dx, [axis, axis, axis, axis if entropy else REPLICATE], [REPLICATE])
        for axis in row_axes(input)
    ]


def _topk_backward_sharding(input, need_dx):
    return [_backward_splits(axis, need_dx, [axis] * 3, [REPLICATE]) for axis in row_axes(input)]


def _backward_splits(axis: Any, need_dx: bool, tokens: list[Any], kept: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the splits of the gradients, and of a call's tensors, given those of tokens and of what was kept."""
    gradients = [axis if need_dx else REPLICATE, PARTIAL, PARTIAL]
    return gradients, [axis, REPLICATE, REPLICATE, *tokens, 1 + axis, *kept]


def _keeps(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> tuple[bool]:
    """Return True if logits are kept: for a gradient, unless each rank would keep some of its part of the tokens."""
    input = args[0]
    return (any(needs_input_grad[:3]) and (type(input) is Tensor or not hasattr(input, "__tensor_flatten__")),)


def _is_kept(call: CandidatesCall, grad: Tensor | None, entropy_grad: Tensor | None, stats: Tensor, *rest: Any) -> bool:
    """Return True if the exponentials that were kept are what the gradient is made of."""
    serves = entropy_grad is None or not call.entropy or call.entropies_serve
    return serves and call.kept_matrix(rest[0]) is not None


def _recompute(forward: LinearOp, backward: LinearOp) -> None:
    """Register the derivative by `backward` of an op whose first two outputs have one; it gets the others."""
    forward.op.register_autograd(
        lambda ctx, *grads: forward.recomputed_gradients(ctx, backward, *grads),
        setup_context=lambda ctx, inputs, output: forward.save_call(ctx, inputs, *output[2:]),
        depends_on=[DIFFERENTIABLE, DIFFERENTIABLE],
        takes_none=True,
        keeps=_keeps,
    )


linear_logprobs_fwd = LinearOp(
    "_linear_logprobs_fwd", CandidatesCall, _forward, outputs=4, fake=_fake_forward, products=lambda impl, call, keep: 1
)
linear_logprobs_bwd = recomputing_op("_linear_logprobs_bwd", CandidatesCall, _backward, kept=_is_kept)
linear_logprobs_fwd.op.register_sharding(_forward_sharding)
linear_logprobs_bwd.op.register_sharding(_backward_sharding)
_recompute(linear_logprobs_fwd, linear_logprobs_bwd)


def check_k(k: int) -> None:
    check_number("k", k, 1, MAX_K, f"1 to {MAX_K}")


TOPK_STATISTICS = 2
"""The number of float32 values that are saved for a row: its largest logit and sum of exponentials."""


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

    @property
    def kept_element(self) -> int:
        return torch.float32.itemsize  # of a logit

    @property
    def keeps_logits(self) -> bool:
        """True if the logits of the forward pass can be the backward pass's: a cap's slope is not in them."""
        return not self.softcap

    def given(self, indices: Tensor) -> LogprobsCall:
        """Return the call for the log-probabilities of given classes."""
        return LogprobsCall.of(vars(self), target=indices)


def _topk(impl: Implementation, call: TopkCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, logsumexps, classes, each token's largest logit and sum `[2, ...]`, and logits kept."""
    tokens = tuple(call.tokens)
    rows, blocks = LogitRows(call.projection(impl), CompactedTokens(tokens), call.plan(impl, matrices=1)), []
    kept = call.kept_buffer(keep and call.keeps_logits)
    logits = call.kept_matrix(kept)
    buffer = rows.buffer(rows.plan.block_rows) if logits is None else logits
    for block in (block for chunk in rows.chunks() for block in rows.slices(chunk)):
        y = buffer[: block.stop - block.start] if logits is None else logits[block]
        sums, tiles = rows.projection.logits_and_sums(block, rows.end(block), y)
        blocks.append(impl.topk.candidates(y, sums, tiles, call.k, call.first_class))
    part, keys, counts = zip(*blocks, strict=True)
    found = torch.cat(part, -1), torch.cat(keys), torch.cat(counts)
    gathered = Candidates(*(call.own_shard.gather(each).flatten(0, 1) for each in found))
    logprobs, indices, logsumexp, stats = impl.topk.combine(gathered, call.k)
    largest, stats = (*tokens, call.k), stats.view(TOPK_STATISTICS, *tokens)
    return logprobs.view(largest), logsumexp.view(tokens), indices.view(largest), stats, kept


def _fake_topk(call: TopkCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    largest = (*call.tokens, call.k)
    logprobs, logsumexp, stats = (
        call.input.new_empty(shape, dtype=torch.float32)
        for shape in (largest, call.tokens, (TOPK_STATISTICS, *call.tokens))
    )
    kept = call.kept_buffer(keep and call.keeps_logits)
    return logprobs, logsumexp, call.input.new_empty(largest, dtype=torch.int64), stats, kept


def _topk_backward(
    impl: Implementation, topk_call: TopkCall, grad: Tensor | None, logsumexp_grad: Tensor | None, indices: Tensor,
    stats: Tensor, kept: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of the outputs; the logits are made again if none were kept."""
    call, tokens = topk_call.given(indices), CompactedTokens(tuple(topk_call.tokens))
    rows = call.softmax_rows(impl, tokens, leaves_out_own=False, logits=topk_call.kept_matrix(kept))
    (m, total), nothing = stats.view(TOPK_STATISTICS, -1).unbind(), stats.new_zeros(indices.shape[:-1].numel())
    grads = RowGradients(
        None if grad is None else grad.reshape(-1, topk_call.k),
        None,
        None if logsumexp_grad is None else logsumexp_grad.reshape(-1),
    )
    gradients = Gradients(rows, (need_dx, need_dw, need_db), call.recomputed_dtypes)
    second_pass(rows, statistics(m, total, nothing, nothing), lambda block, _: grads.of(block), gradients)
    return gradients.results()


def _topk_sharding(input, *_):
    return [([axis, axis, axis, 1 + axis, REPLICATE], [axis, REPLICATE, REPLICATE]) for axis in row_axes(input)]


def _keeps_logits(call: TopkCall, *rest: Any) -> bool:
    """Return True if the logits were kept, the last of what a backward pass gets before what is needed of it."""
    return call.kept_matrix(rest[-4]) is not None


linear_topk_fwd = LinearOp(
    "_linear_topk_fwd", TopkCall, _topk, outputs=5, fake=_fake_topk, products=lambda impl, call, keep: 1
)
linear_topk_bwd = recomputing_op("_linear_topk_bwd", TopkCall, _topk_backward, kept=_keeps_logits)
linear_topk_fwd.op.register_sharding(_topk_sharding)
linear_topk_bwd.op.register_sharding(_topk_backward_sharding)
_recompute(linear_topk_fwd, linear_topk_bwd)


@dataclass(frozen=True, kw_only=True)
class GroupsCall(LogprobsCall):
    """A loss of groups of tokens `[..., *group]`."""

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Self:
        """Check the arguments, and that tokens which are skipped are skipped in all that the loss reads.

        Raises:
            TypeError: `token_tensors` leaves out a tensor of tokens, or has more where groups are of several.
        """
        call = super().checked(with_shard(arguments))
        own, found = LogprobsCall.token_tensors, call.token_tensors
        if not set(own) <= set(found) or (set(found) != set(own) and len(call.group) > 0):
            expected = f"{own}, and more only where a group is one token"
            raise TypeError(f"{cls.__name__}.token_tensors: expected {expected}, got {found}")
        return call

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The shape of a group of tokens, () for a single token."""
        raise NotImplementedError

    def loss(self, groups: slice) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of some groups as a function of their log-probabilities and entropies `[groups, *group]`.

        It is the sum over the groups, which autograd differentiates.
        """
        raise NotImplementedError

    def grouped(self, values: Tensor) -> Tensor:
        """Reshape a value of each token to `[groups, *group]`."""
        return values.reshape(self.tokens[: len(self.tokens) - len(self.group)].numel(), *self.group)

    @cached_property
    def group_rows(self) -> int:
        """The number of tokens of a group."""
        return math.prod(self.group)

    def can_compact(self, impl: Implementation) -> bool:
        """Return True if tokens are skipped; on a CPU that would leave groups of any length, whose logits are twice."""
        return super().can_compact(impl) and (len(self.group) == 0 or not impl.on_host)

    @property
    def has_entropies(self) -> bool:
        """True if the loss is a function of entropies."""
        return False

    @property
    def makes_gradients_again(self) -> bool:
        """True if the logits are made twice although a chunk holds whole groups."""
        unserved = self.has_entropies and not self.entropies_serve
        return unserved or self.support is not None or self.input.dtype == torch.float16

    def plan_of_groups(self, impl: Implementation) -> Plan | None:
        """Return the plan whose chunks hold whole groups, so that gradients are made at once; None if a second pass is.

        On a CPU a group fits if it is no longer than a chunk that stays in cache.
        """
        if len(self.group) == 0:
            return self.plan(impl)
        group = max(self.group_rows, 1)
        if impl.on_host:
            holds_groups = group <= self.plan(impl).chunk_rows
        else:
            within = not self.chunk_size or group <= self.chunk_size
            holds_groups = within and fits(group, self.mean_classes, self.input.dtype.itemsize)
        return self.plan(impl, group=group) if holds_groups else None


class GroupObjective:
    """The loss of the groups of a call as a function of rows, in the order that its tokens have there.

    It has its value where one chunk holds all groups in the order of the tokens.
    """

    def __init__(self, call: GroupsCall, compacted: CompactedTokens) -> None:
        self.call, self.compacted = call, compacted
        self.value: Tensor | None = None

    def gradients(self, rows: slice, results: RowResults) -> RowGradients:
        """Return the gradients of the log-probabilities and entropies of the rows of whole groups."""
        tokens, group = self.compacted.part(rows), max(self.call.group_rows, 1)
        loss = self.call.loss(slice(rows.start // group, rows.stop // group))
        given = [tokens.scatter(each).view(-1, *self.call.group) for each in (results.logprobs, results.entropy)]
        value, grads = gradient_of(loss, *given)
        if rows == slice(0, self.call.tokens.numel()):
            self.value = value
        grad, entropy_grad = [None if g is None else tokens.gather(g.reshape(tokens.shape)) for g in grads]
        return RowGradients(None if grad is None else grad.unsqueeze(-1), entropy_grad)


def _grouped(
    impl: Implementation, full_call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, ...]:
    """Return the loss, log-probabilities, entropies, and the gradients of input, weight and bias."""
    plan, need = full_call.plan_of_groups(impl), (need_dx, need_dw, need_db)
    segment = None if plan is None or len(full_call.group) == 0 else plan.chunk_rows
    compacted, call = full_call.compacted(impl, segment)
    rows = call.logprob_rows(impl, compacted, plan)
    needed = any(need) and rows.x.shape[0] > 0
    gradients, kept, loss = Gradients(rows, need, call.saved_dtypes), None, None
    if needed and plan is not None:
        of_tokens = len(full_call.group) == 0 and compacted.index is not None
        objective = GroupObjective(
            *((call, CompactedTokens(tuple(call.tokens))) if of_tokens else (full_call, compacted))
        )
        stats, results, _ = in_forward(rows, objective.gradients, gradients)
        loss = None if of_tokens else objective.value
    else:
        serves = call.keeps_exponentials and not call.makes_gradients_again
        kept = call.kept_matrix(call.kept_buffer(needed and serves))
        stats, results, _ = first_pass(rows, kept)
    logprobs, entropy = map(compacted.scatter_output, (results.logprobs.squeeze(-1), results.entropy))
    if loss is not None:
        return loss, logprobs, entropy, *gradients.results()
    value, given = full_call.loss(slice(None)), [full_call.grouped(each) for each in (logprobs, entropy)]
    if not needed or plan is not None:
        return value(*given), logprobs, entropy, *gradients.results()
    loss, grads = gradient_of(value, *given)
    grad, entropy_grad = (None if g is None else compacted.gather(g.reshape(full_call.tokens)) for g in grads)
    of_rows = RowGradients(None if grad is None else grad.reshape(-1, 1), entropy_grad)
    second_pass(rows, stats, lambda block, _: of_rows.of(block), gradients, kept)
    return loss, logprobs, entropy, *gradients.results()


def _fake_grouped(call: GroupsCall, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = call.input.new_empty((), dtype=torch.float32)
    logprobs, entropy = (call.input.new_empty(call.tokens, dtype=torch.float32) for _ in range(2))
    return loss, logprobs, entropy, *fake_gradients(call, need, call.saved_dtypes)


def _grouped_products(impl: Implementation, call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool) -> float:
    """Count one product for the logits, one more if they are made twice, and one for each gradient."""
    needed = need_dx or need_dw or need_db
    kept = call.keeps_exponentials and call.kept_matrix(call.kept_buffer(True)) is not None
    twice = needed and (call.makes_gradients_again or (call.plan_of_groups(impl) is None and not kept))
    return 1 + twice + need_dx + need_dw


def groups_op(name: str, call_type: type[GroupsCall]) -> tuple[LinearOp, tuple[KernelOp, KernelOp]]:
    """Return the op of a loss of groups, and its kernel ops: the backward pass scales the saved gradients."""
    op = LinearOp(f"_{name}_fwd", call_type, _grouped, outputs=6, fake=_fake_grouped, products=_grouped_products)
    op.op.register_sharding(replicate_only)
    return op, op.differentiate_by_scaling()
