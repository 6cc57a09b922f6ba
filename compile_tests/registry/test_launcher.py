"""The launcher of plain eager mode tells apart whatever Triton would build another kernel for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from compile_tests.helpers.observers import WATCHERS, watch
from llmk.ops.pointwise.gated_units import gated_unit_kernel
from llmk.registry import set_short_path_enabled, wrap_triton
from llmk.registry.devices import INTERPRET
from llmk.registry.eager import launcher
from llmk.registry.eager.launcher import Launcher

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: nothing is built")


class Compiled:
    """The return value of Triton's launch, which counts the launches made without it."""

    function, packed_metadata = 1, ()

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.runs.append(args)


class Kernel:
    """A kernel of three arguments and two constants, built anew at each of Triton's own launches."""

    signature = type("Signature", (), {"parameters": dict.fromkeys(["x_ptr", "w_ptr", "n", "EVEN", "BLOCK"])})

    def __init__(self) -> None:
        self.built: list[Compiled] = []
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.built.append(Compiled())
            return self.built[-1]

        return launch


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 7

    monkeypatch.setattr(type(driver), "active", property(lambda self: Driver()))


storage = torch.zeros(64)
aligned, shifted = storage[:32], storage[1:32]


def described(x: Tensor, block: int) -> TensorDescriptor:
    return TensorDescriptor(x.view(2, 16), [2, 16], [16, 1], [2, block])


def test_the_second_launch_is_direct() -> None:
    kernel = Kernel()
    launching = Launcher(kernel)
    for grid, n in [((3,), 48), ((5, 2), 64)]:
        launching[grid](aligned, None, n, BLOCK=16, EVEN=True, num_warps=4)
    (compiled,) = kernel.built
    assert compiled.runs == [(5, 2, 1, 7, 1, (), None, None, None, aligned.data_ptr(), None, 64, True, 16)]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((shifted, None, 48), {}),
        ((aligned.half(), None, 48), {}),
        ((aligned, aligned, 48), {}),
        ((aligned, None, 1), {}),
        ((aligned, None, 50), {}),
        ((aligned, None, 2**31), {}),
        ((aligned, None, -(2**31) - 16), {}),
        ((aligned, None, True), {}),
        ((aligned, None, 48), {"EVEN": False}),
        ((aligned, None, 48), {"num_warps": 8}),
        ((described(aligned, 16), None, 48), {}),
    ],
)
def test_what_is_built_again(args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel = Kernel()
    launching = Launcher(kernel)
    usual = {"EVEN": True, "BLOCK": 16, "num_warps": 4}
    launching[(1,)](aligned, None, 48, **usual)
    for _ in range(2):
        launching[(1,)](*args, **usual | constants)
    assert len(kernel.built) == 2


def test_a_described_tensor_is_launched_directly_by_its_dtype_and_block() -> None:
    kernel = Kernel()
    launching = Launcher(kernel)
    usual = {"EVEN": True, "BLOCK": 16, "num_warps": 4}
    first = described(aligned, 16)
    for x in [first, described(aligned * 2, 16), described(aligned, 8), described(aligned.half(), 16)]:
        assert launching[(1,)](x, None, 48, **usual) is None  # nothing that a cached call could repeat
    assert len(kernel.built) == 3
    (run,) = kernel.built[0].runs
    assert isinstance(run[9], TensorDescriptor)


def test_it_tells_apart_what_triton_does() -> None:
    """Over many arguments of a real kernel: where Triton's specialization differs, so does the launcher's."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(gated_unit_kernel.signature, gated_unit_kernel.params, backend)
    tensors: list[Tensor | None] = [aligned, shifted, aligned.bfloat16(), None]
    sizes = [1, 2, 16, 17, 48, 2**31 - 1, 2**31, 2**31 + 16, 2**63 - 1, 2**63 - 16, True, False]
    sizes += [0, -1, -100, -16, -(2**31), -(2**31) - 1, -(2**31) - 16, -(2**40) - 4, -(2**63)]
    calls = [(aligned, up, aligned, N, 32, 24) for up in tensors for N in sizes]
    constants = {"ACTIVATION": "silu", "BLOCK_N": 32, "num_warps": 4}

    built: dict[int, Any] = {}

    class Specializing(Kernel):
        signature = gated_unit_kernel.signature

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> Compiled:
                compiled = Compiled()
                built[id(compiled)] = (compiled, bind(*args, **constants)[1])
                return compiled

            return launch

    launching = Launcher(Specializing())
    for args in calls:
        launching[(1,)](*args, **constants)
        runs = {key: len(compiled.runs) for key, (compiled, _) in built.items()}
        launching[(1,)](*args, **constants)
        (used,) = [
            specialization for key, (compiled, specialization) in built.items() if len(compiled.runs) > runs[key]
        ]
        assert used == bind(*args, **constants)[1]


def test_a_float_is_not_a_number_that_happens_to_be_one() -> None:
    kernel = Kernel()
    launching = Launcher(kernel)
    for args in [(aligned, 48, 1.0), (aligned, 1.0, 48), (aligned, 48, 1), (aligned, 48, None)]:
        launching[(1,)](*args, EVEN=True, BLOCK=16)
    assert len(kernel.built) == 4


def test_a_number_past_64_bits_is_refused() -> None:
    kernel = Kernel()
    for n in (2**63, -(2**63) - 1):
        with pytest.raises(OverflowError, match=rf"n: expected a number of 64 bits, got {n}"):
            Launcher(kernel)[(1,)](aligned, None, n, EVEN=True, BLOCK=16)
    assert not kernel.built


@pytest.mark.parametrize("where", WATCHERS)
def test_who_watches_launches_sees_all_of_them(where: str) -> None:
    """Triton's own launch tells it, and what it then builds is used no longer than somebody watches."""
    kernel = Kernel()
    launching = Launcher(kernel)

    def launch() -> None:
        launching[(1,)](aligned, None, 48, EVEN=True, BLOCK=16)

    with pytest.MonkeyPatch.context() as patch:
        watch(where, kernel, patch)
        launch()
        launch()
        assert [compiled.runs for compiled in kernel.built] == [[], []]
    launch()
    launch()
    assert [len(compiled.runs) for compiled in kernel.built] == [0, 0, 1]
    with pytest.MonkeyPatch.context() as patch:
        watch(where, kernel, patch)
        launch()
    assert [len(compiled.runs) for compiled in kernel.built] == [0, 0, 1, 0]


def test_every_launch_is_given_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built by the launcher, told to somebody who watches, or launched in Triton's own way."""
    given: list[dict[str, Any]] = []

    class Noting(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> Compiled:
                given.append(constants)
                return Compiled()

            return launch

    monkeypatch.setattr(launcher, "OPTIONS", {"enable_fp_fusion": True})
    kernel = Noting()
    constants = {"EVEN": True, "BLOCK": 16}
    Launcher(kernel)[(1,)](aligned, None, 48, **constants)
    kernel.pre_run_hooks.append(print)
    Launcher(kernel)[(1,)](aligned, None, 48, **constants)
    with set_short_path_enabled(False):
        wrap_triton(kernel)[(1,)](aligned, None, 48, **constants)
    assert given == [constants | {"enable_fp_fusion": True}] * 3
