"""The classes of rows whose log-probabilities are asked for: where this rank has them, and what their logits are."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import VocabShard
from llmk.ops.linear_loss.kernels.transform import Transform


class Numbering(NamedTuple):
    """The numbers that tell of an id whether it counts, whether it is a class, and where this rank has that."""

    ignore_index: int
    first_class: int  # of this rank
    num_classes: int  # of all ranks


class Classes(NamedTuple):
    """The classes of a chunk's rows whose probabilities are asked for, and the one that is left out of its sums.

    Before `of_ranks` y has logits without their transform, -inf of a class that another rank has.
    """

    ids: Tensor  # [M, K]
    columns: Tensor  # int32 [M, K] among this rank's classes; negative where a class does not count or is elsewhere
    counts: Tensor  # bool [M, K]
    y: Tensor  # float32 [M, K], transformed logits: NaN of a class that is none or of +inf, 0 where it does not count
    slopes: Tensor | None  # float32 [M, K], dy / dz; None where that is the same for all
    best: Tensor | None = None  # int64 [M, 1], which of them is the row's own; None where there is one
    distinct: Tensor | None = None  # bool [M, K], each class that counts once; None without a tail

    @classmethod
    def located(
        cls, ids: Tensor, numbering: Numbering, V: int, logits: Callable[[Tensor], Tensor],
        transform: Transform | None,
    ) -> "Classes":  # fmt: skip
        """Find ids `[M, K]` among V classes in plain PyTorch.

        Args:
            ids: Class ids, int32 or int64.
            numbering: What they say.
            V: The number of classes that this rank has.
            logits: Computes the logits `[M, K]` of columns, any number of a negative one.
            transform: The transform of logits; None leaves that to `of_ranks`.
        """
        ids = ids.long()
        counts = ids != numbering.ignore_index  # int32 would wrap an index that it does not hold
        valid, columns = (ids >= 0) & (ids < numbering.num_classes), ids - numbering.first_class
        here = counts & valid & (columns >= 0) & (columns < V)
        columns = columns.masked_fill(~here, -1).int()
        y, slopes = logits(columns), None
        if transform is not None:
            y, slopes = transform(y)
            y = y.masked_fill(y == float("inf"), float("nan"))
        y = y.masked_fill(~here, float("-inf")).masked_fill(~valid, float("nan")).masked_fill(~counts, 0.0)
        return cls(ids, columns, counts, y, slopes)

    def of_ranks(self, shard: VocabShard, transform: Transform) -> "Classes":
        """Return the same with what the ranks that have the classes know of them."""
        z = shard.gather(self.y).amax(0)  # each class is on one rank, or on none: it has no probability there
        y, slopes = transform(z)
        y = y.masked_fill(z == float("-inf"), float("-inf")).masked_fill(y == float("inf"), float("nan"))
        return self._replace(y=y, slopes=slopes)

    def chosen(self, with_tail: bool) -> "Classes":
        """Return the same with the row's own class: the one with the largest logit of those that count."""
        best = None
        if self.counts.shape[1] > 1:
            best = self.y.masked_fill(~self.counts, float("-inf")).argmax(-1, keepdim=True)
        return self._replace(best=best, distinct=_distinct(self.ids, self.counts) if with_tail else None)

    def own(self, values: Tensor) -> Tensor:
        """Return the values `[M]` of the rows' own classes, of those of all `[M, K]`."""
        return values.squeeze(1) if self.best is None else values.gather(1, self.best).squeeze(1)


def _distinct(ids: Tensor, counts: Tensor) -> Tensor:
    """Return a mask that has each class of a row that counts once, of ids `[M, K]`."""
    ordered, order = ids.masked_fill(~counts, -1).sort(-1)
    repeated = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(counts).scatter(-1, order, ~repeated & (ordered >= 0))
