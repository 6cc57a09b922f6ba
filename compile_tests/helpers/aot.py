"""Ahead-of-time compilation: every kernel that an operator launches, built for a GPU that need not be there.

Nothing is declared by hand. `launches` runs an operator on fake tensors, forward and backward, and collects what it
would launch; `compile_for` specialises a launch with Triton's own code, the way its JIT does when a kernel is called.
"""

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir

from llmk.opcheck.interpreted.loops import kernels_of
from llmk.registry import OPS
from llmk.registry.eager.launcher import OPTIONS
from llmk.registry.launch import Launch, record_launches
from llmk.registry.private.kernels import (
    ASTSource,
    GPUTarget,
    create_function_from_signature,
    cuobjdump,
    make_backend,
    pack_arguments,
)
from llmk.registry.private.tensors import FakeTensorMode
from llmk.registry.record import Op, Sample

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""The targets that every kernel must compile for, by their makers' names."""
SHARED_MEMORY = {
    name: kib * 1024
    for name, kib in {
        "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64,
    }.items()
}  # fmt: skip
"""Bytes that one block may have there."""


@dataclass(frozen=True)
class Specialized:
    """A launch as Triton builds it for one target: `key` is equal where the machine code would be."""

    source: Any
    options: dict[str, Any]
    key: tuple[Any, ...]


class _Pointer:
    """A fake tensor as Triton's specialisation sees it: its dtype, its alignment and its extent."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        # Allocators align storages to more than 16 bytes.
        self.address = int(tensor.storage_offset()) * tensor.element_size()
        self.extent = int(tensor.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.extent


def _as_pointers(values: Iterable[Any]) -> list[Any]:
    return [_Pointer(value) if isinstance(value, Tensor) else value for value in values]


def specialize(launch: Launch, target: Any, *, scalars: str = "fp32") -> Specialized:
    """Give a launch the signature, constants and attributes that Triton's JIT would on `target`.

    Args:
        launch: From `record_launches`.
        target: The GPU to build for.
        scalars: The type of float arguments: "fp32" as the JIT passes them, "fp64" as Inductor does.
    """
    kernel, backend = launch.kernel, make_backend(target)
    kwargs = dict(zip(launch.kwargs, _as_pointers(launch.kwargs.values()), strict=True)) | OPTIONS
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(*_as_pointers(launch.args), **kwargs)
    options, signature, constants, attributes = pack_arguments(kernel, backend, given, bound, specialization, given)
    signature = {name: scalars if kind == "fp32" else kind for name, kind in signature.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    return Specialized(source, options.__dict__, (source.hash(), str(options), str(target)))


def compile_for(launch: Launch, target: Any) -> Any:
    """Build a launch's kernel for `target`."""
    specialized = specialize(launch, target)
    return triton.compile(specialized.source, target=target, options=specialized.options)


def traced_for(launch: Launch, target: Any, *, scalars: str) -> str:
    """Return what `triton.compile` makes first of a launch's kernel, in a tenth of its time.

    `scalars` as in `specialize`.
    """
    specialized, backend, context = specialize(launch, target, scalars=scalars), make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(specialized.options)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(specialized.source.make_ir(target, options, functions, modules, context))


def describe(launch: Launch) -> str:
    """`kernel(dtype [shape], number, ..., BLOCK=..., num_warps=...)`."""
    arguments = [
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else str(value)
        for value in launch.args
    ]
    arguments += [f"{name}={value}" for name, value in launch.kwargs.items()]
    return f"{launch.kernel.__name__}({', '.join(arguments)})"


ALL, OTHERS = "all", "others"
"""Stand for all kernels of an operator in one test, and for those that its code does not name."""


def parametrize_kernels(metafunc: pytest.Metafunc) -> None:
    """Give a test the operators of a family, and with `--build many` one and a kernel of it: minutes together."""
    if "kernel" not in metafunc.fixturenames:
        return
    cases: dict[str, tuple[list[str], str]] = {}
    for name, op in OPS.items():
        if metafunc.config.getoption("--build") == "few":
            cases.setdefault(op.module.split(".")[2], ([], ALL))[0].append(name)
        else:
            cases |= {f"{name}-{kernel}": ([name], kernel) for kernel in (*kernel_names(op), OTHERS)}
    metafunc.parametrize(("names", "kernel"), cases.values(), ids=cases)


def kernel_names(op: Op) -> list[str]:
    """Return the names of the kernels that an operator's code refers to, but for what it calls of a value's methods."""
    found = {kernel.fn.__name__ for kernel in kernels_of([each.fn for each in op.kernel_ops if not each.is_plain])}
    return sorted(name for name in found if name.endswith("_kernel"))


