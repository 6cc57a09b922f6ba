"""A linear layer over a vocabulary, a chunk of tokens at a time, and a call of a loss over it as one value."""

from llmk.ops.linear_loss.chunked._call import (
    DIFFERENTIABLE,
    CallOp,
    LinearCall,
    check_chunk_size,
    check_temperature,
    checked_linear,
    fake_gradients,
    fake_loss,
    local_fields,
    product_flops,
)
from llmk.ops.linear_loss.chunked._dynamic_rows import can_group
from llmk.ops.linear_loss.chunked._linear import LOGITS_BUDGET, REMADE_BUDGET, ChunkedLinear, LinearGradients
from llmk.ops.linear_loss.chunked._skipping import CompactedTokens
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard

__all__ = [
    "DIFFERENTIABLE",
    "LOGITS_BUDGET",
    "REMADE_BUDGET",
    "CallOp",
    "ChunkedLinear",
    "CompactedTokens",
    "LinearCall",
    "LinearGradients",
    "VocabShard",
    "can_group",
    "check_chunk_size",
    "check_temperature",
    "checked_linear",
    "fake_gradients",
    "fake_loss",
    "local_fields",
    "product_flops",
]
