"""Every kernel compiles ahead for every target, on a machine without a GPU.

`helpers/aot.py` finds the launches by running each operator on fake tensors, with all gradients wanted. One target of
each vendor gets each kernel of a family in bfloat16 as the first sample launches it; sm_90 gets it as the first sample
and workload of every operator do, where they differ in more than sizes. With `--build many` each gradient is also
wanted alone, every target gets all workloads, and sm_90 and sm_86 what all samples launch, and the workloads in every
dtype. Launches are those that an operator chooses for the target's shared memory; the widest rows are built for a
target that has little of it in any case, with `--build many` for each.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from compile_tests.helpers import aot
from compile_tests.helpers.uniform_registers import undefined_descriptors
from llmk import functional
from llmk.opcheck.interpreted.loops import kernels_of
from llmk.registry import OPS, jit
from llmk.registry.devices import INTERPRET
from llmk.registry.launch import Launch, record_launches
from llmk.registry.private.tensors import FakeTensorMode

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: the kernels are interpreted, not compiled"),
    pytest.mark.usefixtures("compiled_once"),
]

THREADS = 1024
"""The threads of one block, on every target."""

FEW_TARGETS = ("sm_90", "gfx942")
THOROUGH_TARGETS = ("sm_90", "sm_86")
"""One with much shared memory and one with little."""
SMALL_TARGETS = ("sm_86", "sm_89", "sm_120")

each_target = pytest.mark.parametrize("target", aot.TARGETS)


@functools.cache
def _recorded(name: str, dtype: torch.dtype, kind: str, build: str, target: str = "sm_90") -> list[Launch]:
    wanted = {"samples": kind == "samples", "workloads": kind == "workloads"}
    same = next(other for other in aot.TARGETS if aot.limits(other) == aot.limits(target))
    if same != target:
        return _recorded(name, dtype, kind, build, same)
    if build == "few":  # of which the first of each kernel are built
        return list(aot.every_launch(OPS[name], dtype, target=target, alone=False, **wanted))
    return aot.launches(OPS[name], dtype, target=target, **wanted)


def _kernel(launch: Launch) -> Any:
    return launch.kernel


def _first_of_each(launches: Iterable[Launch], by: Callable[[Launch], Any] = _kernel) -> list[Launch]:
    """Return the first launch of each kernel."""
    first: dict[Any, Launch] = {}
    for launch in launches:
        first.setdefault(by(launch), launch)
    return list(first.values())


def _form(launch: Launch) -> tuple[Any, ...]:
    """Return what a launch is but for sizes: kernel, constants, options, and arguments' dtypes or whether given."""
    kinds = [value.dtype if isinstance(value, Tensor) else value is None for value in launch.args]
    return launch.kernel, *sorted(map(str, launch.kwargs.items())), *kinds


def _few_launches(names: list[str], target: str) -> tuple[list[Launch], list[Launch]]:
    """Return the launches of a family's samples and workloads: of each kernel one, for sm_90 one of each form."""
    if target not in FEW_TARGETS:
        pytest.skip(f"`--build many` builds for {target}")
    samples, workloads = [], []
    for name in names:
        first = _first_of_each(_recorded(name, torch.bfloat16, "samples", "few", target))
        large = _first_of_each(_recorded(name, torch.bfloat16, "workloads", "few")) if target == "sm_90" else []
        launched = {launch.kernel for launch in large}
        samples += [launch for launch in first if launch.kernel not in launched]
        workloads += large
    if target != "sm_90":
        return _first_of_each(samples), []
    workloads = _first_of_each(workloads, _form)
    known = set(map(_form, workloads))
    return [launch for launch in _first_of_each(samples, _form) if _form(launch) not in known], workloads


pytest_generate_tests = aot.parametrize_kernels


def _launches(names: list[str], kernel: str, target: str, build: str) -> tuple[list[Launch], list[Launch]]:
    if build == "few":
        return _few_launches(names, target)
    (name,), thorough = names, target in THOROUGH_TARGETS
    samples = _recorded(name, torch.bfloat16, "samples", build, target)
    dtypes = OPS[name].dtypes if thorough else [torch.bfloat16]
    workloads = [launch for dtype in dtypes for launch in _recorded(name, dtype, "workloads", build, target)]
    every = aot.distinct([*(samples if thorough else _first_of_each(samples)), *workloads], aot.TARGETS[target])
    chosen, large = aot.of_kernel(every, kernel, OPS[name]), set(map(id, workloads))
    return [x for x in chosen if id(x) not in large], [x for x in chosen if id(x) in large]


def _compile(launch: Launch, target: str) -> CompiledKernel:
    try:
        return aot.compile_for(launch, aot.TARGETS[target])
    except Exception as error:
        error.add_note(f"for {target}: {aot.describe(launch)}")
        raise


