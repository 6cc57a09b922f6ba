"""Selective activation checkpointing by public names: what is kept is not computed again, and nothing else changes."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from compile_tests.helpers.stub_driver import Graphs, steps, stub_driver, trace
from llmk.checkpoint import context_fn
from llmk.functional import rms_norm
from llmk.opcheck.calls import call
from llmk.registry import OPS

ops = torch.ops.llmk
mm = torch.ops.aten.mm.default


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the computations of each forward kernel op."""
    counter: Counter[str] = Counter()

    def counted(name: str, fn: Callable[..., Any], *args: Any) -> Any:
        counter[name] += 1
        return fn(*args)

    for op in OPS.values():
        for kernel_op in op.kernel_ops:
            if kernel_op.has_backward:
                monkeypatch.setattr(kernel_op, "_cpu", partial(counted, kernel_op.name, kernel_op._cpu))
    return counter


def llmk(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that keeps what llmk computes."""
    known = op in [op.overload for op in OPS.values()]
    return CheckpointPolicy.MUST_SAVE if known else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("name", OPS)
def test_an_operator_that_is_kept_runs_once(name: str, runs: Counter[str]) -> None:
    op = OPS[name]
    sample = next(iter(op.samples(torch.device("cpu"), torch.float32)))
    plain, once = call(op, sample), sum(runs.values())
    runs.clear()
    with torch.no_grad():
        op.overload(*sample.args, **sample.kwargs)
    again = 0 if name == "add" else sum(runs.values())  # whose backward pass needs nothing
    for contexts, times in (
        (context_fn([op.overload]), once),
        (context_fn(llmk), once),
        (context_fn([mm]), once + again),
    ):
        runs.clear()
        outcome = call(op, sample, fn=partial(checkpoint, op.overload, use_reentrant=False, context_fn=contexts))
        assert sum(runs.values()) == times, runs
        for argument, gradient in plain.gradients.items():
            assert gradient is not None
            assert torch.equal(outcome.gradients[argument], gradient)  # type: ignore[arg-type]


def block(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return ops.geglu(ops.swiglu(ops.rms_norm(x, w)) @ u)


def graphs_of(contexts: Any) -> Graphs:
    x, w, u = (torch.randn(shape, requires_grad=True) for shape in ((6, 64), (64,), (32, 48)))

    def step(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        y = checkpoint(block, x, w, u, use_reentrant=False, context_fn=contexts)
        assert isinstance(y, Tensor)
        return y.sum()

    return trace(step, x, w, u)


KEPT = {
    "nothing": ([], {"gated_unit_kernel": 1, "aten.mm": 1}),
    "swiglu": ([ops.swiglu.default], {"aten.mm": 1}),
    "another of its kernel": ([ops.geglu.default], {"gated_unit_kernel": 1, "aten.mm": 1}),
    "the product": ([mm], {"gated_unit_kernel": 1}),
    "both": ([ops.swiglu.default, mm], {}),
    "by a policy": (llmk, {"aten.mm": 1}),
}


@pytest.mark.parametrize(("kept", "again"), KEPT.values(), ids=KEPT)
def test_a_compiled_block_computes_again_what_is_not_kept(kept: Any, again: dict[str, int]) -> None:
    """A packed gate takes kernels in a GPU's graphs. What geglu gives nobody needs again."""
    with stub_driver():
        (backward,) = graphs_of(context_fn(kept)).backward
    found = Counter(step.partition("[")[0] for step in steps(backward))
    gradients = {"aten.mm": 2, "gated_unit_backward_kernel": 2}
    assert {name: found[name] - gradients.get(name, 0) for name in again} == again
    assert found["gated_unit_kernel"] + found["aten.mm"] == 2 + sum(again.values())


@pytest.mark.parametrize("kept", [[], [ops.rms_norm.default, mm], llmk], ids=["nothing", "some", "policy"])
def test_a_compiled_block_gives_the_same(kept: Any) -> None:
    """All of it is PyTorch's own operations in the graph on a CPU."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((6, 64), (64,), (32, 48))]
    contexts = context_fn(kept)

    def gradients(fn: Callable[..., Any]) -> tuple[Tensor, ...]:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aot_eager_decomp_partition", fullgraph=True)
        return torch.autograd.grad(compiled(*inputs).sum(), inputs)

    found = gradients(lambda *args: checkpoint(block, *args, use_reentrant=False, context_fn=contexts))
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(block), strict=True))


def test_a_compiled_function_sees_that_the_list_changed() -> None:
    graphs = AotEagerAndRecordGraphs()
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((6, 64), (64,), (32, 48))]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda contexts, *args: checkpoint(block, *args, use_reentrant=False, context_fn=contexts), backend=graphs
    )
    for kept in ([ops.swiglu.default], [ops.geglu.default], [ops.swiglu.default]):
        torch.autograd.grad(compiled(context_fn(kept), *inputs).sum(), inputs)
    assert len(graphs.fw_graphs) == 2
    hashes = [getattr(context_fn([op]), "cache_hash", None) for op in (ops.swiglu.default, ops.geglu.default, mm)]
    assert len({*hashes, None}) == 4


def test_only_operators_are_kept() -> None:
    for wrong in (ops.rms_norm, "rms_norm", rms_norm):
        with pytest.raises(ValueError, match="Expected op in `op_list` to be an OpOverload but got"):
            context_fn([wrong])
