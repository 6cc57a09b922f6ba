"""No graph is compiled for more rows than the second on the kernel path, too: seen through the stub driver."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compile_tests.helpers.breadth import some_of
from compile_tests.helpers.stub_driver import stub_driver
from llmk import functional
from llmk.opcheck.calls import call
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: operators are opaque")


CASES = some_of(
    [(name, dynamic) for dynamic in (True, None) for name in OPS],
    [(name, True) for name in OPS] + [(name, None) for name in ("rms_norm", "rope", "fused_linear_ce", "moe_experts")],
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'symbolic' if case[1] else 'automatic'}")
def test_row_counts_share_a_graph(case: tuple[str, bool | None]) -> None:
    """With every size symbolic too: what must be fixed, such as a block size, is, and nothing else reaches kernels."""
    name, dynamic = case
    op = OPS[name]
    assert op.resized is not None
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(lambda *a, **k: op.overload(*a, **k), backend=counter, fullgraph=True, dynamic=dynamic)
    compiles = []
    with stub_driver():
        for rows in (64, 33, 7, 130, 51, 96, 5000):
            call(op, op.resized(rows, torch.device("cpu"), torch.bfloat16), fn=fn)
            compiles.append(counter.frame_count)
    assert compiles[-1] <= 2, compiles


def test_python_functions_do_not_share_their_limit_of_recompilations() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with torch._dynamo.config.patch(recompile_limit=1):
        for fn in (functional.softmax, functional.sparsemax, functional.relu_squared):
            torch.compile(fn, backend="eager", fullgraph=True)(x)
