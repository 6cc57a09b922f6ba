"""No graph is compiled for more rows than the second on the kernel path, too: seen through the stub driver."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compile_tests.helpers.stub_driver import stub_driver
from llmk import functional
from llmk.opcheck.calls import call
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: operators are opaque")


@pytest.mark.parametrize("name", OPS)
def test_row_counts_share_a_graph(name: str) -> None:
    op = OPS[name]
    assert op.resized is not None
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), backend=counter, fullgraph=True)
    compiles = []
    with stub_driver():
        for rows in (64, 33, 7, 130, 51, 96, 5000):
            call(op, op.resized(rows, torch.device("cpu"), torch.bfloat16), fn=fn)
            compiles.append(counter.frame_count)
    assert compiles[-1] <= 2, compiles


@pytest.mark.parametrize("name", OPS)
def test_every_size_symbolic(name: str) -> None:
    """`dynamic=True`: what must be fixed, such as a block size, is; nothing symbolic reaches a kernel's constants."""
    op = OPS[name]
    assert op.resized is not None
    torch._dynamo.reset()
    fn = torch.compile(lambda *a, **k: op.overload(*a, **k), backend="aot_eager", fullgraph=True, dynamic=True)
    with stub_driver():
        call(op, op.resized(37, torch.device("cpu"), torch.bfloat16), fn=fn)


def test_python_functions_do_not_share_their_limit_of_recompilations() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with torch._dynamo.config.patch(recompile_limit=1):
        for fn in (functional.softmax, functional.sparsemax, functional.relu_squared):
            torch.compile(fn, backend="eager", fullgraph=True)(x)