def of_kernel(launches: list[Launch], kernel: str, op: Op) -> list[Launch]:
    """Return the launches of one kernel of an operator, or of ALL or OTHERS."""
    if kernel == ALL:
        return launches
    named = kernel_names(op)
    names = [launch.kernel.__name__ if launch.kernel.__name__ in named else OTHERS for launch in launches]
    return [launch for launch, name in zip(launches, names, strict=True) if name == kernel]


def distinct(launches: Iterable[Launch], target: Any) -> list[Launch]:
    """The first launch of each kernel that differs in signature, constants, attributes or options on `target`."""
    first: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        first.setdefault(specialize(launch, target).key, launch)
    return list(first.values())


def launches(
    op: Op, dtype: torch.dtype, *, samples: bool = True, workloads: bool = True, target: str = "sm_90",
    alone: bool = True,
) -> list[Launch]:  # fmt: skip
    """Return the launches of `op` on its samples and workloads, forward and backward, once for each kernel to be built.

    It is what a GPU of that target is given. Each call is made with every differentiable argument
    wanting its gradient and, if `alone`, with only one of them wanting it.
    """
    found = every_launch(op, dtype, samples=samples, workloads=workloads, target=target, alone=alone)
    # AMD's backend specialises on more than NVIDIA's does: what it tells apart is enough for both.
    return distinct(found, TARGETS["gfx942"])


def every_launch(
    op: Op, dtype: torch.dtype, *, samples: bool = True, workloads: bool = True, target: str = "sm_90",
    alone: bool = True,
) -> Iterator[Launch]:  # fmt: skip
    """Yield what `launches` chooses from, call by call."""
    device = torch.device("cpu")  # a build without a GPU aborts on fake GPU tensors that require gradients
    mode = FakeTensorMode()
    for make, wanted in [(op.samples, samples), (op.workloads, workloads)]:
        made = iter(make(device, dtype) if make is not None and wanted else ())
        while True:
            with mode, record_launches(*limits(target)) as recorded:  # what takes a launch runs outside of the mode
                sample = next(made, None)
                if sample is None:
                    break
                for names in itertools.islice(gradients_wanted(op, sample), None if alone else 1):
                    forward_and_backward(op, sample, names)
            yield from recorded


def limits(target: str) -> tuple[int, int]:
    """Return what launches are chosen by: the threads of a warp, and the bytes of shared memory of one block."""
    return TARGETS[target].warp_size, SHARED_MEMORY[target]


def gradients_wanted(op: Op, sample: Sample) -> Iterator[tuple[str, ...]]:
    """All that can be wanted together, then each alone."""
    given = tuple(name for name in op.differentiable if op.bind(sample).get(name) is not None)
    yield given
    if len(given) > 1:
        yield from ((name,) for name in given)


def forward_and_backward(op: Op, sample: Sample, names: tuple[str, ...]) -> None:
    arguments = op.bind(sample)
    inputs = [arguments[name].detach().requires_grad_() for name in names]
    results = op.overload(**arguments | dict(zip(names, inputs, strict=True)))
    outputs = [result for result in (results if isinstance(results, tuple) else (results,)) if result.requires_grad]
    torch.autograd.grad(outputs, inputs, [torch.empty_like(output) for output in outputs], allow_unused=True)


def dumped(compiled: Any, option: str) -> str:
    """Return what cuobjdump prints with an option of a kernel built for an NVIDIA GPU."""
    program = cuobjdump()  # for machine code it calls the nvdisasm beside it
    env = os.environ | {"PATH": f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return subprocess.run([program, option, cubin], check=True, capture_output=True, text=True, env=env).stdout


def resource_usage(compiled: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes that spill out of them, of a kernel built for an NVIDIA GPU."""
    usage = dumped(compiled, "-res-usage")
    sizes = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return sizes["REG"], sizes["STACK"] + sizes["LOCAL"]  # Triton has no stack of its own: all of it is spills


def must_spill(launch: Launch, target: Any) -> int:
    """Bytes that a launch's kernel spills on an NVIDIA GPU although it may use all registers that its block can get.

    Left to itself ptxas spills a few bytes by choice, where one more block then fits a multiprocessor.
    """
    compiled = compile_for(launch, target)
    _, spilled = resource_usage(compiled)
    if not spilled:
        return 0
    threads = compiled.metadata.num_warps * target.warp_size
    most = min(255, 65536 // threads // 8 * 8)
    told = Launch(launch.kernel, launch.grid, launch.args, launch.kwargs | {"maxnreg": most})
    return resource_usage(compile_for(told, target))[1]
