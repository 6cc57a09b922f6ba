"""The promises under torch.compile and torch.export; the form is that of results.py."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from llmk.opcheck.calls import (
    MOST_KINDS,
    call,
    device_of,
    few_kinds,
    first_line,
    float_dtype,
    is_contiguous,
    of_other_widths,
    representatives,
    require_accurate,
    resized,
    traced_kinds,
)
from llmk.opcheck.inputs import BrokenPromise, Outcome, as_list, differentiable_inputs, note, prepare, same_bits
from llmk.opcheck.promises.nan_fill import RECYCLE_NOTHING, nan_filled_in_graphs, require_all_written
from llmk.registry import Op, Sample
from llmk.registry.private.compilers import aot_backend, compile_errors

PLAIN_LOOPS: dict[str, Any] = {"cpp.simdlen": 1, "cpp.vec_isa_ok": False}
"""Inductor's own vectors on a CPU are not asked about, and take C++'s compiler half of its time; by the second setting
nothing is built to know which there are.
"""


def compiled(op: Op, samples: Sequence[Sample]) -> None:
    """3: compiled by Inductor, in a graph whose memory is NaN until it is written, within the accuracy rule."""
    _require_right_by_inductor(op, next(resized(op, samples, [37]), samples[0]), dynamic=True)


def compiled_shapes(op: Op, samples: Sequence[Sample]) -> None:
    """3: compiled by Inductor of fixed sizes: a column, a short, a wide and a long sample, and a strided one."""
    widths = of_other_widths(op, samples, ())
    strided = [sample for sample in representatives(op, samples, layouts=True) if not is_contiguous(op, sample)]
    for sample in [*widths, *(sample for sample in strided[:1] if not any(sample is known for known in widths))]:
        _require_right_by_inductor(op, sample, dynamic=False)


def _require_right_by_inductor(op: Op, sample: Sample, *, dynamic: bool) -> None:
    torch.compiler.reset()
    with nan_filled_in_graphs():
        outcome = call_compiled(op, sample, compiled_call(op, dynamic=dynamic, options=RECYCLE_NOTHING | PLAIN_LOOPS))
    require_all_written(op, sample, outcome)
    require_accurate(op, sample, outcome)


def compiled_samples(op: Op, samples: Sequence[Sample]) -> None:
    """3: samples traced in one graph by Dynamo and AOTAutograd; without a GPU one of each kind, layout and width.

    An output may leave the graph beside a view of it.
    """
    for sample in _to_trace(op, samples):
        require_accurate(op, sample, _traced(op, sample).outcome)
    for sample in few_kinds(op, samples):
        _require_views_of_outputs(op, sample)


def _require_views_of_outputs(op: Op, sample: Sample) -> None:
    """Compare views that leave a graph with those of the outputs that leave it.

    AOTAutograd makes a view again of the output, with all views since the memory was allocated. Where an operator that
    it traces returns a view, that is another one, or raises an error.
    """

    def outputs_and_views(*args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs = list(as_list(op.overload(*args, **kwargs)))
        return outputs, _views(outputs)

    torch.compiler.reset()
    compiled = torch.compile(outputs_and_views, fullgraph=True, backend=aot_backend(lambda graph, _: graph))
    args, kwargs, _ = prepare(op, sample, differentiable_inputs(op, sample))
    note(sample)
    try:
        outputs, views = compiled(*args, **kwargs)
    except (*compile_errors(), AssertionError) as error:
        raise BrokenPromise(f"{sample}: with a view of an output: {first_line(error)}") from error
    for view, wanted in zip(views, _views(outputs), strict=True):
        if not same_bits(view, wanted):
            raise BrokenPromise(f"{sample}: a view of an output that leaves a graph with it has other numbers")


def _views(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [output.transpose(0, -1) for output in outputs if output.dim() > 0]


def compiled_call(op: Op, **options: Any) -> Callable[..., Any]:
    return torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, **options)


def call_compiled(op: Op, sample: Sample, fn: Callable[..., Any]) -> Outcome:
    try:
        return call(op, sample, fn=fn)
    except compile_errors() as error:
        raise BrokenPromise(f"{sample}: does not compile: {first_line(error)}") from error


def no_recompile(op: Op, samples: Sequence[Sample]) -> None:
    """3: no graph break, and no new graph after the second row count."""
    torch.compiler.reset()
    backend = aot_backend(lambda graph, _: graph)
    compiles, graphs = [], 0

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return backend(graph, inputs)

    fn = compiled_call(op, backend=counting)
    for sample in resized(op, samples, (64, 33, 7, 130, 51, 96)):
        outcome = call(op, sample, fn=fn)
        require_accurate(op, sample, outcome)
        compiles.append(graphs)
    if compiles and compiles[-1] > 2:
        raise BrokenPromise(f"six row counts took {compiles[-1]} graphs, two (static, dynamic) are right: {compiles}")


def clean_graph(op: Op, samples: Sequence[Sample]) -> None:
    """3: between neighbours no input, output or gradient is copied."""
    for sample in _to_trace(op, samples):
        for copy in _traced(op, sample).copies:
            raise BrokenPromise(f"{sample}: the compiled graph has {copy}")


def _to_trace(op: Op, samples: Sequence[Sample]) -> Sequence[Sample]:
    """All on a GPU; without one `traced_kinds`, layouts and widths among them."""
    return samples if device_of(op, samples[0]).type == "cuda" else traced_kinds(op, samples, layouts=True)


@dataclass(frozen=True)
class _Traced:
    """The outcome of a traced sample, and the nodes of its graphs that copy without need."""

    op: Op
    sample: Sample  # the ids of both are nobody else's while this lives
    outcome: Outcome
    copies: list[str]


_traces: "OrderedDict[tuple[int, int], _Traced]" = OrderedDict()
_MOST_KEPT = 64


def _traced(op: Op, sample: Sample) -> _Traced:
    """Traced once for the promises that look at it: in Inductor's decompositions, and not by Inductor."""
    key = id(op), id(sample)
    if key in _traces:
        note(sample)
    else:
        copies: list[str] = []

        def record(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
            copies.extend(n.format_node() or "" for n in graph.graph.nodes if _copies_boundary(n) or _writes_view(n))
            return graph

        torch.compiler.reset()
        backend = aot_backend(record, decomposed=True)
        _traces[key] = _Traced(op, sample, call_compiled(op, sample, compiled_call(op, backend=backend)), copies)
        if len(_traces) > _MOST_KEPT:
            _traces.popitem(last=False)
    return _traces[key]


def _writes_view(node: torch.fx.Node) -> bool:
    """Return True if a kernel's result is put back into a larger buffer, which copies it."""
    if not any(user.op == "output" for user in node.users):
        return False
    return node.target in (torch.ops.aten.slice_scatter.default, torch.ops.aten.as_strided_scatter.default)


def _copies_boundary(node: torch.fx.Node) -> bool:
    """Return True if the node copies an input as it is, or a result on its way out."""
    if node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") in (
        None,
        torch.preserve_format,
    ):
        return node.all_input_nodes[0].op == "placeholder" or any(user.op == "output" for user in node.users)
    return node.target is torch.ops.aten.copy.default and node.all_input_nodes[1].op == "placeholder"


