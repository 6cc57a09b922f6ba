"""The public operators as typed functions; each calls `torch.ops.llmk.NAME`."""

from llmk.ops.cross_entropy import cross_entropy
from llmk.ops.fused_linear_ce import fused_linear_ce
from llmk.ops.group_norm import group_norm
from llmk.ops.layer_norm import layer_norm
from llmk.ops.rms_norm import rms_norm
from llmk.ops.rope import rope
from llmk.ops.swiglu import swiglu

__all__ = ["cross_entropy", "fused_linear_ce", "rms_norm", "rope", "swiglu"]
__all__ += ["group_norm", "layer_norm"]
