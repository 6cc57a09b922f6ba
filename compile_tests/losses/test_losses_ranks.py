"""A batch that ranks share has on each rank the loss of one process that has all of it; gradients add up to its own.

Two and four processes make the calls below, each group once. The ranks of `group` have other sequences, those of
`context_group` other tokens of the same ones. Gradients of whole tensors are put together from the ranks', each added
once, so that the accuracy rule is asked of them against float64; metrics are compared with those of one process.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from compile_tests.helpers import loss_calls
from compile_tests.helpers.loss_calls import LOSSES, gradients
from compile_tests.helpers.loss_samples import CONTEXT, DATA, GRPO, OLD, PACKED_ON_RANKS, Loss, make_sample, of
from compile_tests.helpers.loss_samples import ON_RANKS as CASES
from compile_tests.helpers.rank_processes import errors_of_ranks, here
from compile_tests.helpers.rank_slices import require_same_on_ranks
from compile_tests.helpers.supervised_references import two_heads
from llmk import losses
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import Sample

OWNERS = {1: [0], 2: [0, 1, 1], 4: [0, 3, 1, 1]}
"""The ranks that have one sequence or pair after the other, again and again: of four, one has none."""


class OwnPart(torch.autograd.Function):
    """A rank's rows and columns of a tensor; the gradient of the whole, to which every rank adds its own."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        whole, rows, columns = args
        ctx.where, ctx.shape = (rows.unsqueeze(1), columns), whole.shape
        return whole[ctx.where].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        whole = grad.new_zeros(ctx.shape)
        whole[ctx.where] = grad
        dist.all_reduce(whole)
        return whole, None, None


