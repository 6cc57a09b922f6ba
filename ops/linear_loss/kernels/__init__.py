"""Functions of rows of logits, as Triton kernels and in plain PyTorch."""

from typing import NamedTuple

from llmk.ops.linear_loss.kernels import _contrastive, _divergence, _topk
from llmk.ops.linear_loss.kernels._contrastive import ContrastiveFunctions, LossGradients, Products, Similarities
from llmk.ops.linear_loss.kernels._divergence import BothRows, CrossEntropyTerm, DivergenceFunctions, Softmaxes
from llmk.ops.linear_loss.kernels._topk import MAX_K, Candidates, TopkFunctions

__all__ = [
    "KERNELS",
    "MAX_K",
    "PYTORCH",
    "BothRows",
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
    divergence: DivergenceFunctions
    topk: TopkFunctions
    contrastive: ContrastiveFunctions


KERNELS = Implementation(False, _divergence.KERNELS, _topk.KERNELS, _contrastive.KERNELS)
PYTORCH = Implementation(True, _divergence.PYTORCH, _topk.PYTORCH, _contrastive.PYTORCH)
