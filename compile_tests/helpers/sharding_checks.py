"""Checks that run in every process of a group: operators and models on DTensors, against whole tensors."""

import contextlib
import datetime
import itertools
import json
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from compile_tests.helpers.garbage import collect_seldom
from compile_tests.helpers.rank_processes import start_ranks
from llmk.opcheck.calls import incoming_gradients, require_accurate
from llmk.opcheck.inputs import BrokenPromise, Outcome
from llmk.registry import OPS, PARTIAL, KernelOp, Op, Sample, replicate_only

CPU = torch.device("cpu")
MOST_ELEMENTS = 20_000
Way = tuple[Placement, ...]


def in_processes(check: Callable[[DeviceMesh], Iterable[str]], mesh_shape: tuple[int, ...], folder: Path) -> list[str]:
    """Run `check(mesh)` in a process for each place of a mesh: what they found wrong, also by raising."""
    world = torch.Size(mesh_shape).numel()
    start_ranks(_process, (check, mesh_shape, str(folder)), world)
    return [line for rank in range(world) for line in json.loads((folder / f"{rank}.json").read_text())]


def _process(rank: int, check: Callable[[DeviceMesh], Iterable[str]], mesh_shape: tuple[int, ...], folder: str) -> None:
    collect_seldom()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Your compiler for AOTAutograd is returning a function")
    store = dist.FileStore(f"{folder}/store", torch.Size(mesh_shape).numel())  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=torch.Size(mesh_shape).numel(), store=store, timeout=timeout)
    torch.manual_seed(0)
    names = ("dp", "tp")[-len(mesh_shape) :]
    try:
        wrong = list(check(init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)))
    except Exception:
        wrong = [traceback.format_exc()]
    Path(folder, f"{rank}.json").write_text(json.dumps([f"process {rank}: {line}" for line in wrong]))
    dist.destroy_process_group()


@contextlib.contextmanager
def _first_kernel_call() -> Iterator[list[Any]]:
    """Collect the first kernel op that is called inside, with its arguments."""
    found: list[Any] = []
    original = KernelOp.__call__

    def call(self: KernelOp, *args: Any) -> Any:
        if not found:
            flags = () if self.derivative.keeps is None else self.derivative.flags(args)
            found.extend([self, *args, *flags])
        return original(self, *args)

    KernelOp.__call__ = call  # type: ignore[method-assign]
    try:
        yield found
    finally:
        KernelOp.__call__ = original  # type: ignore[method-assign]


def _placement(split: int | str) -> Placement:
    if isinstance(split, int):
        return Shard(split)
    return Partial() if split == PARTIAL else Replicate()