def exported_trains(op: Op, samples: Sequence[Sample]) -> None:
    """6: exported without a gradient in sight and decomposed, the program trains any subset of inputs as it should."""
    in_float32 = float_dtype(op, samples[0]).itemsize >= 4
    for sample in traced_kinds(op, samples)[: None if in_float32 else MOST_KINDS]:
        names = differentiable_inputs(op, sample)
        if not names:
            continue
        trained = _exported(op, sample)
        for wanted in (subset for size in range(len(names)) for subset in combinations(names, size + 1)):
            try:
                require_accurate(op, sample, call(op, sample, wanted, fn=trained))
            except (BrokenPromise, RuntimeError) as error:
                wrong = getattr(error, "wrong", "")
                message = f"{sample}: exported, gradients for {', '.join(wanted)}: {error}"
                raise BrokenPromise(message, wrong) from error


def _exported(op: Op, sample: Sample) -> Callable[..., Any]:
    """The call as a module that was exported and decomposed; it takes the operator's arguments."""
    args, kwargs, tensors = prepare(op, sample, ())
    with torch.no_grad():
        program = torch.export.export(_Call(op, args, kwargs), tuple(tensors.values())).run_decompositions()
    module = program.module()
    return lambda *args, **kwargs: module(*(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)))


class _Call(torch.nn.Module):
    """A call of which the tensors are arguments and all else is fixed."""

    def __init__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.fixed, self.named = op, list(args), dict(kwargs)

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args = [next(given) if isinstance(value, torch.Tensor) else value for value in self.fixed]
        kwargs = {k: next(given) if isinstance(v, torch.Tensor) else v for k, v in self.named.items()}
        return self.op.overload(*args, **kwargs)
