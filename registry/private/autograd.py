"""Private names of a backward pass, and of the tensors saved for it.

Where that cannot be told what was saved is read again.
"""

from collections.abc import Callable
from typing import Any

from llmk.registry.private.names import find


def _always() -> bool:
    return True


def _always_something(*args: Any) -> bool:
    return True


graph_is_kept: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph", _always)
_top_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks", _always_something)


def saved_tensors_are_hooked() -> bool:
    """Return True if `torch.autograd.graph.saved_tensors_hooks` see what a forward pass saves now."""
    return _top_hooks(False) is not None
