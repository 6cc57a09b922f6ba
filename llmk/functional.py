"""The public operators as typed functions; each calls `torch.ops.llmk.NAME`."""

from llmk.ops.cross_entropy import cross_entropy
from llmk.ops.fused_linear_ce import fused_linear_ce
from llmk.ops.kl_div import kl_div
from llmk.ops.rms_norm import rms_norm
from llmk.ops.rope import rope
from llmk.ops.softmax import softmax
from llmk.ops.swiglu import swiglu

__all__ = [
    "cross_entropy",
    "fused_linear_ce",
    "kl_div",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]
