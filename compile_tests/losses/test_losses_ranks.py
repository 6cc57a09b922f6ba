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

from compile_tests.helpers import loss_ops
from compile_tests.helpers.loss_calls import LOSSES, given, gradients
from compile_tests.helpers.loss_references import batch, packed
from compile_tests.helpers.rank_processes import errors_of_ranks, here
from compile_tests.helpers.supervised_references import two_heads
from llmk import losses
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import Op, Sample

PAIRS = [5, 1, 7, 3, 4, 6, 2, 7]  # chosen completions, then rejected ones
LENGTHS = [5, 1, 7, 0, 4, 6]
BY_TURNS = [0, 4, 1, 5, 2, 6, 3, 7]
OWNERS = {1: [0], 2: [0, 1, 1], 4: [0, 3, 1, 1]}
"""The ranks that have one sequence or pair after the other, again and again: of four, one has none."""


class Loss(NamedTuple):
    fn: Callable[..., Any]
    op: Op
    in_pairs: bool = False
    has_sequences: bool = True  # and not tokens alone, which only `group` has


DPO, CPO = Loss(losses.dpo, loss_ops.DPO, in_pairs=True), Loss(losses.cpo, loss_ops.CPO, in_pairs=True)
SIMPO, ORPO = Loss(losses.simpo, loss_ops.SIMPO, in_pairs=True), Loss(losses.orpo, loss_ops.ORPO, in_pairs=True)
KTO, GRPO = Loss(losses.kto, loss_ops.KTO), Loss(losses.grpo, loss_ops.GRPO)
REINFORCE, RLOO = Loss(losses.reinforce, loss_ops.REINFORCE), Loss(losses.rloo, loss_ops.RLOO)
PPO = Loss(losses.ppo, loss_ops.PPO)
SFT, DFT = Loss(losses.sft, loss_ops.SFT, has_sequences=False), Loss(losses.dft, loss_ops.DFT, has_sequences=False)
DISTILL = Loss(losses.distill, loss_ops.DISTILL, has_sequences=False)
TOPK = Loss(losses.distill_topk, loss_ops.TOPK, has_sequences=False)
HEADS = Loss(two_heads, loss_ops.HEADS, has_sequences=False)


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
        numbers = torch.stack([result.detach(), *metrics.values()]).nan_to_num()
        everywhere = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, numbers)
        assert all(torch.equal(numbers, other) for other in everywhere)
        found.update(metrics)
        return result

    return of_ranks


def check(loss: Loss, sample: Sample, split: Split, compiled: bool) -> None:
    fn: Any = torch.compile(loss.fn, backend="aot_eager", fullgraph=True) if compiled else loss.fn
    op, found = loss.op, {}
    outcome = call(op, sample, fn=parallel(loss, split, fn, found))
    if dist.get_rank() == 0:  # the others have the same
        require_accurate(op, sample, outcome)
        _, whole = loss.fn(*sample.args, **sample.kwargs)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


def of_pairs(is_packed: bool = False, **options: Any) -> Sample:
    """Options may have `ref_logps`, `label` or `num_sequences` that are True, in whose place are numbers."""
    x, weight, target = batch(PAIRS, here())
    values: dict[str, Any] = {
        "ref_logps": -3.0 * (target != -100).sum(-1) + torch.randn(8),
        "label": torch.arange(8) % 3 == 0,
        "num_sequences": 8,
        "ref_input": torch.randn(*target.shape, 5),
        "ref_linear_weight": torch.randn(37, 5),
    }
    options = {name: values.get(name, value) for name, value in options.items()}
    if not is_packed:
        return Sample((x, weight, target), options, why=f"{sorted(options)}")
    of_kto = "label" in options
    options = {k: v[BY_TURNS] if k in ("ref_logps", "label") else v for k, v in options.items()}
    options |= {} if of_kto else {"pair_order": "interleaved"}
    return packed(Sample((x, weight, target), options, why="pairs"), target, (), BY_TURNS)


