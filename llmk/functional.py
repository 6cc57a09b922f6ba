"""The public operators as typed functions; each calls `torch.ops.llmk.NAME`."""

from llmk.ops.add import add
from llmk.ops.add_rms_norm import add_rms_norm
from llmk.ops.cross_entropy import cross_entropy
from llmk.ops.fused_linear_ce import fused_linear_ce
from llmk.ops.gated_units import geglu, swiglu
from llmk.ops.giou_loss import giou_loss
from llmk.ops.group_norm import group_norm
from llmk.ops.kl_div import kl_div
from llmk.ops.layer_norm import layer_norm
from llmk.ops.linear_act import linear_act
from llmk.ops.qk_norm_rope import qk_norm_rope
from llmk.ops.relu_squared import relu_squared
from llmk.ops.rms_norm import rms_norm
from llmk.ops.rope import rope
from llmk.ops.softmax import softmax
from llmk.ops.vocab_parallel_linear_ce import vocab_parallel_linear_ce

__all__ = [
    "add",
    "add_rms_norm",
    "cross_entropy",
    "fused_linear_ce",
    "geglu",
    "giou_loss",
    "group_norm",
    "kl_div",
    "layer_norm",
    "linear_act",
    "qk_norm_rope",
    "relu_squared",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
    "vocab_parallel_linear_ce",
]
