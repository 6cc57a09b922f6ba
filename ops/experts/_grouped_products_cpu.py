"""Grouped products on a CPU: a loop over the experts, in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

Groups = Sequence[tuple[int, int]]
"""First row and end of each expert's rows."""


def grouped_product_cpu(x: Tensor, weight: Tensor, groups: Groups, bias: Tensor | None = None) -> Tensor:
    """float32 `[N, D]` of `x [N, H]` and `weight [E, D, H]`; zeros in rows that no expert has."""
    y = torch.zeros((x.shape[0], weight.shape[1]), dtype=torch.float32, device=x.device)
    for e, (begin, end) in enumerate(groups):
        if begin < end:
            of_expert = None if bias is None else bias[e].float()
            y[begin:end] = torch.nn.functional.linear(x[begin:end].float(), weight[e].float(), of_expert)
    return y


def grouped_outer_cpu(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """float32 `[E, A, B]` of the rows of `a [N, A]` and `b [N, B]`."""
    out = torch.zeros((len(groups), a.shape[1], b.shape[1]), dtype=torch.float32, device=a.device)
    for e, (begin, end) in enumerate(groups):
        if begin < end:
            torch.mm(a[begin:end].float().t(), b[begin:end].float(), out=out[e])
    return out
