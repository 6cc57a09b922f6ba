"""The support of a row: the classes that a sampler kept, over which alone its softmax is.

The logits of a row's L classes are products of two rows each. A row with a support has no exponentials but these, and
in its gradient's matrix the entries of these classes alone. Ids are negative where there is none, and one that occurs
twice counts once; a row without any is over all classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.ops.linear_loss.rows.classes import Classes, Numbering
from llmk.ops.linear_loss.rows.projection import Chunk, Projection
from llmk.ops.linear_loss.rows.softmax import (
    STATISTICS,
    RowGradients,
    RowResults,
    row_results,
    statistics,
    with_classes,
)

MOST_SUPPORT = 1024
"""The most ids of a row's support."""


@dataclass(frozen=True)
class Support:
    """The supports `[N, L]` of rows, whose classes are `[N, K]`."""

    ids: Tensor
    classes: Tensor
    projection: Projection
    first_class: int  # of this rank's
    num_classes: int  # of all ranks

    def cuts(self, rows: slice) -> Tensor:
        """Return the mask of the rows that have a support, `[M]`."""
        return (self.ids[rows] >= 0).any(-1)

    def logits(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return some rows' ids in their order, their columns, transformed logits and dy / dz, `[M, L]` each.

        The logits are -inf of an id that is none or was there before, and NaN in a row with an id that is no class.
        """
        ids = self.ids[rows].long().sort(-1).values
        repeated = torch.nn.functional.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
        used, wrong = (ids >= 0) & ~repeated, (ids >= self.num_classes).any(-1, keepdim=True)
        here = used & (ids >= self.first_class) & (ids - self.first_class < self.projection.weights.weight.shape[0])
        columns = torch.where(here, ids - self.first_class, -1).int()
        numbering = Numbering(ignore_index=-1, first_class=0, num_classes=self.projection.weights.weight.shape[0])
        z = self.projection.classes(rows, columns, numbering, raw=True).y
        if self.projection.shard is not None:
            z = self.projection.shard.gather(z).sum(0)
        y, slopes = self.projection.weights.transform(z)
        y = torch.where(wrong, float("nan"), torch.where(used, y, float("-inf")))
        return ids, columns, y, slopes

    def results(self, rows: slice, classes: Classes, stats: Tensor, results: RowResults) -> tuple[Tensor, RowResults]:
        """Replace what the rows with a support have over all classes."""
        ids, _, y, _ = self.logits(rows)
        nothing, cuts, counts = torch.zeros_like(stats[1]), self.cuts(rows), classes.counts
        total, moment, m = with_classes(nothing, nothing, torch.full_like(nothing, float("-inf")), y)
        own = statistics(m, total, nothing, moment)
        found = row_results(own, classes.y, nothing, counts)
        inside = (self.classes[rows].unsqueeze(-1) == ids.unsqueeze(-2)).any(-1)
        logprobs = torch.where(inside, found.logprobs, float("-inf"))
        logprobs = torch.where(y.isnan().any(-1, keepdim=True) | classes.y.isnan(), float("nan"), logprobs)
        replaced = cuts & counts.any(-1)
        return (
            torch.where(replaced, own, stats),
            results._replace(
                logprobs=torch.where(cuts.unsqueeze(-1) & counts, logprobs, results.logprobs),
                entropy=torch.where(replaced, found.entropy, results.entropy),
            ),
        )

    def entries(self, chunk: Chunk, classes: Classes, stats: Tensor, grads: RowGradients) -> tuple[Tensor, Tensor]:
        """Return the columns `[M, L]` of the rows with a support, -1 of others, and the gradients of their logits."""
        rows = chunk.rows
        ids, columns, y, slopes = self.logits(rows)
        reference, rest, own, moment, _ = stats[:STATISTICS].unsqueeze(-1).unbind()
        distance, total = torch.where(y == float("-inf"), float("-inf"), y - reference), own + rest
        p = distance.exp() / total
        g = torch.zeros_like(classes.y) if grads.logprobs is None else grads.logprobs
        alike = ((ids.unsqueeze(-1) == self.classes[rows].unsqueeze(-2)) * g.unsqueeze(-2)).sum(-1)
        entries = alike - p * g.sum(-1, keepdim=True)
        if grads.entropy is not None:
            moved = grads.entropy.unsqueeze(-1) * p * (distance - moment / total)
            entries = entries - torch.where(p == 0, 0.0, moved)
        entries = entries * (self.projection.weights.transform.factor if slopes is None else slopes)
        counts = self.cuts(rows) & classes.counts.any(-1)
        return torch.where(counts.unsqueeze(-1), columns, -1), entries


def check_support_ids(ids: Tensor, num_classes: int) -> None:
    """Check on the host that ids are classes; a fake tensor's are not known.

    Raises:
        IndexError: One is past the last class.
    """
    if type(ids) is Tensor and bool((ids >= num_classes).any()):
        raise IndexError(
            f"support: expected class indices below {num_classes}, or negative ones for none, got {int(ids.max())}"
        )
