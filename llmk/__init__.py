"""llmk: kernels for training language models, as real PyTorch operators.

After `import llmk` every operator is under `torch.ops.llmk`. Operators and modules load when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from llmk._loading import load_operators_on_first_use, require

require("triton", "llmk", "triton")  # PyTorch for a CPU comes without it

from llmk import compiler
from llmk._cache_key import add_sources_to_cache_key

if TYPE_CHECKING:
    from llmk import bench as bench
    from llmk import checkpoint, functional, losses, nn, rl
    from llmk import estimate as estimate
    from llmk import opcheck as opcheck
    from llmk import transformers as transformers
    from llmk import trl as trl
    from llmk import verl as verl
    from llmk.compiler import compile, compile_report

__version__ = "0.1.0"
__all__ = ["checkpoint", "compile", "compile_report", "functional", "losses", "nn", "rl"]

_FUNCTIONS = ("compile", "compile_report")
_MODULES = frozenset(
    ["bench", "checkpoint", "estimate", "functional", "losses", "nn", "opcheck", "rl", "transformers", "trl", "verl"]
)


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(compiler, name)
    if name in _MODULES:
        return importlib.import_module(f"llmk.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


add_sources_to_cache_key()
load_operators_on_first_use()
