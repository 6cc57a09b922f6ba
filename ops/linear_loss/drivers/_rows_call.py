"""A call of a loss whose rows are softmaxes of a linear layer, and the rows that it is about."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import CompactedTokens, LinearCall
from llmk.ops.linear_loss.chunked.plan import Plan, kept_rows
from llmk.ops.linear_loss.drivers.distillation_call import DistillationCall
from llmk.ops.linear_loss.kernels import Implementation
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows.engine import SoftmaxRows
from llmk.ops.linear_loss.rows.products import Weights
from llmk.ops.linear_loss.rows.projection import ALIGNED, Projection, projection_of
from llmk.registry import cdiv
from llmk.registry.devices import kernels_on_cpu

NOT_IGNORED = -1
"""An index to ignore that no class has."""
PADDING_ELEMENTS = 2
"""Elements of `kept_buffer` past the exponentials."""


@dataclass(frozen=True, kw_only=True)
class RowsCall(LinearCall):
    """A linear layer each of whose rows gives a few numbers."""

    ignore_index: int = NOT_IGNORED

    @property
    def transform(self) -> Transform:
        raise NotImplementedError

    def row_classes(self) -> Tensor:
        """Return the classes of each token that are asked for, `[N, K]`."""
        raise NotImplementedError

    def class_weights(self) -> Tensor | None:
        """Return this rank's class weights in a sum of logits, None where there is none."""
        return None

    def softmax_rows(
        self, impl: Implementation, compacted: CompactedTokens, chosen: Plan | None = None, **options: Any
    ) -> SoftmaxRows:
        """Return the rows of this call's tokens, which are compacted already."""
        chosen = self.plan(impl) if chosen is None else chosen
        return SoftmaxRows(self.projection(impl), compacted, chosen, self.row_classes(), self.ignore_index, **options)

    def projection(self, impl: Implementation) -> Projection:
        """Return the projection of all rows."""
        bias = None if self.linear_bias is None else self.linear_bias.contiguous()
        weights = Weights(self.linear_weight, bias, self.class_weights(), self.transform)
        return projection_of(self.input, weights, self.shard, not impl.on_host)

    @property
    def kept_element(self) -> int:
        """The bytes of an exponential that is kept: plain PyTorch computes in float32 on a CPU."""
        return 4 if self.input.is_cpu and not kernels_on_cpu() else self.input.dtype.itemsize

    def kept_buffer(self, keep: bool) -> Tensor:
        """Return a buffer for the exponentials of all rows, or of none: see `kept_matrix`.

        Its size is a function of sizes alone, so that fakes have the same. It is never empty, because PyTorch traces
        tensors without elements apart.
        """
        rows = kept_rows(math.prod(self.tokens), self.mean_classes, self.kept_element) if keep else 0
        dtype = torch.float32 if self.kept_element == 4 else self.input.dtype
        elements = rows * self.kept_columns + PADDING_ELEMENTS
        return torch.empty((elements,), dtype=dtype, device=self.input.device)

    @property
    def kept_columns(self) -> Any:
        columns: Any = torch.sym_max(self.linear_weight.shape[0], 1)
        return cdiv(columns, ALIGNED) * ALIGNED

    def kept_matrix(self, kept: Tensor) -> Tensor | None:
        """Return the exponentials `[N, V]` in a `kept_buffer`, of these tokens or of more; None where it has none."""
        N, columns, V = math.prod(self.tokens), self.kept_columns, self.linear_weight.shape[0]
        return None if kept.numel() < columns else kept[: N * columns].view(N, columns)[:, :V]


def check_classes(impl: Implementation, classes: Tensor, call: RowsCall | DistillationCall) -> None:
    """Check on the host that classes are classes or are to be ignored; a fake tensor's are not known.

    Raises:
        IndexError: One is neither.
    """
    if not impl.on_host or type(classes) is not Tensor:
        return
    ids = classes.long()
    wrong = (ids != call.ignore_index) & ((ids < 0) | (ids >= call.num_classes))
    if bool(wrong.any()):
        name = "labels" if isinstance(call, DistillationCall) else "target"
        raise IndexError(
            f"{name}: expected class indices in [0, {call.num_classes}) or ignore_index {call.ignore_index}, "
            f"got {int(ids[wrong][0])}"
        )
