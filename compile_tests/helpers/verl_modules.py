"""verl's own files, from its wheel without what it depends on.

`import verl` imports Ray. What llmk touches, and what puts it into a model, needs PyTorch and transformers alone: these
files are imported as they are, and only the `__init__` of each package above them is left out.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("verl", "verl.utils", "verl.utils.experimental", "verl.models", "verl.models.transformers")


SPEC = importlib.util.find_spec("verl")
"""None where it is not installed."""


def add_packages() -> None:
    """Add packages that have verl's folders and run no `__init__`; one that is imported already stays."""
    assert SPEC is not None
    assert SPEC.origin is not None
    root = Path(SPEC.origin).parent
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules.setdefault(name, package)
