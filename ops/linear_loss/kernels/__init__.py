"""Functions of rows of logits, as Triton kernels and in plain PyTorch."""

from typing import NamedTuple

from llmk.ops.linear_loss.kernels import _contrastive, _divergence, _topk
from llmk.ops.linear_loss.kernels._contrastive import ContrastiveFunctions, LossGradients, Products, Similarities
from llmk.ops.linear_loss.kernels._divergence import CrossEntropyTerm, DivergenceFunctions, Softmaxes
from llmk.ops.linear_loss.kernels._topk import MAX_K, Candidates, TopkFunctions
from llmk.ops.loss import cross_entropy_cpu, cross_entropy_kernels
from llmk.ops.loss.cross_entropy_options import RowLoss

__all__ = [
    "KERNELS",
    "MAX_K",
    "PYTORCH",
    "Candidates",
    "CrossEntropyTerm",
    "Implementation",
    "LossGradients",
    "Products",
    "Similarities",
    "Softmaxes",
]


class Implementation(NamedTuple):
    """The functions of rows of logits, all of them Triton kernels or all of them plain PyTorch."""

    on_host: bool  # the host can read a tensor without synchronizing
    cross_entropy: RowLoss
    divergence: DivergenceFunctions
    topk: TopkFunctions
    contrastive: ContrastiveFunctions


KERNELS = Implementation(
    False,
    cross_entropy_kernels.KERNELS,
    _divergence.KERNELS,
    _topk.KERNELS,
    _contrastive.KERNELS,
)
PYTORCH = Implementation(
    True,
    cross_entropy_cpu.CPU,
    _divergence.PYTORCH,
    _topk.PYTORCH,
    _contrastive.PYTORCH,
)