class Split(NamedTuple):
    """The split of a batch over `data` ranks by sequences times `context` ranks by tokens."""

    data: int
    context: int

    def sequences(self, rank: int, count: int, in_pairs: bool, is_packed: bool) -> list[int]:
        """The sequences of a rank, pairs together."""
        owners, place = OWNERS[self.data], rank // self.context
        if not in_pairs:
            return [i for i in range(count) if owners[i % len(owners)] == place]
        pairs = self.sequences(rank, count // 2, False, is_packed)
        return sorted(i for p in pairs for i in ((2 * p, 2 * p + 1) if is_packed else (p, p + count // 2)))

    def columns(self, rank: int, S: int) -> Tensor:
        """The head and the tail of a rank, as ring attention balances them."""
        chunks, place = torch.arange(S).tensor_split(2 * self.context), rank % self.context
        return torch.cat([chunks[place], chunks[2 * self.context - 1 - place]])

    @functools.cache  # noqa: B019
    def groups(self, has_sequences: bool) -> dict[str, Any]:
        """The groups as a mesh, as a process group and as a name."""
        mesh = init_device_mesh(here().type, (self.data, self.context), mesh_dim_names=("data", "context"))
        if not has_sequences:
            return {"group": dist.group.WORLD}
        given = {"group": mesh["data"], "context_group": mesh["context"].get_group().group_name}
        return {name: group for name, group in given.items() if self[name == "context_group"] > 1}


def parallel(loss: Loss, split: Split, fn: Callable[..., Any], found: dict[str, Tensor]) -> Callable[..., Tensor]:
    """`fn` on whole tensors, of which each rank takes its part; metrics go to `found`."""
    rank, groups = dist.get_rank(), split.groups(loss.has_sequences)

    def of_ranks(*args: Any, **kwargs: Any) -> Tensor:
        target, ids = args[3 if fn is two_heads else 2], kwargs.get("sequence_ids")
        count = target.shape[0] if ids is None else int(ids.max()) + 1
        own = torch.tensor(split.sequences(rank, count, loss.in_pairs, ids is not None), dtype=torch.int64)
        rows, columns = own, split.columns(rank, target.shape[1])
        if ids is not None:
            rows, columns = torch.arange(1), columns[torch.isin(ids[0, columns], own)]

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            if value.dim() == 1 and value.shape[0] == count:
                return value[own]
            everything = tuple(torch.arange(n) for n in (*value.shape, 1)[:2])
            if value.shape[:2] == target.shape:
                everything = rows, columns
            whole = value if value.dim() > 1 else value.unsqueeze(1)
            part: Any = OwnPart.apply(whole, *everything) if value.is_floating_point() else whole[rows][:, columns]
            return part if value.dim() > 1 else part.squeeze(1)

        options = {name: cut(value) for name, value in kwargs.items()}
        if ids is not None:
            options["sequence_ids"] = torch.searchsorted(own, options["sequence_ids"])
        if "num_sequences" in options:
            options["num_sequences"] = len(own)
        result, metrics = fn(*map(cut, args), **options, **groups)
        require_same_on_ranks(torch.stack([result.detach(), *metrics.values()]))
        found.update(metrics)
        return result

    return of_ranks


def check(loss: Loss, given: Sample, split: Split, compiled: bool) -> None:
    fn: Any = torch.compile(loss.fn, backend="aot_eager", fullgraph=True) if compiled else loss.fn
    op, found = loss.op, {}
    outcome = call(op, given, fn=parallel(loss, split, fn, found))
    if dist.get_rank() == 0:  # the others have the same
        require_accurate(op, given, outcome)
        _, whole = loss.fn(*given.args, **given.kwargs)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


COMPILED = [("dpo sft", DATA), ("rloo", CONTEXT)]
"""Each is a graph; Inductor would take the C++ compiler a minute more."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 37, bias=False)

    def forward(self, sample: Sample, **groups: Any) -> Tensor:
        x, _, *others = sample.args
        fn = losses.grpo if groups else GRPO.op.reference
        result: Any = fn(self.body(x), self.head.weight, *others, **sample.kwargs, **groups)
        return result[0] if groups else result


def averaged(wrap: Callable[[Model], torch.nn.Module]) -> None:
    """A wrapper that averages gradients over R ranks, given R times the loss, has those of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, whole = Model(), make_sample(of(GRPO, loss_type="grpo"), here())
    exact = copy.deepcopy(model).double()
    x, weight, target, advantages = whole.args
    exact(Sample((x.double(), weight, target, advantages.double()), whole.kwargs)).backward()
    own = Sample((x[rank::world], weight, target[rank::world], advantages[rank::world]), whole.kwargs)
    wrapped = wrap(model)
    (world * wrapped(own, group=dist.group.WORLD)).backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        grad: Any = mine.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert theirs.grad is not None
        torch.testing.assert_close(grad, theirs.grad.float(), rtol=1e-5, atol=1e-6)


def several_models() -> None:
    """Teachers of both kinds, and a draft's target model: a rank's sequences with what these have of them.

    One rank's weights are all 0, and its share of the divergence is.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in ("distill_both_kinds", "draft"):
        inputs, others = loss_calls.given(name, [3, 4, 2, 5], here())
        others["token_weights"][0] = 0.0
        others.pop("num_items_in_batch", None)
        last = 4 if rank == world - 1 else rank + 1  # of two ranks, one sequence and three
        mine = torch.arange(rank, last)
        x, weight, target = inputs
        loss, dx, dw = gradients(
            functools.partial(LOSSES[name][0], group=dist.group.WORLD),
            (x[mine], weight, target[mine]),
            {key: _rows_of(mine, value) for key, value in others.items()},
        )
        dist.all_reduce(dw)
        whole, whole_dx, whole_dw = gradients(LOSSES[name][0], inputs, others)
        torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dx, whole_dx[mine], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dw, whole_dw, rtol=1e-5, atol=1e-6)


def _rows_of(rows: Tensor, value: Any) -> Any:
    if isinstance(value, list):
        return [_rows_of(rows, each) for each in value]
    return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (4,) else value


def ratios(split: Split) -> None:
    """Ratios of sequences whose tokens ranks share, or which they have each for itself, and their metrics."""
    given = make_sample(of(GRPO, OLD, "sampling_per_token_logps"), here())
    old, sampler = given.kwargs[OLD], given.kwargs["sampling_per_token_logps"]
    mask = given.args[2] != -100
    rank = dist.get_rank()
    rows, columns = (
        torch.tensor(split.sequences(rank, 6, False, False), dtype=torch.int64),
        split.columns(rank, mask.shape[1]),
    )
    parts = [value[rows][:, columns] for value in (old, sampler, mask)]
    log_ratio = torch.where(mask, old.double() - sampler.double(), 0.0)
    sums = log_ratio.sum(-1).exp()
    ratio, metrics = losses.sampling_ratio(*parts, level="sequence", high=1.1, **split.groups(True))
    torch.testing.assert_close(ratio, sums.clamp(max=1.1)[rows].float())
    kl = (log_ratio.expm1() - log_ratio).sum() / mask.sum()
    name = "sampling/importance_sampling_ratio"
    want = {"sampling/kl": kl, f"{name}/min": sums.min(), f"{name}/above": (sums > 1.1).double().mean()}
    want["sampling/sampling_logp_difference/max"] = log_ratio.abs().max()
    for metric, value in want.items():
        torch.testing.assert_close(metrics[metric], value.float())


def a_token_of_no_sequence() -> None:
    """The loss is NaN on all ranks where one has such a token."""
    given = make_sample(CASES["dpo"], here(), packs=True)
    given.kwargs["sequence_ids"][0, 3] += 8 * (dist.get_rank() == 1)
    given.args[2][0, 3] = 0
    for name in ("group", "context_group"):
        loss, _ = losses.dpo(*given.args, **given.kwargs, **{name: dist.group.WORLD})  # type: ignore[arg-type]
        assert loss.isnan()


def refused() -> None:
    """A rank refuses these calls before it computes anything."""
    pairs, policy = make_sample(CASES["dpo"], here()), make_sample(of(GRPO), here())
    mesh = init_device_mesh(here().type, (2, dist.get_world_size() // 2))
    world: dict[str, Any] = {"group": dist.group.WORLD}
    context: dict[str, Any] = {"context_group": dist.group.WORLD}
    unknown: dict[str, Any] = {"sequence_ids": torch.zeros_like(pairs.args[2][:1]), "pair_order": "interleaved"}
    packed = tuple(value[:1] if value.shape[0] == 8 else value for value in pairs.args)
    for message, call_it in {
        "context_group: expected other ranks than those of group": lambda: losses.cpo(*pairs.args, **world, **context),
        "group: expected a mesh of one dimension, got one of 2": lambda: losses.dft(*pairs.args, group=mesh),
        "group: expected None with 'aot'": lambda: losses.dpo(*pairs.args, **pairs.kwargs, loss_type="aot", **world),
        "context_group: expected None with ld_alpha": lambda: losses.dpo(
            *pairs.args, **pairs.kwargs, ld_alpha=0.5, **context
        ),
        "num_sequences: expected the same number on all ranks": lambda: losses.cpo(*packed, **unknown, **context),
        "^group: expected None with 'kl_cov'": lambda: losses.grpo(*policy.args, loss_type="kl_cov", **world),
        "^context_group: expected None with": lambda: losses.grpo(*policy.args, top_entropy_quantile=0.5, **context),
        "max_completion_length: expected a number with 'dr_grpo' and a group of ranks": lambda: losses.grpo(
            *policy.args, loss_type="dr_grpo", **world
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call_it()


def calls(rank: int, world: int) -> dict[str, Callable[[], None]]:
    """Return the checks of the ranks by their names."""
    found: dict[str, Callable[[], None]] = {}
    splits = (
        {DATA: Split(world, 1), CONTEXT: Split(1, world)} if world == 2 else {"both": Split(2, 2), DATA: Split(4, 1)}
    )

    def add(name: str, way: str, packs: bool = False, compiled: bool = False) -> None:
        case = CASES[name]
        if case.only in ("", way):
            found[f"{name}, {way}, {packs}, {compiled}"] = lambda: check(
                case.loss, make_sample(case, here(), packs=packs), splits[way], compiled
            )

    for way in splits:
        for name in CASES:
            add(name, way)
        for name in PACKED_ON_RANKS:
            add(name, way, packs=True)
    for name, way in COMPILED if world == 2 else []:
        add(name, way, compiled=True)
    found |= {f"sampling_ratio, {way}": functools.partial(ratios, split) for way, split in splits.items()}
    wraps: list[Any] = [DistributedDataParallel, fully_shard]
    found |= {wrap.__name__: functools.partial(averaged, wrap) for wrap in wraps}
    return found | {f.__name__: f for f in (several_models, a_token_of_no_sequence, refused)}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, tmp_path: Path, device: torch.device) -> None:
    errors = errors_of_ranks(calls, world, tmp_path, device.type)
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_no_group(name: str) -> None:
    fn, _ = LOSSES[name]
    inputs, others = loss_calls.given(name, [2, 3], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^group: expected the name of a process group of this process, got 'none'"):
        fn(*inputs, **others, group="none")
    with pytest.raises(TypeError, match=r"^group: expected a process group that this rank belongs to, .* got int"):
        fn(*inputs, **others, group=3)
