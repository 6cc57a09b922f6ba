"""The promises under torch.compile and on a GPU; the form is that of promises.py."""

from collections.abc import Sequence
from typing import Any

import torch

from llmk.opcheck.calls import (
    BrokenPromise,
    as_list,
    call,
    differentiable_inputs,
    first_line,
    incoming_gradients,
    prepare,
    require_accurate,
    resized,
)
from llmk.registry import Op, Sample
from llmk.registry.private import aot_backend, compile_errors


def compiled(op: Op, samples: Sequence[Sample]) -> None:
    """3: compiled by Inductor in one graph among neighbours, outputs and gradients within the accuracy rule."""
    sample = next(resized(op, samples, [37]), samples[0])
    _require_accurate_when_compiled(op, sample, {"fullgraph": True, "dynamic": True})


def compiled_samples(op: Op, samples: Sequence[Sample]) -> None:
    """3: every sample traced in one graph by Dynamo and AOTAutograd."""
    for sample in samples:
        _require_accurate_when_compiled(op, sample, {"fullgraph": True, "backend": "aot_eager"})


def cuda_graphs(op: Op, samples: Sequence[Sample]) -> None:
    """3: `mode="reduce-overhead"`, captured and replayed."""
    sample = next(resized(op, samples, [37]), samples[0])
    _require_accurate_when_compiled(op, sample, {"fullgraph": True, "mode": "reduce-overhead"}, calls=4)


def _require_accurate_when_compiled(op: Op, sample: Sample, options: dict[str, Any], calls: int = 1) -> None:
    torch.compiler.reset()
    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), **options)
    for _ in range(calls):
        try:
            outcome = call(op, sample, fn=fn)
        except compile_errors() as error:
            raise BrokenPromise(f"{sample}: does not compile: {first_line(error)}") from error
        require_accurate(op, sample, outcome)


def no_recompile(op: Op, samples: Sequence[Sample]) -> None:
    """3: no graph break, and no new graph after the second row count."""
    torch.compiler.reset()
    backend = aot_backend(lambda graph, _: graph)
    compiles, graphs = [], 0

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return backend(graph, inputs)

    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), backend=counting, fullgraph=True)
    for sample in resized(op, samples, (64, 33, 7, 130, 51, 96)):
        outcome = call(op, sample, fn=fn)
        require_accurate(op, sample, outcome)
        compiles.append(graphs)
    if compiles and compiles[-1] > 2:
        raise BrokenPromise(f"six row counts took {compiles[-1]} graphs, two (static, dynamic) are right: {compiles}")


def clean_graph(op: Op, samples: Sequence[Sample]) -> None:
    """3: between neighbours no input, output or gradient is copied."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    backend = aot_backend(record, decomposed=True)
    for sample in samples:
        torch.compiler.reset()
        graphs.clear()
        call(op, sample, fn=torch.compile(lambda *a, **k: op.overload(*a, **k), backend=backend, fullgraph=True))
        for graph in graphs:
            for node in graph.graph.nodes:
                if _copies_boundary(node) or _writes_view(node):
                    raise BrokenPromise(f"{sample}: the compiled graph has {node.format_node()}")


def _writes_view(node: torch.fx.Node) -> bool:
    """Whether a kernel's result is put back into a larger buffer, which copies it."""
    if not any(user.op == "output" for user in node.users):
        return False
    return node.target in (torch.ops.aten.slice_scatter.default, torch.ops.aten.as_strided_scatter.default)


def _copies_boundary(node: torch.fx.Node) -> bool:
    """Whether the node copies an input as it is, or a result on its way out."""
    if node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") in (
        None,
        torch.preserve_format,
    ):
        return node.all_input_nodes[0].op == "placeholder" or any(user.op == "output" for user in node.users)
    return node.target is torch.ops.aten.copy.default and node.all_input_nodes[1].op == "placeholder"


def no_host_sync(op: Op, samples: Sequence[Sample]) -> None:
    """3: neither direction makes the host wait for the device."""
    for sample in samples:
        args, kwargs, _ = prepare(op, sample, differentiable_inputs(op, sample))
        outputs = as_list(op.overload(*args, **kwargs))  # builds the kernels, which may wait
        torch.autograd.backward([o for o in outputs if o.requires_grad], incoming_gradients(outputs))
        grads = incoming_gradients(outputs)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = as_list(op.overload(*args, **kwargs))
            torch.autograd.backward([o for o in outputs if o.requires_grad], grads)
        except RuntimeError as error:
            raise BrokenPromise(f"{sample}: the host waits: {first_line(error)}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def other_stream(op: Op, samples: Sequence[Sample]) -> None:
    """2: on a stream that is not the default one."""
    stream = torch.cuda.Stream()
    for sample in samples:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outcome = call(op, sample)
        torch.cuda.current_stream().wait_stream(stream)
        require_accurate(op, sample, outcome)
