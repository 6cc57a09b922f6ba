"""A vocabulary spread over ranks: losses and gradients are those of one process that has all classes.

Two and four processes make the calls below, each group once: on the CPU with gloo, with `--device cuda` with NCCL.
Gradients of the whole weight are put together from the ranks', so that the accuracy rule is asked of all of it.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compile_tests.helpers import vocab_slice_checks as slices
from compile_tests.helpers.rank_processes import errors_of_ranks
from compile_tests.helpers.rank_slices import OwnRows, bounds, require_accurate_on_ranks, require_same_on_ranks
from llmk.functional import fused_linear_ce, vocab_parallel_linear_ce
from llmk.opcheck.calls import call
from llmk.ops.linear_loss.chunked._dtensors import vocab_mesh_dim
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

OP = OPS["fused_linear_ce"]
HERE = torch.device("cpu")
CASES: dict[str, Callable[[int, int], None]] = {}


def case(fn: Callable[..., None], *args: Any, only: int | None = None) -> None:
    """One call for every rank to make: `fn(rank, world, *args)`, in groups of `only` ranks or of all sizes."""
    name = "-".join([fn.__name__, *(getattr(each, "__name__", str(each)) for each in args)])
    CASES[name] = lambda rank, world: fn(rank, world, *args) if only in (None, world) else None


def parallel(rank: int, world: int, slicing: str, fn: Callable[..., Tensor] = vocab_parallel_linear_ce) -> Any:
    """`fused_linear_ce` of all classes by the ranks together."""

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Any = None, **options: Any) -> Any:
        V = linear_weight.shape[0]
        start, stop = bounds(slicing, rank, world, V)
        own: Any = OwnRows.apply(linear_weight, start, stop)
        own_bias: Any = None if linear_bias is None else OwnRows.apply(linear_bias, start, stop)
        result = fn(
            input,
            own,
            target,
            linear_bias=own_bias,
            **options,
            vocab_start=start,
            num_classes=V,
            group_name=dist.group.WORLD.group_name,  # type: ignore[union-attr]
        )
        require_same_on_ranks(result)
        return result

    return loss


def edges(dtype: torch.dtype) -> Iterator[Sample]:
    """Calls that are only interesting where the classes are spread."""
    x, w, b = (torch.randn(*shape, dtype=dtype, device=HERE) for shape in ((7, 12), (37, 12), (37,)))
    last, first = torch.full((7,), 36, device=HERE), torch.arange(7, device=HERE) % 3
    yield Sample((x, w, last), {"linear_bias": b}, why="every target among the last classes")
    yield Sample((x, w, first), {"label_smoothing": 0.1}, why="every target among the first classes")
    masked = b.masked_fill(torch.arange(37, device=HERE) >= 10, float("-inf"))
    yield Sample((x, w, first), {"linear_bias": masked}, why="ranks whose logits are all -inf")
    yield Sample((100 * x, w, last), {"label_smoothing": 0.1, "z_loss": 1e-3}, why="large logits, smoothed")


def own_samples(dtype: torch.dtype) -> list[Sample]:
    """Those of the operator; in the interpreter, which takes minutes for 100,003 classes, the small ones."""
    found = OPS["vocab_parallel_linear_ce"].samples(HERE, dtype)
    return [sample for sample in found if not INTERPRET or len(sample.args[1]) < 1000]


def samples(rank: int, world: int, slicing: str, dtype: torch.dtype) -> None:
    op = OPS["vocab_parallel_linear_ce"]
    for sample in [*own_samples(dtype), *edges(dtype)]:
        require_accurate_on_ranks(op, sample, call(op, sample, fn=parallel(rank, world, slicing)))


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for slicing in ("shards", "uneven"):
        few = slicing == "shards" or dtype != torch.bfloat16  # as uneven slices and bfloat16 for more ranks
        case(samples, slicing, dtype, only=2 if few else None)


def ranks_that_cannot_skip_tokens(rank: int, world: int) -> None:
    """The first rank's weight begins where products of a number of rows that the device knows cannot read it."""

    def unaligned(input: Tensor, own: Tensor, *args: Any, **options: Any) -> Tensor:
        if rank == 0:
            own = torch.cat([own.new_zeros(1), own.flatten()])[1:].view(own.shape)
        return vocab_parallel_linear_ce(input, own, *args, **options)

    op, dtype = OPS["vocab_parallel_linear_ce"], torch.bfloat16
    skipping = [sample for sample in own_samples(dtype) if sample.kwargs.get("skip_ignored", True)]
    assert skipping
    for sample in skipping:
        require_accurate_on_ranks(op, sample, call(op, sample, fn=parallel(rank, world, "shards", unaligned)))