@each_target
def test_every_kernel_compiles(names: list[str], kernel: str, target: str, build: str) -> None:
    """On sm_90 the process that has built a kernel looks at its code, too."""
    samples, workloads = _launches(names, kernel, target, build)
    launches = [*samples, *workloads]
    assert kernel != aot.ALL or bool(launches) != all(op.is_plain for name in names for op in OPS[name].kernel_ops)
    for launch in launches:
        compiled = _require_fits(launch, target)
        if target == "sm_90":
            _require_good_code(compiled, launch)
    if target == "sm_90":
        _require_conversions_alone(launches)
        _require_no_float_constants([x for name in names for x in _recorded(name, torch.bfloat16, "samples", build)])
        for launch in workloads:
            _, spilled = aot.resource_usage(_compile(launch, target))
            assert not spilled, f"{spilled} bytes: {aot.describe(launch)}"
    if target == "sm_90" and build == "few":
        missing = _kernels_in(".".join(OPS[names[0]].module.split(".")[:3]))
        assert not missing - _launched(names)


def _kernels_in(package: str) -> set[Any]:
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    values = {value for module in modules for name, value in module.items() if name.endswith("_kernel")}
    return {value for value in values if isinstance(value, JITFunction) and value.fn.__module__.startswith(package)}


def _launched(names: Iterable[str]) -> set[Any]:
    """Return the kernels that samples or workloads launch."""
    kinds = [(name, kind) for name in names for kind in ("workloads", "samples")]
    return {launch.kernel for name, kind in kinds for launch in _recorded(name, torch.bfloat16, kind, "few")}


def _require_fits(launch: Launch, target: str) -> CompiledKernel:
    assert launch.kernel.__name__.endswith("_kernel"), aot.describe(launch)
    compiled = _compile(launch, target)
    assert compiled.asm["hsaco" if target.startswith("gfx") else "cubin"]
    assert compiled.metadata.shared <= aot.SHARED_MEMORY[target], aot.describe(launch)
    # Triton gives a block four warps where a launch does not say.
    assert launch.kwargs.get("num_warps", 4) * aot.TARGETS[target].warp_size <= THREADS, aot.describe(launch)
    return compiled


def _require_good_code(compiled: CompiledKernel, launch: Launch) -> None:
    about, asm = aot.describe(launch), compiled.asm
    # The registers describe what a warp group's products read from shared memory.
    assert not undefined_descriptors(compiled), f"a register is read that nothing wrote: {about}"
    assert ".f64" not in asm["ptx"], f"arithmetic in double precision: {about}"
    # Triton 3.6 may let each thread add up whole rows, value after value, to save a conversion between layouts.
    assert _pairs_of_sums(asm["ttgir"]) <= _pairs_of_sums(asm["ttir"]), f"a pair of sums is made twice: {about}"


def _pairs_of_sums(code: str) -> int:
    return len(re.findall(r'"tt\.reduce"\(%\S+, ', code))


def _require_conversions_alone(launches: list[Launch]) -> None:
    """Inductor passes float arguments as doubles, which each kernel converts before it computes."""
    with_floats = {launch.kernel: launch for launch in launches if any(isinstance(a, float) for a in launch.args)}
    for launch in with_floats.values():
        assert doubles_in(aot.traced_for(launch, aot.TARGETS["sm_90"], scalars="fp64")) == [], aot.describe(launch)


def doubles_in(code: str) -> list[str]:
    """Return the lines that compute with doubles; one may be handed on to a function, and converted."""
    lines = [line.strip() for line in code.splitlines() if "f64" in line]
    return [line for line in lines if not re.search(r"tt\.func|tt\.call|arith\.truncf %\S+ : f64 to f32", line)]


def _require_no_float_constants(launches: list[Launch]) -> None:
    """A schedule of `beta`, `softcap` or a temperature would build the kernel again for each value."""
    for launch in _first_of_each(launches, _form):
        constants = aot.specialize(launch, aot.TARGETS["sm_90"]).source.constants
        assert not any(isinstance(value, float) for value in constants.values()), aot.describe(launch)


def _of_recurrence() -> tuple[Tensor, ...]:
    """Heads of 128 channels, each of which decays by itself."""
    return (
        *(_tensor(1, 128, 2, 128) for _ in range(3)),
        _tensor(1, 128, 2, 128, dtype=torch.float32),
        _tensor(1, 128, 2),
    )


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def _rows(N: int, count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return *(_tensor(64, N, dtype=dtype) for _ in range(count)), _tensor(N, dtype=dtype)


WIDEST: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]], str]] = {
    "add_rms_norm 8192": (functional.add_rms_norm, lambda: _rows(8192, 2), "backward"),
    "add_rms_norm 8192, float32": (functional.add_rms_norm, lambda: _rows(8192, 2, torch.float32), "backward"),
    "rms_norm 8192, float32": (functional.rms_norm, lambda: _rows(8192, 1, torch.float32), "backward"),
    "rms_norm_gated 8192": (functional.rms_norm_gated, lambda: _rows(8192, 2), "backward"),
    "layer_norm 12288": (functional.layer_norm, lambda: (*_rows(12288, 1), _tensor(12288)), "backward"),
    "layer_norm 8192, float32": (functional.layer_norm, lambda: _rows(8192, 1, torch.float32), "backward"),
    "softmax 32768": (functional.softmax, lambda: (_tensor(64, 32768),), "softmax_kernel"),
    "gated_delta_rule": (functional.gated_delta_rule, _of_recurrence, "states"),
}
"""Calls that fill the shared memory of a larger GPU, and a part of the names of their kernels that do."""


