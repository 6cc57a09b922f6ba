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
from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard, VocabSlice, vocab_slice

__all__ = [
    "CompactedTokens",
    "LinearCall",
    "LinearOp",
    "VocabShard",
    "VocabSlice",
    "fake_gradients",
    "gather_rows",
    "local_fields",
    "ordered",
    "product_flops",
    "recomputing_op",
    "vocab_slice",
    "with_shard",
]
