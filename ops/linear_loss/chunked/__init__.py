"""A linear layer over a vocabulary, a chunk of tokens at a time, and a call of a loss over it as one value."""

from llmk.ops.linear_loss.chunked._call import (
    DIFFERENTIABLE,
    LinearCall,
    LinearOp,
    check_chunk_size,
    check_linear,
    check_temperature,
    checked_linear,
    fake_gradients,
    local_fields,
    product_flops,
    recomputing_op,
    wants_float32,
    with_shard,
)
from llmk.ops.linear_loss.chunked._linear import (
    ChunkedLinear,
    CompactedTokens,
    LinearGradients,
    float16_scale,
    largest,
    scaled,
)
from llmk.ops.linear_loss.chunked._plan import Plan, Sizes, kept_rows, plan
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard, VocabSlice, vocab_slice

__all__ = [
    "DIFFERENTIABLE",
    "ChunkedLinear",
    "CompactedTokens",
    "LinearCall",
    "LinearGradients",
    "LinearOp",
    "Plan",
    "Sizes",
    "VocabShard",
    "VocabSlice",
    "check_chunk_size",
    "check_linear",
    "check_temperature",
    "checked_linear",
    "fake_gradients",
    "float16_scale",
    "kept_rows",
    "largest",
    "local_fields",
    "plan",
    "product_flops",
    "recomputing_op",
    "scaled",
    "vocab_slice",
    "wants_float32",
    "with_shard",
]
