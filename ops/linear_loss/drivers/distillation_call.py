"""A call of distillation: a student's linear layer, its teachers, and what the losses from them have in common."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import CompactedTokens, LinearCall
from llmk.ops.linear_loss.kernels import Implementation, Softmaxes
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.objectives.topk_divergence import topk_divergence
from llmk.ops.linear_loss.rows.logits import LogitRows, largest
from llmk.ops.linear_loss.rows.products import Weights
from llmk.ops.linear_loss.rows.projection import projection_of
from llmk.ops.loss.divergence_math import Mixture

MOST_CLASSES = 1024
"""The most classes of a token that all top-k teachers have."""
TEACHER = ["teacher_input", "teacher_linear_weight", "teacher_linear_bias"]


class Teacher(NamedTuple):
    """A teacher's linear layer, and its part of the loss."""

    input: Tensor  # [..., H']
    linear_weight: Tensor  # [V, H']
    linear_bias: Tensor | None  # [V]
    temperature: float
    softcap: float
    vocab_map: Tensor | None = None  # [V'], the student's class of each; None where they are the same


@dataclass(frozen=True)
class TopkTeachers:
    """Teachers that are known by their log-probabilities of some classes of each token, one after the other."""

    ids: Tensor  # [N, K], with the K of all teachers added up; -1 for a class that is not there
    logprobs: Tensor  # [N, K], float32
    sizes: list[int]  # each teacher's K
    beta: float
    add_tail: bool  # the other classes are one class more

    def losses(self, block: slice, logprobs: Tensor, tails: Tensor | None = None) -> Tensor:
        """Return the divergences `[teachers, M]` of a block's rows.

        Args:
            block: The rows.
            logprobs: The student's log-probabilities of the classes, `[M, K]`.
            tails: Those of all other classes than a teacher's together, `[teachers, M]`, with `add_tail`.
        """
        present = self.ids[block] >= 0
        parts = zip(*(each.split(self.sizes, -1) for each in (logprobs, self.logprobs[block], present)), strict=True)
        return torch.stack(
            [
                topk_divergence(s, t, here, self.beta, None if tails is None else tails[i])
                for i, (s, t, here) in enumerate(parts)
            ]
        )


@dataclass(frozen=True, kw_only=True)
class DistillationCall(LinearCall):
    """A student's linear layer, and what the losses from one teacher or several have in common."""

    labels: Tensor | None  # [...]
    row_weight: Tensor | None  # [...]
    beta: float
    temperature: float
    softcap: float
    ignore_index: int
    ce_weight: float = 0.0  # weight of a cross entropy with the labels, 0 for none

    @property
    def teachers(self) -> list[Teacher]:
        """The teachers with hidden states."""
        raise NotImplementedError

    def topk_teachers(self, mask: Tensor, *, on_host: bool) -> TopkTeachers | None:
        """Return the others, with no class at tokens `[N]` that do not count; None for none.

        Raises:
            IndexError: On the host, an id is no class.
        """
        return None

    @property
    def has_topk_teachers(self) -> bool:
        return False

    def teacher_weights(self, mask: Tensor) -> Tensor:
        """Return the weights `[D, N]` of all teachers at the tokens that count, 0 at others."""
        return mask.float().unsqueeze(0)

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes in which the divergences and the cross entropy are returned beside the loss; `(0,)` for not."""
        raise NotImplementedError

    def linears(self, impl: Implementation, compacted: CompactedTokens) -> tuple[LogitRows, list[LogitRows]]:
        """Return the student's and the teachers' layers in the same blocks."""
        matrices = 1 + (len(self.teachers) > 0) + self.adds_gradients
        if any(each.vocab_map is not None for each in self.teachers):
            matrices += 2  # the student's logits of the map, and the gradient for these
        plan, transform = self.plan(impl, matrices=matrices), Transform(rounded=not self.float32_logits)

        def layer(input: Tensor, weight: Tensor, bias: Tensor | None) -> LogitRows:
            weights = Weights(weight, None if bias is None else bias.contiguous(), None, transform)
            return LogitRows(projection_of(input, weights, self.shard, not impl.on_host), compacted, plan)

        student = layer(self.input, self.linear_weight, self.linear_bias)
        return student, [layer(*each[:3]) for each in self.teachers]

    def softmaxes(self, teacher: Teacher) -> Softmaxes:
        return Softmaxes(
            mixture=Mixture(self.beta),
            temperature=self.temperature,
            teacher_temperature=teacher.temperature,
            softcap=self.softcap,
            teacher_softcap=teacher.softcap,
            exact=self.input.dtype == torch.float32,
        )

    @property
    def adds_gradients(self) -> bool:
        """True if a block's gradient is a float32 sum, beside what the last teacher's is added to as it is written."""
        has_maps = any(each.vocab_map is not None for each in self.teachers)
        return len(self.teachers) > 1 or has_maps or self.has_topk_teachers

    def gradient_is_measured(self, impl: Implementation) -> bool:
        """Return True if a float16 gradient needs its size and a bound is far or none.

        That is so of log-ratios, and with a small temperature. Plain PyTorch has float32 gradients on a CPU.
        """
        is_float16 = self.input.dtype == torch.float16 and not impl.on_host
        return is_float16 and (self.beta == 1 or self.temperature < 1)

    def largest_gradient(self, loss_grads: Tensor, ce_grads: Tensor | None) -> Tensor:
        """Return what no element of the logits' gradient exceeds, for those of the teachers' losses `[D, N]`.

        That of a divergence is r - p R (`kernels/_divergence.py`), where r and R are at most 1 each, but for beta 1.
        That of top-k classes is no larger: so it is of these and the tail, which hands it on to the other classes in
        parts.
        """
        bound = largest(loss_grads.abs().sum(0)) * (2 / self.temperature)
        return bound if ce_grads is None else bound + largest(ce_grads)

    def mask(self) -> Tensor:
        if self.labels is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.input.device)
        return self.labels.long() != self.ignore_index  # int32 would wrap an index that it does not hold


@dataclass(frozen=True, kw_only=True)
class OneTeacherCall(DistillationCall):
    """A call with one teacher at the student's temperature."""

    token_tensors = "input", "teacher_input", "labels", "row_weight"
    teacher_input: Tensor  # [..., H']
    teacher_linear_weight: Tensor  # [V, H']
    teacher_linear_bias: Tensor | None  # [V]
    teacher_softcap: float

    @property
    def teachers(self) -> list[Teacher]:
        layer = self.teacher_input, self.teacher_linear_weight, self.teacher_linear_bias
        return [Teacher(*layer, self.temperature, self.teacher_softcap)]

    @property
    def term_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ((), ()) if self.ce_weight > 0 else ((0,), (0,))
