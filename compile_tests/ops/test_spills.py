"""No launch configuration that an operator can choose spills registers on sm_90, asks for more shared memory than an
sm_80 has, or is built to read a register that nothing wrote; no GPU is needed.

`helpers/configurations.py` finds the configurations. With `--build many` those with the largest blocks for their
number of warps are built, and with `--build every` all of them, found at more sizes. Without, test_aot.py asks it of
the workloads alone.
"""

import functools

import pytest
import torch

from compile_tests.helpers import aot
from compile_tests.helpers.configurations import largest_blocks, sweep
from compile_tests.helpers.uniform_registers import undefined_descriptors
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET
from llmk.registry.launch import Launch

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: the kernels are interpreted, not compiled"),
    pytest.mark.usefixtures("compiled_once"),
]

SM_90 = aot.TARGETS["sm_90"]
SHARED_MEMORY_OF_SM_80 = 163 * 1024


pytest_generate_tests = aot.parametrize_kernels


@functools.lru_cache(maxsize=4)  # an operator's kernels come one after the other
def _swept(name: str, dtype: torch.dtype, every: bool) -> list[Launch]:
    return sweep(OPS[name], dtype, every=every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_configuration_spills(names: list[str], kernel: str, dtype: torch.dtype, build: str) -> None:
    if build == "few":
        pytest.skip("minutes of a core for some operators: --build many")
    (name,), every = names, build == "every"
    launches = _swept(name, dtype, every)
    assert bool(launches) != all(kernel_op.is_plain for kernel_op in OPS[name].kernel_ops)
    launches = aot.of_kernel(launches, kernel, OPS[name])
    chosen = aot.distinct(launches if every else largest_blocks(launches), SM_90)
    spills = [
        f"{spilled} bytes: {aot.describe(launch)}" for launch in chosen if (spilled := aot.must_spill(launch, SM_90))
    ]
    assert not spills, "\n".join(spills)
    shared = {aot.describe(launch): aot.compile_for(launch, SM_90).metadata.shared for launch in chosen}
    assert not {launch: size for launch, size in shared.items() if size > SHARED_MEMORY_OF_SM_80}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_configuration_reads_a_register_that_nothing_wrote(
    names: list[str], kernel: str, dtype: torch.dtype, build: str
) -> None:
    """ptxas makes such code of small blocks too."""
    if build == "few":
        pytest.skip("minutes of a core for some operators: --build many")
    (name,) = names
    launches = aot.distinct(aot.of_kernel(_swept(name, dtype, build == "every"), kernel, OPS[name]), SM_90)
    wrong = [aot.describe(launch) for launch in launches if undefined_descriptors(aot.compile_for(launch, SM_90))]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def launches(pytestconfig: pytest.Config) -> list[Launch]:
    if pytestconfig.getoption("--build") == "few":
        pytest.skip("no configuration is built: --build many")
    return sweep(OPS["rms_norm"], torch.bfloat16)


def test_a_sweep_reaches_every_kernel_of_the_samples(launches: list[Launch]) -> None:
    swept = {launch.kernel for launch in launches}
    assert swept == {launch.kernel for launch in aot.launches(OPS["rms_norm"], torch.bfloat16)}
    assert swept == {launch.kernel for launch in largest_blocks(launches)}


def _constants(launches: list[Launch], kernel: str, name: str) -> set[object]:
    return {launch.kwargs[name] for launch in launches if launch.kernel.__name__ == kernel}


def test_a_sweep_finds_each_block_aligned_and_not(launches: list[Launch]) -> None:
    assert {2**k for k in range(6, 16)} <= _constants(launches, "rms_norm_kernel", "BLOCK_N")
    aligned: dict[object, set[bool]] = {}
    for launch in launches:
        if launch.kernel.__name__ == "rms_norm_kernel":
            N, stride = launch.args[7], launch.args[8]
            aligned.setdefault(launch.kwargs["BLOCK_N"], set()).add(N % 16 == 0 and stride % 16 == 0)
    assert aligned[16384] == {True, False}
    assert aligned[32768] == {True}  # what is wider and not aligned is plain PyTorch


def test_the_largest_blocks_keep_both_alignments(launches: list[Launch]) -> None:
    kept = [launch for launch in largest_blocks(launches) if launch.kernel.__name__ == "rms_norm_backward_kernel"]
    assert {launch.args[8] % 16 == 0 for launch in kept} == {True, False}


def test_spills_by_choice_are_told_from_others() -> None:
    (launch, *_) = sweep(OPS["add"], torch.float32)

    def with_options(**options: int) -> Launch:
        return Launch(launch.kernel, launch.grid, launch.args, options)

    assert aot.must_spill(with_options(BLOCK_N=16384, num_warps=4), SM_90) > 0
    few = with_options(BLOCK_N=2048, num_warps=4, maxnreg=24)  # a thread could have 255
    assert aot.resource_usage(aot.compile_for(few, SM_90))[1] > 0
    assert aot.must_spill(few, SM_90) == 0
