"""Whoever sees calls of operators and launches of kernels, for which the fast path of eager mode makes way."""

from collections import Counter
from typing import Any

import pytest
import torch
import triton.knobs
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmk.registry import OPS
from llmk.registry.devices import INTERPRET


class Subclass(Tensor):
    pass


def counting() -> FlopCounterMode:
    return FlopCounterMode(display=False)


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = func
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a tensor has; on a CPU also in llmk's operators, which a mode sees from outside."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.kernel_ops = {kernel_op.overload: kernel_op for op in OPS.values() for kernel_op in op.kernel_ops}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kernel_ops and args[0].is_cpu and not INTERPRET:
            with self:
                return self.kernel_ops[func].implementation(*args)(*args)
        out = func(*args, **(kwargs or {}))
        every = out if isinstance(out, tuple | list) else [out]
        self.most = max([self.most, *(x.numel() for x in every if isinstance(x, Tensor))])
        return out


class Operators(TorchDispatchMode):
    """Counts llmk's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "llmk":
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class GraphOperators:
    """Another backend that also counts the operators of a namespace in each graph that it is given."""

    def __init__(self, namespace: str = "llmk", backend: str = "eager") -> None:
        self.prefix, self.backend = f"{namespace}.", backend
        self.graphs: list[Counter[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        targets = (str(node.target) for node in graph.graph.nodes)
        names = (name.removeprefix(self.prefix) for name in targets if name.startswith(self.prefix))
        self.graphs.append(Counter(name.removesuffix(".default") for name in names))
        return lookup_backend(self.backend)(graph, example_inputs)

    def of(self, module: nn.Module, *args: Any, **kwargs: Any) -> Counter[str]:
        """Return the operators in the one graph of a module's forward pass."""
        torch.compile(module, fullgraph=True, backend=self)(*args, **kwargs)
        return self.graphs[-1]


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
