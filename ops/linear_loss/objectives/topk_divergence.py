r"""The divergence from a teacher's K largest classes of a token, as a function of the student's log-probabilities.

With t_k and s_k the teacher's and the student's probabilities of the K classes, each is completed to a distribution: by
a class more, the tail, which has what is left,

    t_0 = 1 - sum(t_k),    s_0 = sum of the student's probabilities of all other classes

or without one by dividing by the sum over the K classes. The divergence of the two is that of `fused_linear_jsd`: with
m = beta * t + (1 - beta) * s

    0 < beta < 1:  f = beta * t * log(t / m) + (1 - beta) * s * log(s / m)
    beta = 0:      f = t * log(t / s)
    beta = 1:      f = s * log(s / t)

A class may be absent. It has no probability, and a token all of whose classes are absent has the divergence 0.

Autograd differentiates it, in a kernel op too.

Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649, for the divergence. Reference implementation:
`trl.experimental.server_distillation`, `loss_add_tail`, https://github.com/huggingface/trl.
"""

import torch
from torch import Tensor

from llmk.ops.common.math import logsumexp_cpu
from llmk.ops.linear_loss.objectives.preference import log1mexp
from llmk.ops.loss.divergence_math import divergence_of_cpu

NOT_THERE = -1
"""The id of an absent class, as in a support: the index to ignore of targets may be a class."""
_LEAST_LOGPROB = -1e4
"""The log of a probability that is 0 in any dtype."""


def topk_divergence(
    student: Tensor, teacher: Tensor, present: Tensor, beta: float, student_tail: Tensor | None
) -> Tensor:  # fmt: skip
    """Return the divergence `[...]` from log-probabilities `[..., K]` and the mask of the classes that are present.

    Args:
        student, teacher: Log-probabilities of the classes.
        present: The mask.
        beta: From 0 to 1.
        student_tail: The log-probability `[...]` of the student's other classes together; None to normalize both.
    """
    add_tail = student_tail is not None
    s = _distribution(student, present, student_tail)
    t = _distribution(teacher, present, _what_is_left(teacher, present) if add_tail else None)
    # Probabilities that are 0 from finite logarithms, as 0 * inf would be no derivative of 0 * log(0). With beta 0 a
    # student's -inf makes the divergence infinite.
    f, _ = divergence_of_cpu(s if beta == 0.0 else _finite(s), _finite(t), beta)
    return torch.where(_support(present, add_tail), f, 0.0).sum(-1)


def _support(present: Tensor, add_tail: bool) -> Tensor:
    """Return the mask of the distribution's classes, the tail last: a token without classes has none."""
    return torch.cat([present, present.any(-1, keepdim=True)], -1) if add_tail else present


def _distribution(logprobs: Tensor, present: Tensor, tail: Tensor | None) -> Tensor:
    """Complete log-probabilities `[..., K]` to a distribution, with the tail `[..., K + 1]` or normalized."""
    logprobs = torch.where(present, logprobs, float("-inf"))
    if tail is None:
        return logprobs.masked_fill(~present.any(-1, keepdim=True), 0.0).log_softmax(-1)
    tail = tail.masked_fill(~present.any(-1), 0.0)  # of a token that does not count it may be NaN
    return torch.cat([logprobs, tail.unsqueeze(-1)], -1)


def _what_is_left(logprobs: Tensor, present: Tensor) -> Tensor:
    """Return the log of 1 minus the sum of the probabilities: nothing else is known of a teacher's other classes."""
    logprobs = torch.where(present, logprobs, _LEAST_LOGPROB).clamp(min=_LEAST_LOGPROB)
    return log1mexp(logsumexp_cpu(logprobs).squeeze(-1))


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.masked_fill(logprobs == float("-inf"), _LEAST_LOGPROB)
