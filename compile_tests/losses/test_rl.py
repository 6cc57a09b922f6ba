"""`llmk.rl.logprobs` by the accuracy rule: eager and compiled, with whole weights and with classes on two ranks."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from compile_tests.helpers.rank_processes import errors_of_ranks, here
from compile_tests.helpers.right_calls import require_call
from compile_tests.helpers.vocab_slice_checks import group, in_slices, own_rows
from llmk import functional, rl
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import OPS, Op, Sample

OPERATOR = OPS["linear_logprobs"]
OPTIONS = {"temperature", "logit_scale", "softcap", "ignore_index", "logits_dtype", "vocab_group"}
"""Those that the function has under the operator's names."""


def without_entropy(*args: Any, **kwargs: Any) -> Tensor:
    return OPERATOR.reference(*args, **kwargs)[0]


LOGPROBS_ALONE = Op(**{**vars(OPERATOR), "reference": without_entropy})


def function(entropy: bool) -> Callable[..., Any]:
    """Return the function with the operator's signature."""

    def fn(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if name in OPTIONS}
        bias = options.get("linear_bias")
        return rl.logprobs(input, linear_weight, target, bias=bias, entropy=entropy, **given)

    return fn


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The operator's samples that the function can be asked for, of few classes."""
    for sample in OPERATOR.samples(device, dtype):
        x, weight, target = sample.args
        if (
            target.dim() < x.dim()
            and len(weight) < 100
            and not {"support", "add_tail", "entropy"} & sample.kwargs.keys()
        ):
            yield sample


@pytest.mark.kernels
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, entropy: bool, device: torch.device) -> None:
    op = OPERATOR if entropy else LOGPROBS_ALONE
    for sample in samples(device, dtype):
        require_accurate(op, sample, call(op, sample, fn=function(entropy)))


def in_plain_rows(slicing: str) -> None:
    for entropy, op in ((True, OPERATOR), (False, LOGPROBS_ALONE)):
        for sample in list(samples(here(), torch.float32))[:5]:
            fn = in_slices(op, function(entropy), slicing, lambda own: {"vocab_group": own})
            require_call(op, sample, fn=fn)


def in_equal_rows_of_a_group() -> None:
    for ranks in (group(), group().group_name):
        sample = Sample((torch.randn(5, 8), torch.randn(32, 8), torch.arange(5)), why="equal")
        fn = in_slices(OPERATOR, function(True), "shards", lambda own, ranks=ranks: {"vocab_group": ranks})
        require_call(OPERATOR, sample, fn=fn)


def in_dtensors() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))

    def fn(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
        own = own_rows("linear_weight", linear_weight, rank, world, "shards")
        shape, stride = linear_weight.shape, linear_weight.stride()
        weight = DTensor.from_local(own, mesh, [Shard(0)], shape=shape, stride=stride)
        results = function(True)(input, weight, target, **options)
        return tuple(each.to_local() if isinstance(each, DTensor) else each for each in results)

    for sample in list(samples(here(), torch.float32))[:5]:
        if "linear_bias" not in sample.kwargs:
            require_call(OPERATOR, sample, fn=fn)


def one_graph() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, target = torch.randn(2, 3, 8), torch.randint(0, 4 * world, (2, 3))
    own = torch.randn(4 * world, 8).chunk(world)[rank]
    fn = functools.partial(rl.logprobs, entropy=True, vocab_group=group())
    for compiled, eager in zip(torch.compile(fn, fullgraph=True)(x, own, target), fn(x, own, target), strict=True):
        torch.testing.assert_close(compiled, eager)


def checks_of_ranks(rank: int, world: int) -> dict[str, Callable[[], None]]:
    return {
        "shards": functools.partial(in_plain_rows, "shards"),
        "uneven": functools.partial(in_plain_rows, "uneven"),
        "group": in_equal_rows_of_a_group,
        "dtensors": in_dtensors,
        "one graph": one_graph,
    }


def test_classes_on_two_ranks(tmp_path: Path, device: torch.device) -> None:
    errors = errors_of_ranks(checks_of_ranks, 2, tmp_path, device.type)
    assert not errors, "\n".join(errors)


def test_the_entropy_of_the_operator_changes_no_bit(device: torch.device) -> None:
    """The log-probabilities are what a trainer compares with those of another call."""
    x, weight, labels = torch.randn(7, 16, device=device), torch.randn(37, 16, device=device), torch.arange(7)
    found = rl.logprobs(x, weight, labels.to(device))
    assert torch.equal(found, rl.logprobs(x, weight, labels.to(device), entropy=True)[0])
    assert torch.equal(found, functional.linear_logprobs(x, weight, labels.to(device))[0])
