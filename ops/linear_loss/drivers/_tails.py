"""The other classes of top-k teachers, as one class more: the log-probability that a student gives them together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.ops.linear_loss.drivers.distillation_call import DistillationCall, TopkTeachers
from llmk.ops.linear_loss.kernels.transform import Transform


@dataclass(frozen=True)
class Tails:
    """All classes of a row but a teacher's largest, for each teacher: a sum near 1 does not say their probability."""

    y: Tensor  # [M, V], transformed logits
    slope: Tensor | float  # dy / dz
    is_largest: list[Tensor]  # [M, V] each, False in a row without any
    logsumexps: Tensor  # [teachers, M], of the others' logits
    probabilities: Tensor  # [teachers, M], of the teacher's largest together
    logprobs: Tensor  # [teachers, M], of the others together

    @classmethod
    def of(
        cls, call: DistillationCall, topk: TopkTeachers, z: Tensor, ids: Tensor, logprobs: Tensor, stats: Tensor
    ) -> "Tails":  # fmt: skip
        """Compute them from the logits of a block.

        Args:
            call: What the softmax is of.
            topk: The teachers.
            z: The logits, `[M, V]`.
            ids: The teachers' classes, `[M, K]`.
            logprobs: The student's log-probabilities of these.
            stats: The rows' largest logits and sums of exponentials.
        """
        transform = Transform(1.0, 1.0 / call.temperature, call.softcap)
        (y, slope), (M, V) = transform(z.float()), z.shape
        is_largest, sums = [], []
        for each, of_each in zip(ids.split(topk.sizes, -1), logprobs.split(topk.sizes, -1), strict=True):
            sums.append(of_each.exp().masked_fill(each < 0, 0.0).sum(-1))
            columns = each.long().masked_fill((each < 0) | (each >= V), V)  # a wrong id makes the loss NaN elsewhere
            mask = torch.zeros((M, V + 1), dtype=torch.bool, device=z.device)
            is_largest.append(mask.scatter_(1, columns, True)[:, :V])
        logsumexps = torch.stack([y.masked_fill(mask, float("-inf")).logsumexp(-1) for mask in is_largest])
        (m, total), p = stats.unbind(), torch.stack(sums)
        # Neither a difference of numbers near each other.
        of_others = torch.where(p < 0.5, (-p).log1p(), (logsumexps - m) - total.log())
        return cls(y, transform.factor if slope is None else slope, is_largest, logsumexps, p, of_others)

    def add_gradients(self, grads: Tensor, out: Tensor) -> None:
        """Add the gradients of the logits, given those of the tails' log-probabilities, to `out [M, V]`."""
        columns = (each.unsqueeze(-1) for each in (grads, self.logsumexps, self.probabilities, self.logprobs))
        for mask, grad, logsumexp, p_largest, logprob in zip(self.is_largest, *columns, strict=True):
            # A class's share of the tail, less its probability.
            p = (self.y - (logsumexp - logprob)).exp()
            dy = torch.where(mask, -p, (self.y - logsumexp).exp() * p_largest)
            out.add_((dy * self.slope * grad).masked_fill(~mask.any(-1, keepdim=True), 0.0))
