"""llmk's operators as functions, and layers for the slots of transformers' `use_kernels`.

This is a kernel's `__init__.py`: the functions are its attributes. Each has a docstring that says what it computes and
takes.
"""

from llmk import functional as functional
from llmk.functional import *  # noqa: F403
from llmk.hub import layers as layers


def experts_implementation() -> str:
    """Register `moe_experts` with transformers, and return the name for `model.set_experts_implementation(name)`."""
    from llmk.transformers.experts import NAME  # importing it registers it, and needs transformers

    return NAME