@pytest.mark.parametrize("target", SMALL_TARGETS)
@pytest.mark.parametrize("call", WIDEST)
def test_what_fills_shared_memory_fits_where_there_is_less(call: str, target: str, build: str) -> None:
    if build == "few" and target != SMALL_TARGETS[0]:
        pytest.skip(f"`--build many` builds for {target}, which has as much")
    fn, inputs, kernels = WIDEST[call]
    with FakeTensorMode(), record_launches(*aot.limits(target)) as recorded:
        outputs = fn(*inputs())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    launches = [launch for launch in recorded if kernels in launch.kernel.__name__]
    assert launches
    for launch in aot.distinct(launches, aot.TARGETS[target]):
        _require_fits(launch, target)


def test_kernels_of_several_families_are_launched() -> None:
    """Each family's own are looked for where they are built."""
    missing = _kernels_in("llmk.ops.common")
    assert missing
    few_first = sorted(OPS.values(), key=lambda op: len(list(op.samples(torch.device("cpu"), torch.bfloat16))))
    for op in few_first:
        if missing & set(kernels_of([each.fn for each in op.kernel_ops if not each.is_plain])):
            missing -= _launched([op.name])
    assert not missing


@jit
def times_kernel(x_ptr, factor_ptr, y_ptr, N, NEGATE: tl.constexpr, BLOCK_N: tl.constexpr):
    factor = tl.load(factor_ptr)
    for start in tl.range(0, N, BLOCK_N, num_stages=3):  # pyright: ignore[reportGeneralTypeIssues]
        offsets = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0)
        tl.store(y_ptr + offsets, -x * factor if NEGATE else x * factor, mask=offsets < N)


def _record(*args: object) -> Launch:
    return Launch(times_kernel, (1,), args, {"NEGATE": False, "BLOCK_N": 128, "num_warps": 2})


def test_launches_are_specialized_as_the_jit_does() -> None:
    x, y = torch.empty(64), torch.empty(64, dtype=torch.bfloat16)
    source = aot.specialize(_record(x, None, y[1:], 1), aot.TARGETS["sm_90"]).source
    types = {"x_ptr": "*fp32", "factor_ptr": "constexpr", "y_ptr": "*bf16"}
    assert source.signature == types | {"N": "constexpr", "NEGATE": "constexpr", "BLOCK_N": "constexpr"}
    assert source.constants == {(1,): None, (3,): 1, (4,): False, (5,): 128}
    aligned = {index for (index,), attributes in source.attrs.items() if ["tt.divisibility", 16] in attributes}
    assert aligned == {0}  # y[1:] starts at 2 bytes


def test_launches_that_build_the_same_are_one() -> None:
    x, scalar = torch.empty(64), torch.empty(())
    launches = [_record(x, scalar, x, N) for N in (32, 64, 33, 35, 2**31, 64)]
    assert aot.distinct(launches, aot.TARGETS["sm_90"]) == [launches[0], launches[2], launches[4]]


def test_double_precision_and_spills_are_seen() -> None:
    x, scalar = torch.empty(64, dtype=torch.float64), torch.empty((), dtype=torch.float64)
    compiled = _compile(_record(x, scalar, x, 64), "sm_90")
    assert ".f64" in compiled.asm["ptx"]
    assert doubles_in(compiled.asm["ttir"])
    registers, spilled = aot.resource_usage(compiled)
    assert 0 < registers <= 255
    assert spilled == 0
    options = {"NEGATE": False, "BLOCK_N": 2048, "num_warps": 1, "maxnreg": 24}
    few = Launch(_record().kernel, (1,), (x, scalar, x, 64), options)
    assert aot.resource_usage(_compile(few, "sm_90"))[1] > 0


def test_samples_want_every_gradient_together_and_alone() -> None:
    launches = [
        launch
        for launch in _recorded("rms_norm", torch.bfloat16, "samples", "many")
        if "dw_ptr" in launch.kernel.arg_names
    ]
    assert {launch.args[launch.kernel.arg_names.index("dw_ptr")] is None for launch in launches} == {True, False}
