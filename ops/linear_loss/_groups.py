"""Losses of groups of tokens by their log-probabilities, whose gradients are made in the forward pass: their driver.

A group is what the coefficient of each of its tokens depends on: a token, a sequence, a pair of sequences. Where a
chunk of logits holds whole groups, their coefficients are known with it, and the logits are made once; where it does
not, the logits of all are made twice.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmk.ops.linear_loss._call import CallOp, fake_gradients
from llmk.ops.linear_loss._chunked_linear import LOGITS_BUDGET, ChunkedLinear, LinearGradients
from llmk.ops.linear_loss._ignored import Kept
from llmk.ops.linear_loss._logprob_rows import CPU, KERNELS, LogprobRows
from llmk.ops.linear_loss._scaled import differentiate_by_scaling
from llmk.ops.linear_loss.linear_logprobs import LogprobsCall
from llmk.registry import KernelOp, cdiv, replicate_only
from llmk.registry.backends import kernels_on_cpu

GROUP_BUDGET = 2 * LOGITS_BUDGET
"""Bytes of a chunk's logits where one group needs more than LOGITS_BUDGET: without it the logits of all are made twice,
which takes a third longer. On an H200 pairs of 2 x 4096 tokens, 2048 x 151936, took 130 ms so, three products 77."""


class Terms(Protocol):
    """What the loss of some groups is a function of, besides log-probabilities and entropies `[groups, *group]`."""

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """A sum over the groups."""
        ...

    def slopes(self, logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Its derivative by each log-probability, and by each entropy, None for zeros."""
        ...


@dataclass(frozen=True)
class GroupsCall(LogprobsCall):
    """Tokens `[..., *group]`."""

    @property
    def group(self) -> torch.Size:
        """The shape of a group of tokens; where it is a single one, no axis."""
        raise NotImplementedError

    def of_groups(self, groups: slice) -> Terms:
        """Of those of all groups, in their order."""
        raise NotImplementedError

    def grouped(self, values: Tensor) -> Tensor:
        """Of all tokens, `[groups, *group]`."""
        return values.reshape(self.tokens[: len(self.tokens) - len(self.group)].numel(), *self.group)

    @property
    def group_rows(self) -> int:
        """Tokens of a group."""
        return self.group.numel()

    @property
    def tokens_are_groups(self) -> bool:
        return len(self.group) == 0

    def linear(self, kept: Kept | None) -> ChunkedLinear:
        """In chunks of whole groups where one fits.

        On a CPU one fits that is no longer than a chunk that stays in cache. Of the tokens that count alone no chunk
        holds whole groups, unless they are tokens.
        """
        count = Kept.count_of(kept)
        linear = ChunkedLinear(self.input, self.linear_weight, self.linear_bias, self.chunk_size, count=count)
        N, rows = linear.x.shape[0], linear.chunk_rows
        if kept is not None or self.tokens_are_groups or N == 0:
            return linear
        group = self.group_rows
        fits = GROUP_BUDGET // (self.num_classes * self.input.element_size())
        in_cache = self.input.device.type == "cpu" and not kernels_on_cpu()
        given = self.chunk_size > 0 or in_cache
        whole = rows // group if given else min(fits // group, cdiv(N // group, cdiv(N, rows)))
        linear.chunk_rows = whole * group or rows
        return linear


def _fwd(
    rows: LogprobRows, call: GroupsCall, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, log-probabilities, entropies, and the gradients of the loss."""
    kept = call.kept(rows)
    of_kept = call.of_kept(kept)
    linear, target = of_kept.linear(kept), of_kept.target.reshape(-1, 1).contiguous()
    gradients = LinearGradients(linear, (need_dx, need_dw, need_db), call.dtypes[0])
    needed = any(gradients.need) and linear.x.shape[0] > 0
    whole = call.tokens_are_groups or (kept is None and linear.chunk_rows % max(call.group_rows, 1) == 0)
    logprobs, entropy, stats = _forward(rows, of_kept, gradients, target, needed and whole)
    if kept is not None:
        logprobs, entropy = kept.spread(logprobs), kept.spread(entropy)
    logprobs, entropy = logprobs.view(call.tokens), entropy.view(call.tokens)
    terms = call.of_groups(slice(None))
    if any(gradients.need) and not (needed and whole):
        slopes, of_entropy = terms.slopes(call.grouped(logprobs))
        if kept is not None:
            slopes = kept.rows(slopes.view(call.tokens))
            of_entropy = None if of_entropy is None else kept.rows(of_entropy.view(call.tokens))
        _backward(rows, of_kept, gradients, target, stats, slopes, of_entropy)
    loss = terms.loss(call.grouped(logprobs), call.grouped(entropy))
    dx = gradients.dx if kept is None or not need_dx else kept.spread(gradients.dx)
    return loss, logprobs, entropy, dx, gradients.dw.to(call.dtypes[1]), gradients.db


def _forward(
    rows: LogprobRows, call: GroupsCall, gradients: LinearGradients, target: Tensor, at_once: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities `[N, 1]`, entropies `[N]` and statistics `[3, N]`; and `at_once` the gradients."""
    scores, parts = call.scores(gradients.linear), []
    for chunk, logits in gradients.linear.chunks():
        part = rows.combine(rows.statistics(logits, target[chunk], scores), target[chunk], scores)
        parts.append(part)
        if at_once:
            groups = slice(chunk.start // call.group_rows, chunk.stop // call.group_rows)
            logprobs, _, stats = part
            slopes, of_entropy = call.of_groups(groups).slopes(logprobs.view(-1, *call.group))
            of_entropy = None if of_entropy is None else of_entropy.reshape(-1)
            rows.gradients(slopes.reshape(-1, 1), of_entropy, logits, target[chunk], stats, scores)
            gradients.add(chunk, logits)
    logprobs, entropy, stats = (torch.cat(of, -1 if i == 2 else 0) for i, of in enumerate(zip(*parts, strict=True)))
    return logprobs, entropy, stats


def _backward(
    rows: LogprobRows, call: GroupsCall, gradients: LinearGradients, target: Tensor, stats: Tensor, slopes: Tensor,
    of_entropy: Tensor | None,
) -> None:  # fmt: skip
    """The gradients from those of log-probabilities and of entropies, `[...]`, the logits made again."""
    scores, slopes = call.scores(gradients.linear), slopes.reshape(-1, 1)
    for chunk, logits in gradients.linear.chunks():
        of_chunk = None if of_entropy is None else of_entropy.reshape(-1)[chunk]
        rows.gradients(slopes[chunk], of_chunk, logits, target[chunk], stats[:, chunk], scores)
        gradients.add(chunk, logits)


def _fake(call: GroupsCall, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = call.input.new_empty((), dtype=torch.float32)
    logprobs, entropy = (call.input.new_empty(call.tokens, dtype=torch.float32) for _ in range(2))
    return loss, logprobs, entropy, *fake_gradients(call, need, call.dtypes)


def groups_op(name: str, call_type: type[GroupsCall], scale: KernelOp) -> CallOp:
    """The kernel op of such a loss, with its derivative, which `scale` makes of the gradients."""
    op = CallOp(
        name, call_type, _fwd, kernels=KERNELS, cpu=CPU, fake=_fake, products=lambda call, dx, dw, db: 1 + dx + dw
    )
    op.op.register_sharding(replicate_only)
    differentiate_by_scaling(op, scale, lambda _: True, constants=2)
    return op
