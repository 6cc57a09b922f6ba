"""Checks that run in every process of a group: a projection whose classes are spread over it as plain tensors.

Values and gradients are those of one process that has all classes. Each check is called by all ranks in turn.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from compile_tests.helpers.loss_samples import IN_SLICES, make_sample
from compile_tests.helpers.rank_processes import here
from compile_tests.helpers.rank_slices import OwnRows, bounds, require_accurate_on_ranks, require_same_on_ranks
from llmk import functional, losses
from llmk.functional import VocabSlice, linear_logprobs, vocab_slice
from llmk.opcheck.calls import call
from llmk.registry import OPS, Op, Sample

OPERATORS = (
    "linear_logprobs", "linear_topk", "fused_linear_policy", "fused_linear_preference", "fused_linear_jsd",
    "fused_linear_jsd_ce",
)  # fmt: skip


def group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def own_rows(name: str, value: Any, rank: int, world: int, slicing: str) -> Any:
    """This rank's rows of a weight or a bias; any other argument as it is."""
    if not isinstance(value, Tensor) or "linear" not in name:
        return value
    return OwnRows.apply(value, *bounds(slicing, rank, world, value.shape[0]))


def in_slices(
    op: Op, fn: Callable[..., Any], slicing: str, arguments: Callable[[VocabSlice], dict[str, Any]]
) -> Callable[..., Any]:
    """Return the operator of whole weights, which calls `fn` with this rank's rows and compares the ranks' results.

    `arguments` makes of a slice what `fn` takes for it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def sliced(*args: Any, **kwargs: Any) -> Any:
        given = op.bind(Sample(args, kwargs))
        V = given["linear_weight"].shape[0]
        start, stop = bounds(slicing, rank, world, V)
        own = {name: own_rows(name, value, rank, world, slicing) for name, value in given.items()}
        assert own["linear_weight"].shape[0] == stop - start
        own_slice = vocab_slice(own["linear_weight"], group(), vocab_start=start, num_classes=V)
        results = fn(**own, **arguments(own_slice))
        require_same_on_ranks(*(results if isinstance(results, tuple) else (results,)))
        return results

    return sliced


def small(samples: Iterator[Sample]) -> list[Sample]:
    """The samples of several tokens and a few classes."""
    return [each for each in samples if each.args[0].dim() > 1 and len(each.args[1]) in range(2, 100)]


def operator(name: str, dtype: torch.dtype, slicing: str, step: int = 1) -> None:
    """The calls of every `step`th sample."""
    op = OPS[name]
    for sample in small(iter(op.samples(here(), dtype)))[::step]:
        require_accurate_on_ranks(
            op, sample, call(op, sample, fn=in_slices(op, op.overload, slicing, lambda own: {**own}))
        )


def groups_with_skipped_tokens(slicing: str) -> None:
    """Each rank compacts alike, also one without a class, or whose weight products of counted rows cannot read."""

    def unaligned(name: str, *, linear_weight: Tensor, **given: Any) -> Any:
        if dist.get_rank() == 0:
            linear_weight = torch.cat([linear_weight.new_zeros(1), linear_weight.flatten()])[1:].view_as(linear_weight)
        return OPS[name].overload(linear_weight=linear_weight, **given)

    for name in ("fused_linear_preference", "fused_linear_policy"):
        op = OPS[name]
        skipping = [each for each in op.samples(here(), torch.bfloat16) if each.kwargs.get("skip_ignored", True)]
        assert any(each.kwargs.get("chunk_size") for each in skipping)
        fn = functools.partial(unaligned, name) if slicing == "shards" else op.overload
        for sample in skipping:
            require_accurate_on_ranks(op, sample, call(op, sample, fn=in_slices(op, fn, slicing, lambda own: {**own})))


def every_loss(slicing: str, step: int = 1) -> None:
    """The calls of every `step`th loss: slices that are equal are found of the group, others are given."""
    V = 18 * dist.get_world_size() if slicing == "equal" else 37
    for case in list(IN_SLICES.values())[::step]:
        op, given = case.loss.op, make_sample(case, here(), V=V)
        if slicing == "equal":
            fn = in_slices(op, op.overload, "shards", lambda own: {"vocab_group": group()})
        else:
            fn = in_slices(op, op.overload, slicing, lambda own: {"vocab_group": own})
        require_accurate_on_ranks(op, given, call(op, given, fn=fn))


def every_operator(x: Tensor, own: Tensor, target: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a result of each operator, and the largest classes, with equal slices; a loss is given the name."""
    own_slice = vocab_slice(own, group())
    logprobs, entropy = linear_logprobs(x, own, target, support=support, **own_slice)
    top, indices, logsumexp = functional.linear_topk(x, own, 3, **own_slice)
    name, advantages = group().group_name, torch.ones_like(x[:, 0, 0])
    policy, _ = losses.grpo(x, own, target, advantages, support=support, entropy_coef=0.1, vocab_group=name)
    preference, *_ = functional.fused_linear_preference(x.unsqueeze(0), own, target.unsqueeze(0), **own_slice)
    divergence = functional.fused_linear_jsd(x, own, 2 * x.detach(), own.detach(), labels=target, **own_slice)
    both, *_ = functional.fused_linear_jsd_ce(x, own, x.detach().flip(0), own.detach(), target, **own_slice)
    sums = (logprobs, entropy.square(), top, logsumexp.square())
    return torch.stack([policy, preference, divergence, both, *(each.sum() for each in sums)]).sum(), indices


