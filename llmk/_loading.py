"""Loading operators when they are first used, and saying in a line which package is missing."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch


def require(package: str, user: str, install: str) -> None:
    """Refuse to go on without a package.

    Raises:
        ModuleNotFoundError: It is not installed; the text says what to install.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{user} needs the package {package}: pip install {install}", name=package)


def load_operators_on_first_use() -> None:
    """Have `torch.ops.llmk` load `llmk.ops` where PyTorch has no operator of a name yet.

    The namespace stays the object that it is, whoever holds it: a module's class may be changed, and a subclass's
    `__getattr__` is asked only for what is not there.
    """
    namespace: Any = torch.ops.llmk
    base: type[ModuleType] = type(namespace)

    class Namespace(base):
        __module__ = base.__module__  # the operators' own begins with it, and PyTorch's caches find them by that

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                importlib.import_module("llmk.ops")
            return vars(self)[name] if name in vars(self) else super().__getattr__(name)

        def __dir__(self) -> list[str]:
            importlib.import_module("llmk.ops")
            return list(super().__dir__())

    namespace.__class__ = Namespace
