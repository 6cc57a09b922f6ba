"""Modules around the operators, with the parameters of the torch or Hugging Face module that each replaces."""

from llmk.nn.attention_residual import AttentionResidual
from llmk.nn.convolution import CausalConv1d
from llmk.nn.embedding import Embedding
from llmk.nn.expert_parallel import expert_parallel_moe
from llmk.nn.feed_forward import GeGLUMLP, SwiGLUMLP
from llmk.nn.gated_delta_net import GatedDeltaNet
from llmk.nn.hyper_connection import HyperConnection
from llmk.nn.losses import (
    CrossEntropyLoss,
    CrossEntropyTVDLoss,
    GIoULoss,
    InfoNCELoss,
    JSDLoss,
    KLDivLoss,
    LinearCrossEntropyLoss,
    LinearJSDLoss,
    LinearLogProbs,
    LinearTopK,
    TVDLoss,
)
from llmk.nn.modulation import ModulatedRMSNorm
from llmk.nn.multi_token_attention import MultiTokenAttention
from llmk.nn.norms import DyT, GroupNorm, LayerNorm, PolyNorm, RMSNorm, RMSNormGated
from llmk.nn.rotary import RotaryEmbedding
from llmk.nn.routing import load_balance_loss, router_z_loss
from llmk.nn.tiled import TiledMLP

__all__ = [
    "AttentionResidual",
    "CausalConv1d",
    "CrossEntropyLoss",
    "CrossEntropyTVDLoss",
    "DyT",
    "Embedding",
    "GIoULoss",
    "GatedDeltaNet",
    "GeGLUMLP",
    "GroupNorm",
    "HyperConnection",
    "InfoNCELoss",
    "JSDLoss",
    "KLDivLoss",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearJSDLoss",
    "LinearLogProbs",
    "LinearTopK",
    "ModulatedRMSNorm",
    "MultiTokenAttention",
    "PolyNorm",
    "RMSNorm",
    "RMSNormGated",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "TVDLoss",
    "TiledMLP",
    "expert_parallel_moe",
    "load_balance_loss",
    "router_z_loss",
]