case(ranks_that_cannot_skip_tokens, only=2)


def one_gradient_alone(rank: int, world: int) -> None:
    sample = OP.resized(9, HERE, torch.float32)  # type: ignore[misc]
    for wanted in (["input"], ["linear_weight"]):
        for reduction in ("mean", "none"):
            chosen = Sample(sample.args, {**sample.kwargs, "reduction": reduction}, "one gradient")
            require_accurate_on_ranks(OP, chosen, call(OP, chosen, wanted, fn=parallel(rank, world, "shards")))


def compiled(rank: int, world: int, backend: str) -> None:
    torch._dynamo.reset()
    options: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": True}

    def eager(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * vocab_parallel_linear_ce(2 * args[0], *args[1:], **kwargs)

    fn = torch.compile(eager, **options)
    for rows in (9, 33):
        sample = OP.resized(rows, HERE, torch.bfloat16)  # type: ignore[misc]
        ours, same = (call(OP, sample, fn=parallel(rank, world, "shards", f)) for f in (fn, eager))
        torch.testing.assert_close(ours.outputs, same.outputs)
        torch.testing.assert_close(ours.gradients, same.gradients)


def target_out_of_range(rank: int, world: int) -> None:
    x, w = torch.randn(4, 8, device=HERE), torch.randn(10, 8, device=HERE)
    for target in (10, -1):
        if HERE.type == "cuda":
            assert parallel(rank, world, "shards")(x, w, torch.tensor([1, target, 2, 3], device=HERE)).isnan()
            continue
        with pytest.raises(IndexError, match=r"target: expected class indices in \[0, 10\)"):
            parallel(rank, world, "shards")(x, w, torch.tensor([1, target, 2, 3], device=HERE))


def a_class_that_no_rank_has(rank: int, world: int) -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x, w = torch.randn(2, 8, device=HERE), torch.randn(3, 8, device=HERE)
    options: dict[str, Any] = {
        "vocab_start": 3 * rank,
        "num_classes": 3 * world + 1,
        "group_name": group,
        "reduction": "none",
    }
    losses = vocab_parallel_linear_ce(x, w, torch.tensor([0, 3 * world], device=HERE), **options)
    assert losses.isinf().tolist() == [False, True]
    with pytest.raises(ValueError, match="num_classes: expected at least vocab_start 2 and the 3 classes"):
        vocab_parallel_linear_ce(
            x, w, torch.tensor([0, 1], device=HERE), vocab_start=2, num_classes=4, group_name=group
        )


def on_mesh(
    world: int, placement: Placement | None, fn: Callable[..., Tensor] = fused_linear_ce, two: bool = False
) -> Any:
    """`fused_linear_ce` with the classes sharded over a mesh; the gradients are those of whole tensors."""
    mesh = init_device_mesh(HERE.type, (2, world // 2) if two else (world,))
    before: list[Placement] = [Replicate()] if two else []

    def spread(whole: Tensor, last: Placement) -> DTensor:
        tensor = DTensor.from_local(whole, mesh, [*before, Replicate()], run_check=False)
        return tensor.redistribute(placements=[*before, last])

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Any = None, **options: Any) -> Any:
        result = fn(
            input if placement is None else spread(input, placement),
            spread(linear_weight, Shard(0)),
            target,
            linear_bias=None if linear_bias is None else spread(linear_bias, Shard(0)),
            **options,
        )
        assert isinstance(result, DTensor) == (placement is not None)
        return result.full_tensor() if isinstance(result, DTensor) else result

    return loss


def sharded_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for reduction in ("mean", "sum", "none"):
        x, w, t = (
            torch.randn(2, 7, 12, dtype=dtype, device=HERE),
            torch.randn(37, 12, dtype=dtype, device=HERE),
            torch.randint(0, 37, (2, 7), device=HERE),
        )
        t[0, 3] = -100
        options = {
            "linear_bias": w[:, 0].clone(),
            "weight": torch.rand(37, dtype=dtype, device=HERE) + 0.5,
            "z_loss": 1e-2,
        }
        yield Sample((x, w, t), {"reduction": reduction, "label_smoothing": 0.1, "softcap": 9.0, **options}, reduction)
    yield Sample((x, w[:5], t % 5), {"chunk_size": 4}, why="ranks without a class")


def dtensors(rank: int, world: int, placement: Placement | None, dtype: torch.dtype, two: bool = False) -> None:
    for sample in sharded_samples(dtype):
        require_accurate_on_ranks(OP, sample, call(OP, sample, fn=on_mesh(world, placement, two=two)))


def compiled_dtensors(rank: int, world: int, placement: Placement | None, backend: str) -> None:
    for sample in list(sharded_samples(torch.float32))[1:3]:
        torch._dynamo.reset()
        fn = torch.compile(fused_linear_ce, fullgraph=True, backend=backend)
        require_accurate_on_ranks(OP, sample, call(OP, sample, fn=on_mesh(world, placement, fn)))


def of_one_operator(rank: int, world: int, name: str, placement: Placement | None) -> None:
    """Its samples of a few classes, where the classes of every linear layer are sharded."""
    op, mesh = OPS[name], init_device_mesh(HERE.type, (world,))

    def spread(argument: str, value: Any) -> Any:
        if isinstance(value, Tensor) and "linear" in argument:
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        if isinstance(value, Tensor) and argument.endswith("input") and placement is not None:
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(placements=[placement])
        return value

    def fn(*args: Any, **kwargs: Any) -> Any:
        given = op.bind(Sample(args, kwargs))
        results = op.overload(**{argument: spread(argument, value) for argument, value in given.items()})
        several = isinstance(results, tuple)
        whole = [y.full_tensor() if placement is not None else y for y in (results if several else [results])]
        return tuple(whole) if several else whole[0]

    for sample in op.samples(HERE, torch.float32):
        if sample.args[0].dim() > 1 and len(sample.args[1]) in range(2, 100):
            require_accurate_on_ranks(op, sample, call(op, sample, fn=fn))


def on_every_rank(rank: int, world: int, check: Callable[..., None], *args: Any) -> None:
    """A check of `vocab_slice_checks`."""
    check(*args)


def how_a_dtensors_gradient_is_summed(rank: int, world: int) -> None:
    """A sharded sequence's gradient comes back sharded, each rank's sum its own."""
    mesh = init_device_mesh(HERE.type, (world,))
    x = DTensor.from_local(torch.randn(1, 3, 8, device=HERE), mesh, [Shard(1)]).requires_grad_()
    w = DTensor.from_local(torch.randn(4, 8, device=HERE), mesh, [Shard(0)]).requires_grad_()
    target = torch.zeros((1, 3 * world), dtype=torch.int64, device=HERE)
    fused_linear_ce(x, w, target).backward()
    for grad, placement in ((x.grad, Shard(1)), (w.grad, Shard(0))):
        assert isinstance(grad, DTensor)
        assert grad.placements == (placement,)
    with torch.no_grad():
        assert isinstance(fused_linear_ce(x, w, target), DTensor)


def which_weights_stay_where_they_are(rank: int, world: int) -> None:
    mesh, square = init_device_mesh(HERE.type, (world,)), init_device_mesh(HERE.type, (2, world // 2))
    x = torch.randn(3, 8, device=HERE)

    def weight(mesh: Any, *placements: Any) -> DTensor:
        return DTensor.from_local(torch.randn(8, 8, device=HERE), mesh, placements)

    assert vocab_mesh_dim(x, weight(mesh, Shard(0))) == 0
    assert vocab_mesh_dim(x, weight(square, Replicate(), Shard(0))) == 1
    assert vocab_mesh_dim(x, weight(square, Shard(0), Replicate())) == 0
    for others in ([Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()], [Replicate(), Shard(1)]):
        assert vocab_mesh_dim(x, weight(square, *others)) is None
    batch = DTensor.from_local(x, square, [Shard(0), Replicate()])
    assert vocab_mesh_dim(batch, weight(square, Replicate(), Shard(0))) is None
    assert vocab_mesh_dim(x, x) is None
    target, spread = torch.zeros(3, dtype=torch.int64, device=HERE), weight(mesh, Shard(0))
    elsewhere = DTensor.from_local(target, square, [Replicate(), Replicate()])
    with pytest.raises(ValueError, match=r"target: expected .* the mesh of linear_weight"):
        fused_linear_ce(x, spread, elsewhere)
    with pytest.raises(TypeError, match="linear_bias: expected a DTensor like linear_weight"):
        fused_linear_ce(x, spread, target, linear_bias=torch.zeros(8, device=HERE))


for fn in (one_gradient_alone, target_out_of_range, a_class_that_no_rank_has):
    case(fn)
for fn in (how_a_dtensors_gradient_is_summed, which_weights_stay_where_they_are):
    case(fn)
case(compiled, "inductor", only=2)
for placement in (None, Replicate(), Shard(0), Shard(1)):
    case(dtensors, placement, torch.float32, only=2)
for placement in (Replicate(), Shard(0)):
    case(compiled_dtensors, placement, "aot_eager", only=2)
case(dtensors, Shard(1), torch.bfloat16, only=4)
for name in ("linear_logprobs", "linear_topk", "fused_linear_jsd", "fused_linear_ce_metrics"):
    case(of_one_operator, name, None, only=2)
    case(of_one_operator, name, Shard(0), only=2)
for name in slices.OPERATORS:
    case(on_every_rank, slices.operator, name, torch.float32, "shards", only=2)
    case(on_every_rank, slices.operator, name, torch.float32, "uneven", 3, only=4)
for name in ("fused_linear_policy", "fused_linear_jsd_ce"):
    case(on_every_rank, slices.operator, name, torch.bfloat16, "shards", only=2)
    case(on_every_rank, slices.operator, name, torch.float16, "shards", only=2)
for slicing in ("shards", "uneven"):
    case(on_every_rank, slices.groups_with_skipped_tokens, slicing, only=2)
for check in (slices.slices_of_a_group, slices.wrong_slices, slices.what_is_exchanged):
    case(on_every_rank, check)
case(on_every_rank, slices.one_graph, "aot_eager", only=2)
case(on_every_rank, slices.every_loss, "uneven", 3, only=4)
case(on_every_rank, slices.every_loss, "equal", only=2)
case(dtensors, Shard(1), torch.float32, True, only=4)
case(compiled_dtensors, None, "aot_eager", only=2)
case(compiled_dtensors, Shard(1), "inductor", only=2)


def cases(device_type: str, rank: int, world: int) -> dict[str, Callable[[], None]]:
    """The cases of a rank, whose tensors are on its device from here on."""
    global HERE
    HERE = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    return {name: functools.partial(make, rank, world) for name, make in CASES.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, tmp_path: Path, device: torch.device) -> None:
    errors = errors_of_ranks(functools.partial(cases, device.type), world, tmp_path, device.type)
    assert not errors, "\n".join(errors)


def interpreted_cases(rank: int, world: int) -> dict[str, Callable[[], None]]:
    groups = "on_every_rank-groups_with_skipped_tokens"
    names = ("samples-uneven-torch.bfloat16", "ranks_that_cannot_skip_tokens", f"{groups}-shards", f"{groups}-uneven")
    return {name: functools.partial(CASES[name], rank, world) for name in names}


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRET, reason="test_ranks has these cases in plain PyTorch and on a GPU")
def test_ranks_that_run_kernels(tmp_path: Path) -> None:
    errors = errors_of_ranks(interpreted_cases, 2, tmp_path)
    assert not errors, "\n".join(errors)


@pytest.mark.skipif(INTERPRET, reason="does not run kernels")
def test_a_slice_needs_its_group() -> None:
    x, w, t = torch.randn(2, 4), torch.randn(3, 4), torch.zeros(2, dtype=torch.int64)
    choices: list[dict[str, Any]] = [{"vocab_start": 3}, {"num_classes": 4}]
    for options in choices:
        with pytest.raises(ValueError, match="group_name: expected one for the classes that are not among the 3"):
            vocab_parallel_linear_ce(x, w, t, **options)