def distributed(tensor: Tensor, mesh: DeviceMesh, placements: Way) -> DTensor:
    """The tensor, which every process has whole, as its part of a DTensor."""
    whole = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    part = distribute_tensor(tensor, mesh, whole, src_data_rank=None)
    if whole == placements:
        return part
    local = part.to_local()
    for axis, placement in enumerate(placements):
        if placement.is_partial():  # terms whose sum is exact: of two processes 2 x and -x
            local = local * (mesh.size(axis) if mesh.get_local_rank(axis) == 0 else -1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def ways(op: Op, sample: Sample, mesh: DeviceMesh) -> Iterator[dict[str, Way]]:
    """Yield the splits of tensors that the kernel op's rule allows for a sample, where they are large enough."""
    whole = (Replicate(),) * mesh.ndim
    arguments = op.bind(sample)
    tensors = {name: distributed(t, mesh, whole) for name, t in arguments.items() if isinstance(t, Tensor)}
    lists = {
        name: [distributed(each, mesh, whole) for each in value]
        for name, value in arguments.items()
        if isinstance(value, list) and all(isinstance(each, Tensor) for each in value)
    }
    inputs = {name: t.requires_grad_(name in op.differentiable) for name, t in tensors.items()}
    with _first_kernel_call() as found:
        op.overload(**(arguments | lists | inputs))
    kernel_op, *args = found
    positions = [i for i, a in enumerate(kernel_op.overload._schema.arguments) if "Tensor" in str(a.type)]
    splits = [dict(zip(positions, of_inputs, strict=True)) for _, of_inputs in kernel_op.sharding(*args)]
    for combination in itertools.product(splits, repeat=mesh.ndim):
        way = {
            name: tuple(_placement_of(tensor, args, split) for split in combination) for name, tensor in tensors.items()
        }
        if all(_large_enough(tensors[name], mesh, placements) for name, placements in way.items()):
            yield way


def _placement_of(tensor: Tensor, args: Sequence[Any], split: dict[int, int | str]) -> Placement:
    """Return the tensor's placement; what another kernel op takes is whole."""
    return next((_placement(each) for i, each in split.items() if args[i] is tensor), Replicate())


def _large_enough(tensor: Tensor, mesh: DeviceMesh, placements: Way) -> bool:
    parts = [1] * tensor.dim()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts[placement.dim] *= mesh.size(axis)
    return all(size >= count for size, count in zip(tensor.shape, parts, strict=True))


def small_samples(op: Op) -> list[Sample]:
    samples = op.samples(CPU, torch.float32)
    return [s for s in samples if all(t.numel() < MOST_ELEMENTS for t in s.args if isinstance(t, Tensor))]


def differences(
    op: Op,
    sample: Sample,
    mesh: DeviceMesh,
    way: dict[str, Way],
    function: Callable[..., Any],
    communicates: bool | None,
) -> list[str]:
    """The accuracy rule's verdict on a call on split tensors, its outputs and gradients put together again.

    With `communicates` it must send something between processes, or with False nothing; None if that cannot be counted.
    """
    arguments = op.bind(sample)
    wanted = [name for name in op.differentiable if arguments.get(name) is not None]
    split = arguments | {
        name: distributed(arguments[name].detach(), mesh, placements).requires_grad_(name in wanted)
        for name, placements in way.items()
    }
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}

    def called(function: Callable[..., Any]) -> tuple[Any, Any]:
        found = _as_tuple(function(**split))
        differentiable = [y for y in found if y.requires_grad]
        incoming = zip(incoming_gradients(differentiable), differentiable, strict=True)
        received = [distributed(gradient, mesh, _of_gradient(y)) for gradient, y in incoming]
        return found, torch.autograd.grad(differentiable, [split[name] for name in wanted], received)

    def whole(found: Any, gradients: Any) -> Outcome:
        of_inputs = dict(zip(wanted, (gradient.full_tensor() for gradient in gradients), strict=True))
        return Outcome(tensors, [y.full_tensor() for y in found], of_inputs)

    place = f"{op.name}, {sample.why}, {way}"
    with contextlib.nullcontext() if communicates is None else CommDebugMode() as counter:
        try:
            parts = called(function)
        except Exception as error:
            error.add_note(place)
            raise
    wrong = [] if counter is None else _count(counter, bool(communicates))
    try:
        require_accurate(op, sample, whole(*parts), compositions=lambda: [whole(*called(op.reference))])
    except BrokenPromise as broken:
        wrong.append(str(broken))
    return [f"{place}: {line}" for line in wrong]


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _of_gradient(output: DTensor) -> Way:
    """Return where the gradient of an output lies: a term of a sum has the gradient of the sum."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in output.placements)


def _count(counter: CommDebugMode, communicates: bool) -> list[str]:
    if bool(counter.get_total_counts()) == communicates:
        return []
    return [f"communication: expected {'some' if communicates else 'none'}, got {dict(counter.get_comm_counts())}"]


def _means_rows(op: Op, sample: Sample) -> bool:
    """A mean over rows adds up their losses and their number: that is all that any operator sends."""
    return (
        op.name in ("cross_entropy", "fused_linear_ce", "fused_linear_jsd", "giou_loss", "jsd", "tvd")
        and op.bind(sample).get("reduction", "mean") == "mean"
    )


def operators(mesh: DeviceMesh) -> Iterator[str]:
    """Every operator on each of its samples, split in each way that its strategy allows."""
    for op in OPS.values():
        torch.manual_seed(0)  # what is drawn for one operator is not for the others to change
        split = False
        for sample in small_samples(op):
            for way in ways(op, sample, mesh):
                yield from differences(op, sample, mesh, way, op.overload, _means_rows(op, sample))
                split = True
        if split == (op.kernel_ops[0].sharding is replicate_only):
            yield f"{op.name}: {'a' if split else 'no'} sample was split"


def two_dimensions(mesh: DeviceMesh) -> Iterator[str]:
    """Split in two ways at once, along one axis of the mesh each: the same one, two of one tensor, and of two."""
    for name, place in {"layer_norm": 1, "linear_act": 1, "rope": 0, "cross_entropy": 1}.items():
        op, sample = OPS[name], small_samples(OPS[name])[place]
        for way in ways(op, sample, mesh):
            yield from differences(op, sample, mesh, way, op.overload, _means_rows(op, sample))


def compiled(mesh: DeviceMesh) -> Iterator[str]:
    """Yield differences in a compiled graph, which sends nothing."""
    for name, place in {"rms_norm": 1, "add_rms_norm": 1, "swiglu": 1, "rope": 0}.items():
        op, sample = OPS[name], small_samples(OPS[name])[place]
        for way in ways(op, sample, mesh):
            torch._dynamo.reset()
            graphs = AotEagerAndRecordGraphs()
            function = torch.compile(op.overload, backend=graphs, fullgraph=True)
            yield from differences(op, sample, mesh, way, function, None)
            for graph in (*graphs.fw_graphs, *graphs.bw_graphs):
                sent = [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]
                if sent:
                    yield f"{name}, {sample.why}, {way}: the graph has {sent}"


def not_by_rule(mesh: DeviceMesh) -> Iterator[str]:
    """A split that no rule allows is gathered first, or refused."""
    x, w = torch.randn(2, 6, 8), torch.randn(8)
    target = torch.randint(0, 8, (2, 6))
    last, whole = (Shard(2),), (Replicate(),)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Way]]] = [
        ("rms_norm", (x, w), {}, {"input": last, "weight": whole}),
        ("layer_norm", (x, w, w), {}, {"input": last, "weight": (Shard(0),), "bias": whole}),
        ("group_norm", (x, 2), {}, {"input": (Shard(1),)}),
        ("softmax", (x, 2), {}, {"input": last}),
        ("swiglu", (x,), {}, {"gate": last}),
        ("linear_act", (x, torch.randn(4, 8)), {}, {"input": last, "weight": (Shard(1),)}),
        ("cross_entropy", (x, target), {"reduction": "sum"}, {"input": last, "target": whole}),
        ("relu_squared", (x,), {}, {"input": (Partial(),)}),
    ]
    for name, args, options, way in calls:
        sample = Sample(args, options, why="not by rule")
        yield from differences(OPS[name], sample, mesh, way, OPS[name].overload, True)
    try:
        OPS["rms_norm"].overload(distributed(x, mesh, (Shard(0),)), w)
        yield "a plain weight beside a DTensor was not refused"
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
    with torch.inference_mode():
        y = OPS["rms_norm"].overload(distributed(x, mesh, (Shard(0),)), distributed(w, mesh, whole))
        if y.placements != (Shard(0),):
            yield f"inference mode: expected rows, got {y.placements}"


def mean_of_tokens(mesh: DeviceMesh) -> Iterator[str]:
    """A mean over tokens that are split adds two numbers up; tokens, weights and gradients stay where they are."""
    x, linear_weight, target = torch.randn(6, 8), torch.randn(12, 8), torch.tensor([1, -100, 3, 11, -100, 5])
    way = {"input": (Shard(0),), "linear_weight": (Replicate(),), "target": (Shard(0),)}
    weighted = way | {"weight": (Replicate(),)}
    for targets, options, ways_of in [
        (target, {}, way),
        (target, {"weight": torch.rand(12)}, weighted),
        (torch.full((6,), -100), {}, way),
    ]:
        sample = Sample((x, linear_weight, targets), options, why="a mean of split tokens")
        yield from differences(OPS["fused_linear_ce"], sample, mesh, ways_of, OPS["fused_linear_ce"].overload, True)
    inputs = [distributed(t, mesh, p) for t, p in ((x, (Shard(0),)), (linear_weight, (Replicate(),)))]
    split_target = distributed(target, mesh, (Shard(0),))
    with CommDebugMode() as counter:
        loss = OPS["fused_linear_ce"].overload(*(t.requires_grad_() for t in inputs), split_target)
        gradients: Any = torch.autograd.grad(loss, inputs, torch.ones_like(loss))
    dx, dw = gradients
    sent = {str(op): count for op, count in counter.get_comm_counts().items()}
    if any("all_reduce" not in op for op in sent):
        yield f"a mean of split tokens: expected sums of numbers alone, got {sent}"
    if dx.placements != (Shard(0),) or not dw.placements[0].is_partial():
        yield f"a mean of split tokens: expected gradients that stay split, got {dx.placements} and {dw.placements}"


def on_two_processes(mesh: DeviceMesh) -> Iterator[str]:
    """All that two processes do, in one start of them."""
    yield from operators(mesh)
    yield from compiled(mesh)
    yield from not_by_rule(mesh)
    yield from mean_of_tokens(mesh)
