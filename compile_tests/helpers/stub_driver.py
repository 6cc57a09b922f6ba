"""Tracing for a GPU on a machine without one.

`stub_driver` makes Triton believe that there is a GPU and makes launches do nothing, so that the kernel path can be
traced, compiled and run on CPU tensors, whose values then mean nothing. `trace` gives the graphs of a training step.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CpuInterface
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_helpers
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, Node
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from llmk.registry import use_kernels_on_cpu

ROOT = Path(__file__).resolve().parents[2]

aten = torch.ops.aten

VIEWS = (
    aten.alias.default,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.slice.Tensor,
    aten.unsqueeze.default,
)


TARGET = GPUTarget("cuda", 90, 32)


class _StubDriver:
    """The part of a Triton driver that compilation and a launch that does nothing ask for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def stub_driver() -> Iterator[None]:
    """Take the kernel path on CPU tensors, for a GPU that is not there; launches do nothing."""
    launch = mock.patch.object(triton.JITFunction, "run")
    with mock.patch.object(driver, "_active", _StubDriver()), launch, use_kernels_on_cpu():
        yield


@dataclass
class Graphs:
    """The forward and backward graphs of one step, as AOTAutograd gives them to Inductor."""

    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)


def trace(step: Callable[..., torch.Tensor], *args: Any) -> Graphs:
    """Compile `step` with Inductor's decompositions and partitioner, run it and its backward, and keep the graphs."""
    graphs = Graphs()

    def keep(into: list[GraphModule]) -> Callable[..., Any]:
        def compiler(graph: GraphModule, inputs: Any) -> Any:
            into.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep(graphs.forward),
        bw_compiler=keep(graphs.backward),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    torch.compile(step, backend=backend, fullgraph=True)(*args).backward()
    return graphs


def generated_code(step: Callable[..., torch.Tensor], *args: Any) -> list[str]:
    """The code that Inductor generates for the forward and the backward pass; its own kernels are not built."""
    nothing = mock.MagicMock()
    options_for_target = getattr(triton_helpers, "get_backend_options_for_target", None)

    def options_of(target: GPUTarget, options: Any = None) -> Any:
        assert options_for_target is not None
        return options_for_target(TARGET, options)

    # Scalar C++, so that nothing has to be compiled to find out which vector instructions the CPU has.
    options = {"fx_graph_cache": False, "cpp.simdlen": 1}
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for compiler in ("triton", "cpp_pybinding"):
            stack.enter_context(mock.patch.object(AsyncCompile, compiler, nothing))
        # What torch 2.15 asks of a CPU, where the kernels seem to run.
        stack.enter_context(mock.patch.object(CpuInterface, "raise_if_triton_unavailable", nothing))
        stack.enter_context(
            mock.patch.object(triton_helpers, "get_backend_options_for_target", options_of, create=True)
        )
        stack.enter_context(torch._inductor.config.patch(options))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        _, code = run_and_get_code(lambda: torch.compile(step, fullgraph=True)(*args).backward())
    return [text.replace(str(ROOT), "") for text in code]  # names of folders are not code


@dataclass(frozen=True)
class Launched:
    """A kernel launch in a graph."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    cloned: tuple[str, ...]  # the arguments that functionalization believes the kernel writes to

    @classmethod
    def of(cls, node: Node) -> "Launched":
        constants: Any = node.kwargs
        kernel: Any = kernel_side_table.get_kernel(constants["kernel_idx"])
        while not isinstance(kernel, triton.JITFunction):  # num_warps makes it an Autotuner of one configuration
            kernel = kernel.fn
        grid = constants["grid"][0]
        return cls(kernel.__name__, tuple(grid), constants["kwargs"], tuple(constants["tensors_to_clone"]))


def launches(graph: GraphModule) -> list[Launched]:
    """The kernels of ours that a graph launches, in order."""
    return [Launched.of(node) for node in graph.graph.nodes if node.target is triton_kernel_wrapper_functional]


def steps(graph: GraphModule) -> Iterator[str]:
    """The steps of a graph that a reader should know: llmk's kernels with their grids, its opaque ops, and products."""
    for node in graph.graph.nodes:
        if node.target is triton_kernel_wrapper_functional:
            launched = Launched.of(node)
            yield f"{launched.name}{list(launched.grid)}"
        elif str(node.target).startswith(("llmk.", "aten.mm.", "aten.addmm.", "aten.clone.", "aten.copy.")):
            yield str(node.target).removesuffix(".default")


def origin(node: Node) -> Node:
    """Return the tensor that a tensor is a view of."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def describe(node: Node) -> str:
    """A tensor's dtype, shape and origin, such as `f32[48] rms_norm_kernel.ms_ptr`."""
    value = node.meta["val"]
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    source = origin(node)
    if source.op == "placeholder":
        return f"{kind} input"
    if source.target is not operator.getitem:
        return f"{kind} {str(source.target).removesuffix('.default')}"
    maker, item = source.args
    assert isinstance(maker, Node)
    if maker.target is triton_kernel_wrapper_functional:
        return f"{kind} {Launched.of(maker).name}.{item}"
    return f"{kind} {str(maker.target).removesuffix('.default')}[{item}]"


def saved(graphs: Graphs) -> list[Node]:
    """Tensors saved by the forward graph for the backward graph: its inputs but the incoming gradient."""
    (forward,), (backward,) = graphs.forward, graphs.backward
    wanted = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    outputs: Any = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    return [node for node in outputs if isinstance(node, Node) and node.name in wanted]