def of_policy(*names: str, is_packed: bool = False, **options: Any) -> Sample:
    """A batch with advantages, and with those of the values below that are named."""
    x, weight, target = batch(LENGTHS, here())
    scores = torch.nn.functional.linear(x, weight).log_softmax(-1)
    own = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    values = {
        "old_per_token_logps": own + 0.3 * torch.randn(own.shape),
        "ref_per_token_logps": own + 0.3 * torch.randn(own.shape),
        "sampling_per_token_logps": own + 0.3 * torch.randn(own.shape),
        "importance_sampling_ratio": torch.rand(own.shape) + 0.5,
        "support": torch.cat([target.unsqueeze(-1), torch.randint(0, 37, (*target.shape, 9))], -1).roll(1, 0),
        "old_logps": torch.where(target == -100, 0.0, own).sum(-1) + 0.3 * torch.randn(6),
        "values": torch.randn(own.shape),
        "old_values": torch.randn(own.shape),
        "returns": torch.randn(own.shape),
    }
    options |= {name: values[name] for name in names}
    advantages = torch.randn(own.shape) if "values" in names else torch.randn(6)
    sample = Sample((x, weight, target, advantages), options, why=f"{sorted(options)}")
    return packed(sample, target, tuple(name for name in names if name != "old_logps")) if is_packed else sample


def of_tokens(loss: Loss, **options: Any) -> Sample:
    x, weight, target = batch(LENGTHS, here())
    if options.pop("weighted", False):
        options["token_weights"] = torch.rand(target.shape)
    args: tuple[Tensor, ...] = (x, weight, target)
    if loss is HEADS:
        args = (x, torch.randn_like(x), weight, target)
    if loss is DISTILL:
        args = (*args, torch.randn(*target.shape, 7), torch.randn(37, 7))
    if loss is TOPK:
        top = torch.randn(*target.shape, 37).log_softmax(-1).topk(4)
        args = (*args, top.indices, top.values)
    return Sample(args, options, why=f"{sorted(options)}")