def one_graph(backend: str) -> None:
    """Compiled, every operator has the results and gradients of eager mode."""
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    compiled = torch.compile(every_operator, fullgraph=True, backend=backend)
    x, whole = torch.randn(2, 3, 8, device=here()), torch.randn(4 * world, 8, device=here())
    target = torch.randint(0, 4 * world, (2, 3), device=here())
    support = torch.cat((target.unsqueeze(-1), target.unsqueeze(-1).flip(1)), -1)
    found = []
    for each in (every_operator, compiled):
        own = whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
        hidden = x.clone().requires_grad_()
        loss, other = each(hidden, own, target, support)
        found.append((loss, other, *torch.autograd.grad(loss, (hidden, own))))
    torch.testing.assert_close(found[1], found[0])


SENT = dict.fromkeys(("vocab_parallel_linear_ce", "linear_logprobs", "fused_linear_policy"), 5)
SENT |= {"fused_linear_jsd": 8, "fused_linear_jsd_ce": 11}
"""The float32 numbers of a token that a rank sends in the forward pass."""
SENT_AGAIN = {"linear_logprobs": 1}
"""The same in the backward pass, besides the gradient of the hidden states: the logits of the targets, made again."""


def noting(name: str, sent: list[tuple[str, int]]) -> Callable[..., Any]:
    """Return the collective, which notes how many numbers it sends."""
    real = getattr(torch.ops._c10d_functional, name)

    def collective(sends: Tensor, *args: Any) -> Any:
        sent.append((name, sends.numel()))
        return real(sends, *args)

    return collective


def what_is_exchanged() -> None:
    N, H, world = 11, 8, dist.get_world_size()
    for name, numbers in SENT.items():
        for V in (8 * world, 800 * world):
            sent: list[tuple[str, int]] = []
            x, own = torch.randn(N, H, device=here()), torch.randn(V // world, H, device=here())
            target = torch.zeros(N, dtype=torch.int64, device=here())
            teacher = (2 * x, own.clone()) if "jsd" in name else ()
            args: tuple[Any, ...] = (*teacher, target) if name != "fused_linear_jsd" else teacher
            wanted = x.clone().requires_grad_(), own.clone().requires_grad_()
            collectives: dict[str, Any] = {
                each: noting(each, sent) for each in ("all_gather_into_tensor", "all_reduce")
            }
            with mock.patch.multiple(torch.ops._c10d_functional, **collectives):
                result = OPS[name].overload(*wanted, *args, chunk_size=6, **vocab_slice(own, group()))
                assert {each for each, _ in sent} == {"all_gather_into_tensor"}
                assert sum(each for _, each in sent) == N * numbers, (name, V, sent)
                sent.clear()
                (result[0] if isinstance(result, tuple) else result).sum().backward()
                assert sum(each for kind, each in sent if kind == "all_reduce") == N * H, (name, V, sent)
                gathered = sum(each for kind, each in sent if kind != "all_reduce")
                assert gathered == N * SENT_AGAIN.get(name, 0), (name, V, sent)


def slices_of_a_group() -> None:
    rank, world, name = dist.get_rank(), dist.get_world_size(), group().group_name
    own = torch.randn(4, 8, device=here())
    for each in (group(), name):
        assert vocab_slice(own, each) == {"vocab_start": 4 * rank, "num_classes": 4 * world, "group_name": name}
    with pytest.raises(ValueError, match=r"num_classes: expected a number with vocab_start, got None"):
        vocab_slice(own, name, vocab_start=3)
    with pytest.raises(ValueError, match=r"vocab_group: expected the name of a process group of this process, got 'x'"):
        vocab_slice(own, "x")
    wrong: Any = 0
    with pytest.raises(TypeError, match=r"vocab_group: expected a torch.distributed.ProcessGroup or its name, got int"):
        vocab_slice(own, wrong)


def wrong_slices() -> None:
    """Every rank refuses them before it waits for another."""
    world, name = dist.get_world_size(), group().group_name
    x, own = torch.randn(2, 8, device=here()), torch.randn(4, 8, device=here())
    target = torch.zeros(2, dtype=torch.int64, device=here())
    own_slice: dict[str, Any] = {**vocab_slice(own, name)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"group_name": "x"}, "group_name: expected the name of a process group of this process, got 'x'"),
        ({"vocab_start": -1}, "vocab_start: expected a class, 0 or more, got -1"),
        ({"vocab_start": 4 * world}, f"num_classes: expected at least vocab_start {4 * world} and the 4 classes of"),
        (
            {"num_classes": 3},
            r"num_classes: expected at least vocab_start \d+ and the 4 classes of linear_weight, got 3",
        ),
        ({"group_name": ""}, "group_name: expected one for the classes that are not among the 4 of linear_weight"),
    ]
    for change, words in wrong:
        with pytest.raises(ValueError, match=words):
            linear_logprobs(x, own, target, **own_slice | change)
        with pytest.raises(ValueError, match=words):
            functional.fused_linear_jsd_ce(x, own, x, own, target, **own_slice | change)
    with pytest.raises(TypeError, match="target: expected"):
        linear_logprobs(x, own, target.float(), **own_slice)
    with pytest.raises(ValueError, match="teacher_linear_weight: expected the classes of linear_weight, 4, got 3"):
        functional.fused_linear_jsd(x, own, x, own[:3], **own_slice)
    mesh = init_device_mesh(here().type, (world,))
    with pytest.raises(ValueError, match="group_name: expected '' for DTensors, which say who has which classes"):
        linear_logprobs(x, DTensor.from_local(own, mesh, [Shard(0)]), target, **own_slice)
