"""`torch.compile(model, backend="llmk")`: plain PyTorch in, llmk's operators in the graph.

The files of operators import `patterns` from here, and the backend imports the registry that operators are in. So the
backend is imported where it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from llmk.registry.private.compilers import offer_backend

if TYPE_CHECKING:
    from llmk.compiler.backend import compile, compile_report, llmk
    from llmk.compiler.report import Note, Report

__all__ = ["Note", "Report", "compile", "compile_report", "llmk"]

offer_backend("llmk", "llmk.compiler:llmk")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("llmk.compiler.backend"), name)
