"""Whoever sees calls of operators and launches of kernels, for which the fast path of eager mode makes way."""

from typing import Any

import pytest
import triton.knobs
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Subclass(Tensor):
    pass


def counting() -> FlopCounterMode:
    return FlopCounterMode(display=False)


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = func
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a tensor has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        every = out if isinstance(out, tuple | list) else [out]
        self.most = max([self.most, *(x.numel() for x in every if isinstance(x, Tensor))])
        return out


def watch(where: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give something of Triton's a part in launches."""
    runtime = triton.knobs.runtime
    if where == "pre_run_hooks":
        monkeypatch.setattr(kernel, "pre_run_hooks", [print])
    elif where == "instrumentation_mode":
        monkeypatch.setattr(triton.knobs.compilation, where, "some")
    elif where in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(getattr(runtime, where), "calls", [print])
    elif where == "another enter hook":
        monkeypatch.setattr(runtime, "launch_enter_hook", print)
    else:
        monkeypatch.setattr(runtime, where, True)


WATCHERS = [
    "launch_enter_hook",
    "launch_exit_hook",
    "another enter hook",
    "add_stages_inspection_hook",
    "debug",
    "instrumentation_mode",
    "pre_run_hooks",
]
