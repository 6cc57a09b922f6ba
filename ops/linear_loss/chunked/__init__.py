"""A linear layer over a vocabulary, a chunk of tokens at a time, and a call of a loss over it as one value."""

from llmk.ops.linear_loss.chunked._call import (
    LinearCall,
    LinearOp,
    fake_gradients,
    local_fields,
    product_flops,
    recomputing_op,
    with_shard,
)
from llmk.ops.linear_loss.chunked._compacted import CompactedTokens, gather_rows, ordered
from llmk.ops.linear_loss.chunked._linear import (
    ChunkedLinear,
    LinearGradients,
    float16_scale,
    largest,
    scaled,
)
from llmk.ops.linear_loss.chunked._plan import Plan, Sizes, plan
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard, VocabSlice, vocab_slice

__all__ = [
    "ChunkedLinear",
    "CompactedTokens",
    "LinearCall",
    "LinearGradients",
    "LinearOp",
    "Plan",
    "Sizes",
    "VocabShard",
    "VocabSlice",
    "fake_gradients",
    "float16_scale",
    "gather_rows",
    "largest",
    "local_fields",
    "ordered",
    "plan",
    "product_flops",
    "recomputing_op",
    "scaled",
    "vocab_slice",
    "with_shard",
]
