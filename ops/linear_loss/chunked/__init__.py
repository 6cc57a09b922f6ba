"""A linear layer over a vocabulary, a chunk of tokens at a time, and a call of a loss over it as one value."""

from llmk.ops.linear_loss.chunked._linear import (
    DIFFERENTIABLE,
    LOGITS_BUDGET,
    REMADE_BUDGET,
    CallOp,
    ChunkedLinear,
    CompactedTokens,
    LinearCall,
    LinearGradients,
    check_chunk_size,
    check_temperature,
    checked_linear,
    fake_gradients,
    local_fields,
    product_flops,
    recomputing_op,
)
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
    "check_chunk_size",
    "check_temperature",
    "checked_linear",
    "fake_gradients",
    "local_fields",
    "product_flops",
    "recomputing_op",
]
