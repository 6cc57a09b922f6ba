"""`torch.compile(model, backend="llmk")`: plain PyTorch in, llmk's operators in the graph."""

from llmk.compiler.backend import compile, compile_report, llmk
from llmk.compiler.report import Note, Report
from llmk.registry.private.compilers import offer_backend

__all__ = ["Note", "Report", "compile", "compile_report", "llmk"]

offer_backend("llmk", "llmk.compiler:llmk")
