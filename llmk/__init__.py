"""llmk: kernels for training language models, as real PyTorch operators.

Importing this package registers every operator under `torch.ops.llmk`.
"""

from llmk import checkpoint, functional, losses, nn, rl
from llmk._cache_key import add_sources_to_cache_key
from llmk.compiler import compile, compile_report

__version__ = "0.1.0"
__all__ = ["checkpoint", "compile", "compile_report", "functional", "losses", "nn", "rl"]

add_sources_to_cache_key()
