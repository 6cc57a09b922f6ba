"""The public operators as typed functions; each calls `torch.ops.llmk.NAME`.

`vocab_slice` makes the arguments of those that take a projection whose classes are spread over a process group.
"""

from llmk.ops.convolution.causal_conv1d import causal_conv1d
from llmk.ops.convolution.causal_conv1d_step import causal_conv1d_step
from llmk.ops.embedding.embedding import embedding
from llmk.ops.experts.grouped_linear import grouped_linear
from llmk.ops.experts.moe_experts import moe_experts
from llmk.ops.experts.moe_permute import moe_permute, moe_unpermute
from llmk.ops.experts.router_topk import router_topk
from llmk.ops.experts.router_topk_sums import router_topk_sums
from llmk.ops.linear.gated_linear import gated_linear
from llmk.ops.linear.linear_act import linear_act
from llmk.ops.linear_loss.chunked import VocabSlice, vocab_slice
from llmk.ops.linear_loss.fused_linear_ce import fused_linear_ce
from llmk.ops.linear_loss.fused_linear_ce_metrics import fused_linear_ce_metrics
from llmk.ops.linear_loss.fused_linear_distill import fused_linear_distill
from llmk.ops.linear_loss.fused_linear_jsd import fused_linear_jsd
from llmk.ops.linear_loss.fused_linear_jsd_ce import fused_linear_jsd_ce
from llmk.ops.linear_loss.fused_linear_policy import fused_linear_policy
from llmk.ops.linear_loss.fused_linear_preference import fused_linear_preference
from llmk.ops.linear_loss.info_nce import info_nce
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs
from llmk.ops.linear_loss.linear_topk import linear_topk
from llmk.ops.linear_loss.vocab_parallel_linear_ce import vocab_parallel_linear_ce
from llmk.ops.loss.ce_tvd import ce_tvd
from llmk.ops.loss.cross_entropy import cross_entropy
from llmk.ops.loss.giou_loss import giou_loss
from llmk.ops.loss.jsd import jsd
from llmk.ops.loss.kl_div import kl_div
from llmk.ops.loss.tvd import tvd
from llmk.ops.norm.add_rms_norm import add_rms_norm
from llmk.ops.norm.group_norm import group_norm
from llmk.ops.norm.layer_norm import layer_norm
from llmk.ops.norm.poly_norm import poly_norm
from llmk.ops.norm.rms_norm import rms_norm
from llmk.ops.norm.rms_norm_gated import rms_norm_gated
from llmk.ops.norm.rms_norm_linear import rms_norm_linear
from llmk.ops.pointwise.add import add
from llmk.ops.pointwise.dyt import dyt
from llmk.ops.pointwise.gated_units import geglu, swiglu
from llmk.ops.pointwise.relu_squared import relu_squared
from llmk.ops.recurrence.gated_delta_rule import gated_delta_rule
from llmk.ops.recurrence.gated_linear_attention import gated_linear_attention
from llmk.ops.recurrence.steps import gated_delta_rule_step, gated_linear_attention_step
from llmk.ops.retrieval.maxsim import maxsim
from llmk.ops.retrieval.splade_head import splade_head
from llmk.ops.rotary.qk_norm_rope import qk_norm_rope
from llmk.ops.rotary.rope import rope
from llmk.ops.softmax.attention_residual import attention_residual
from llmk.ops.softmax.softmax import softmax
from llmk.ops.softmax.sparsemax import sparsemax
from llmk.ops.streams.read_streams import read_streams
from llmk.ops.streams.rms_linear import rms_linear
from llmk.ops.streams.sinkhorn import sinkhorn
from llmk.ops.streams.write_streams import write_streams

__all__ = [
    "VocabSlice",
    "add",
    "add_rms_norm",
    "attention_residual",
    "causal_conv1d",
    "causal_conv1d_step",
    "ce_tvd",
    "cross_entropy",
    "dyt",
    "embedding",
    "fused_linear_ce",
    "fused_linear_ce_metrics",
    "fused_linear_distill",
    "fused_linear_jsd",
    "fused_linear_jsd_ce",
    "fused_linear_policy",
    "fused_linear_preference",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_linear",
    "gated_linear_attention",
    "gated_linear_attention_step",
    "geglu",
    "giou_loss",
    "group_norm",
    "grouped_linear",
    "info_nce",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_act",
    "linear_logprobs",
    "linear_topk",
    "maxsim",
    "moe_experts",
    "moe_permute",
    "moe_unpermute",
    "poly_norm",
    "qk_norm_rope",
    "read_streams",
    "relu_squared",
    "rms_linear",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_linear",
    "rope",
    "router_topk",
    "router_topk_sums",
    "sinkhorn",
    "softmax",
    "sparsemax",
    "splade_head",
    "swiglu",
    "tvd",
    "vocab_parallel_linear_ce",
    "vocab_slice",
    "write_streams",
]
