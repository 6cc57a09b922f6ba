"""Modes and transforms that look on at a call, and hooks on the tensors that it saves.

Where that cannot be told someone always does: every call takes the dispatcher's path, and what was saved is read again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd import Function, forward_ad
from torch.autograd.graph import saved_tensors_hooks

from llmk.registry.private.names import find


def _one() -> int:
    return 1


def _always() -> bool:
    return True


def _always_something(*args: Any) -> bool:
    return True


class _Probe(Function):
    """Takes no functorch transform, and says so when it is applied inside one."""

    @staticmethod
    def forward(ctx: Any) -> None:
        return None


def _depth_of_probe() -> int:
    try:
        _Probe.apply()
    except RuntimeError:
        return 1
    return 0


dispatch_modes: Callable[[], int] = find("torch._C._len_torch_dispatch_stack", _one)
count_function_modes: Callable[[], int] = find("torch._C._len_torch_function_stack", _one)
_function_mode_stack = find("torch.overrides._get_current_function_mode_stack")
_DeviceContext = find("torch.utils._device.DeviceContext")
profiling: Callable[[], bool] = find("torch._C._autograd._profiler_enabled", _one)
functorch_depth: Callable[[], int] = find("torch._C._functorch.get_dynamic_layer_stack_depth", _depth_of_probe)
"""Returns the number of `torch.func` transforms that are active, which Dynamo knows too."""
_parse_key = find("torch._C._parse_dispatch_key", str)
_is_included = find("torch._C._dispatch_tls_is_dispatch_key_included", _always_something)
batching_gradients: Callable[[], bool] = partial(_is_included, _parse_key("VmapMode"))
"""Returns True where `torch.autograd.grad(is_grads_batched=True)` passes several gradients as one, without memory."""
jit_tracing: Callable[[], bool] = find("torch._C._is_tracing", find("torch.jit.is_tracing", _one))
"""Returns True inside `torch.jit.trace`: the dispatcher tells it of an operator, and sizes are tensors meanwhile."""
_mode_of = find("torch._C._get_dispatch_mode")


def looking_on() -> int:
    """Count the function modes but that of `torch.set_default_device`, which changes factories without a device."""
    if _function_mode_stack is None or _DeviceContext is None:
        return count_function_modes()
    return sum(type(mode) is not _DeviceContext for mode in _function_mode_stack())


_functional = find("torch._C._TorchDispatchModeKey.FUNCTIONAL")


def traced_by_compiler() -> bool:
    """True if AOTAutograd is making a graph; never where that cannot be told: the graph then has the kernels in it."""
    return None not in (_mode_of, _functional) and _mode_of(_functional) is not None


forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)
"""Negative where forward-mode AD is off; where that cannot be told each tensor is asked."""


graph_is_kept: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph", _always)
_top_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks", _always_something)


top_saved_tensors_hooks: Callable[[], Any] = partial(_top_hooks, False)
"""Returns the `torch.autograd.graph.saved_tensors_hooks` that see what a forward pass saves now, None for none."""


_set_hooks_tracing = find("torch._C._autograd._saved_tensors_hooks_set_tracing")


class saved_tensors_unhooked:
    """The caller's hooks on saved tensors, such as those of a checkpoint, see nothing of what is saved within."""

    def __enter__(self) -> None:
        if _set_hooks_tracing is None:
            self.hooks = saved_tensors_hooks(lambda x: x, lambda x: x)  # the innermost hooks alone are called
            self.hooks.__enter__()
        else:
            self.before = _set_hooks_tracing(True)

    def __exit__(self, *exception: object) -> None:
        if _set_hooks_tracing is None:
            self.hooks.__exit__(*exception)
        else:
            _set_hooks_tracing(self.before)
