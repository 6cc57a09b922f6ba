"""Inductor without a C++ compiler, which takes seconds for a graph: PyTorch's kernels stand where it would write one.

Graphs are traced, decomposed, partitioned, lowered and cached as ever. Tests of what Inductor writes do without it.
"""

from typing import Any

import torch._inductor
from torch._inductor import config

WITHOUT_CPP: dict[str, Any] = {"cpp.vec_isa_ok": False} | (
    {"fallback_by_default": True} if "fallback_by_default" in torch._inductor.list_options() else {}
)
"""Inductor's settings, the second where it has it. By the first it builds nothing to know the processor's vectors."""


def write_no_cpp() -> None:
    """Set it in this process from now on."""
    for name, value in WITHOUT_CPP.items():
        setattr(config, name, value)