MIXTURE = {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [0.8, 0.2, 1.5]}
ITEMS = {"num_items_in_batch": 11, "num_chosen_tokens_in_batch": 70.0}
OLD = "old_per_token_logps"
EVERYTHING = (OLD, "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
DATA, CONTEXT = "data", "context"
CASES: dict[str, tuple[Loss, Callable[[], Sample], str]] = {
    "dpo": (DPO, lambda: of_pairs(ref_logps=True), ""),
    "dpo mixture": (DPO, lambda: of_pairs(ref_input=True, ref_linear_weight=True, **MIXTURE), ""),
    "dpo sft": (DPO, lambda: of_pairs(ref_logps=True, loss_type="sft"), ""),
    "wpo": (DPO, lambda: of_pairs(ref_logps=True, use_weighting=True, loss_type=["ipo", "sft"]), ""),
    "dpo items": (DPO, lambda: of_pairs(ref_logps=True, **MIXTURE, **ITEMS), ""),
    "aot": (DPO, lambda: of_pairs(ref_logps=True, loss_type="aot"), CONTEXT),
    "ld_alpha": (DPO, lambda: of_pairs(ref_logps=True, ld_alpha=0.3), DATA),
    "dpo packed": (DPO, lambda: of_pairs(True, ref_logps=True, **MIXTURE), ""),
    "cpo": (CPO, of_pairs, ""),
    "cpo alpha": (CPO, lambda: of_pairs(alpha=0.3), ""),
    "cpo packed": (CPO, lambda: of_pairs(True, num_sequences=True), ""),
    "cpo packed, number unknown": (CPO, lambda: of_pairs(True), DATA),
    "simpo": (SIMPO, of_pairs, ""),
    "orpo": (ORPO, of_pairs, ""),
    "kto": (KTO, lambda: of_pairs(ref_logps=True, label=True, kl=torch.tensor(0.4)), ""),
    "kto items": (KTO, lambda: of_pairs(ref_logps=True, label=True, num_items_in_batch=11), ""),
    "kto packed": (KTO, lambda: of_pairs(True, ref_logps=True, label=True), ""),
    "bnpo": (GRPO, lambda: of_policy(loss_type="bnpo", entropy_coef=0.1), ""),
    "dapo": (GRPO, lambda: of_policy(*EVERYTHING, beta=0.2, entropy_coef=0.1), ""),
    "grpo": (GRPO, lambda: of_policy(OLD, loss_type="grpo", clip_ratio_c=1.3), ""),
    "grpo nonempty": (GRPO, lambda: of_policy(OLD, loss_type="grpo", count_empty_sequences=False), ""),
    "luspo items": (GRPO, lambda: of_policy(OLD, loss_type="luspo", num_sequences_in_batch=9), ""),
    "dr_grpo": (GRPO, lambda: of_policy(OLD, loss_type="dr_grpo", max_completion_length=12), ""),
    "gspo": (GRPO, lambda: of_policy(*EVERYTHING, beta=0.2, importance_sampling_level="sequence"), ""),
    "gspo packed": (GRPO, lambda: of_policy(OLD, importance_sampling_level="sequence", is_packed=True), ""),
    "gmpo": (GRPO, lambda: of_policy(OLD, loss_type="gmpo", epsilon=0.4), ""),
    "cispo": (GRPO, lambda: of_policy(OLD, loss_type="cispo"), ""),
    "vespo": (GRPO, lambda: of_policy(OLD, loss_type="vespo"), ""),
    "off policy": (GRPO, lambda: of_policy(OLD, off_policy_mask_threshold=0.02), ""),
    "dppo": (GRPO, lambda: of_policy(OLD, loss_type="dppo_tv"), ""),
    "support": (GRPO, lambda: of_policy(OLD, "support"), ""),
    "rloo": (RLOO, lambda: of_policy("old_logps"), ""),
    "rloo packed": (RLOO, lambda: of_policy("old_logps", is_packed=True, num_items_in_batch=9), ""),
    "reinforce": (REINFORCE, lambda: of_policy(loss_agg="sequence_sum"), ""),
    "ppo": (PPO, lambda: of_policy(OLD, "values", "old_values", "returns", loss_agg="sequence_mean"), ""),
    "sft": (SFT, lambda: of_tokens(SFT, weighted=True, entropy_coef=0.2), ""),
    "sft items": (SFT, lambda: of_tokens(SFT, num_items_in_batch=31), ""),
    "dft": (DFT, lambda: of_tokens(DFT), ""),
    "distill": (DISTILL, lambda: of_tokens(DISTILL, ce_weight=0.4), ""),
    "distill weights": (DISTILL, lambda: of_tokens(DISTILL, ce_weight=0.4, weighted=True), ""),
    "distill alone": (DISTILL, lambda: of_tokens(DISTILL), ""),
    "topk": (TOPK, lambda: of_tokens(TOPK, ce_weight=0.4, weighted=True), ""),
    "heads": (HEADS, lambda: of_tokens(HEADS, head_weights=[1.0, 0.3], z_loss=1e-2), DATA),
}
"""The loss, its arguments, and whether ranks share sequences or tokens alone; "" is both."""
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
    model, whole = Model(), of_policy(loss_type="grpo")
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
        inputs, others = given(name, [3, 4, 2, 5], here())
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
    sample = of_policy(OLD, "sampling_per_token_logps")
    old, sampler = sample.kwargs[OLD], sample.kwargs["sampling_per_token_logps"]
    mask = sample.args[2] != -100
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
    sample = of_pairs(True, ref_logps=True)
    sample.kwargs["sequence_ids"][0, 3] += 8 * (dist.get_rank() == 1)
    sample.args[2][0, 3] = 0
    for name in ("group", "context_group"):
        loss, _ = losses.dpo(*sample.args, **sample.kwargs, **{name: dist.group.WORLD})  # type: ignore[arg-type]
        assert loss.isnan()


def refused() -> None:
    """A rank refuses these calls before it computes anything."""
    pairs, policy = of_pairs(ref_logps=True), of_policy()
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

    def add(name: str, way: str, compiled: bool = False) -> None:
        loss, make, only = CASES[name]
        if only in ("", way):
            found[f"{name}, {way}, {compiled}"] = lambda: check(loss, make(), splits[way], compiled)

    for way in splits:
        for name in CASES:
            add(name, way)
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
    inputs, others = given(name, [2, 3], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^group: expected the name of a process group of this process, got 'none'"):
        fn(*inputs, **others, group="none")
    with pytest.raises(TypeError, match=r"^group: expected a process group that this rank belongs to, .* got int"):
        fn(*inputs, **others, group=3)
