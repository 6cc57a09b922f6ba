"""All spellings; those of experts where transformers is installed, whose operator they call."""

from importlib.util import find_spec

from compile_tests.spellings import attention, convolutions, losses, norms, rotations, streams, units  # noqa: F401
from compile_tests.spellings.registry import SPELLINGS

if find_spec("transformers"):
    from compile_tests.spellings import experts  # noqa: F401

__all__ = ["SPELLINGS"]
