"""Recurrences and convolutions of sequences whose parts lie on ranks, beside one process that has them whole.

The ranks are the CPU's with gloo; with `--device cuda` each has a GPU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from compile_tests.helpers.rank_processes import errors_of_ranks, here
from compile_tests.helpers.recurrences import inputs
from llmk import functional
from llmk.accuracy.rule import accuracy_violation
from llmk.nn import CausalConv1d
from llmk.registry import OPS

Results = tuple[Tensor, Tensor]
NAMES = ("gated_delta_rule", "gated_linear_attention", "causal_conv1d")
LENGTHS = {2: (70, 37), 4: (70, 7, 33, 12)}
"""The tokens of each rank: uneven, one part longer than a chunk."""


def call_of(
    name: str, dtype: torch.dtype, tokens: int, per_channel: bool, V: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, of which those in `WHOLE` have no tokens, and options."""
    q, k, v, g, beta = inputs(2, tokens, 2, 4, 6, V, dtype, here(), per_channel=per_channel)
    g = g.float() / 10  # decays that last over several parts
    if name == "causal_conv1d":
        weight = torch.linspace(-1, 1, 24 * 4, dtype=dtype, device=here()).view(24, 4)
        state = torch.linspace(-1, 1, 2 * 24 * 3, dtype=dtype, device=here()).view(2, 24, 3)
        return {"input": q.flatten(2).repeat(1, 1, 2).mT, "weight": weight, "initial_state": state}, {
            "activation": "silu"
        }
    state = torch.linspace(-1, 1, 2 * 4 * 6 * V, dtype=torch.float32, device=here()).view(2, 4, 6, V)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    if name == "gated_delta_rule":
        return tensors, {"l2_norm_qk": True}
    tensors.pop("beta")
    return tensors, {"scale": 0.3}


WHOLE = ("weight", "initial_state")


def part(name: str, x: Tensor, rank: int, lengths: tuple[int, ...]) -> Tensor:
    return x.split(lengths, 2 if name == "input" else 1)[rank]


def gradients(
    fn: Callable[..., Results], tensors: Mapping[str, Tensor], weights: Callable[..., Results]
) -> list[Tensor]:
    """Output, final state, and the gradients of all tensors through both, on the CPU."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, final = fn(**leaves)
    found = torch.autograd.grad([out, final], list(leaves.values()), weights(out, final), allow_unused=True)
    zeros = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves.values(), found, strict=True)]
    return [x.detach().cpu() for x in (out, final, *zeros)]


def ramp(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)


def nudged(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    signs = {n: torch.randint(-1, 2, x.shape, generator=generator, device="cpu") for n, x in tensors.items()}
    return {n: x * (1 + signs[n].to(x.device) * torch.finfo(x.dtype).eps).to(x.dtype) for n, x in tensors.items()}


def check(
    name: str, dtype: torch.dtype, per_channel: bool, packed: bool, compiled: bool, V: int, rank: int, world: int
) -> None:
    """Each rank's part of what one process computes; through the last rank's final state too.

    The first rank compares. The baseline is the reference in one process, where that does not do also on inputs that
    are a unit in the last place away: parts begin chunks elsewhere, and sum in another order.
    """
    lengths, (tensors, options) = LENGTHS[world], call_of(name, dtype, sum(LENGTHS[world]), per_channel, V)
    time = 2 if name == "causal_conv1d" else 1
    if packed:  # boundaries inside of parts, at one between them, and a sequence over three
        begins = torch.zeros(sum(lengths), dtype=torch.int64, device=here())
        begins[[3, 50, sum(lengths) - 2] if world == 2 else [3, 40, 60, 110, 115]] = 1
        options["sequence_ids"] = begins.cumsum(0).expand(2, -1).contiguous()

    def of_whole(out: Tensor, final: Tensor) -> Results:
        return ramp(out), ramp(final)

    reference = partial(OPS[name].reference, **options)

    def baseline_and_right(tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        wide = {n: x.double() for n, x in tensors.items()}
        return gradients(reference, tensors, of_whole), gradients(reference, wide, of_whole)

    def of_part(out: Tensor, final: Tensor) -> Results:
        last = ramp(final) if rank == world - 1 else torch.zeros_like(final)
        shape = list(out.shape)
        shape[time] = sum(lengths)
        return ramp(out.new_empty(shape)).split(lengths, time)[rank], last

    group = dist.group.WORLD
    assert group is not None
    own = {n: x if n in WHOLE else part(n, x, rank, lengths) for n, x in tensors.items()}
    if packed:
        options["sequence_ids"] = part("sequence_ids", options["sequence_ids"], rank, lengths)
    backend = "aot_eager" if here().type == "cpu" else "inductor"
    operator: Any = (
        torch.compile(getattr(functional, name), fullgraph=True, backend=backend) if compiled else OPS[name].function
    )
    found = gradients(partial(operator, context_group=group.group_name, **options), own, of_part)
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, found)
    if rank > 0:
        return
    names, neighbours = ["out", "final", *tensors], []
    for i, (what, parts, other, exact) in enumerate(
        zip(names, zip(*everywhere, strict=True), *baseline_and_right(tensors), strict=True)
    ):
        if what == "final":
            actual = parts[-1]
        elif what in WHOLE:  # each rank has a term
            actual = torch.stack(parts).sum(0, dtype=torch.float32).to(other.dtype)
        else:
            actual = torch.cat(parts, time)
        if accuracy_violation(actual, other, exact) is not None and not neighbours:
            neighbours = [baseline_and_right(nudged(tensors, seed)) for seed in range(8)]
        violation = accuracy_violation(actual, other, exact, neighbours=[(x[i], y[i]) for x, y in neighbours])
        assert violation is None, (what, violation)


def check_layer(rank: int, world: int) -> None:
    """The layer does it too, and DTensors, of which a call gets all tokens, are refused by name."""
    group = dist.group.WORLD
    assert group is not None
    x = ramp(torch.empty((2, 6, sum(LENGTHS[world])), device=here()))
    whole, layer = (CausalConv1d(6, 4, activation="silu", context_group=name) for name in ("", group.group_name))
    layer.load_state_dict(whole.state_dict())
    torch.testing.assert_close(
        layer(part("input", x, rank, LENGTHS[world]))[0], part("input", whole(x)[0], rank, LENGTHS[world])
    )
    sharded = distribute_tensor(x, init_device_mesh(here().type, (world,)), [Shard(0)])
    with pytest.raises(ValueError, match="context_group: expected '' for DTensors"):
        layer(sharded)


def checks(rank: int, world: int) -> dict[str, Callable[[], None]]:
    """All calls on two ranks, and on four those with a sequence over three of them."""
    found: dict[str, Callable[[], None]] = {"layer": partial(check_layer, rank, world)}
    for name in NAMES:
        for per_channel in (False, True) if name != "causal_conv1d" else (False,):
            for packed in (False, True) if world == 2 else (True,):
                for dtype, compiled in ((torch.float32, packed and world == 2), (torch.bfloat16, False)):
                    key = f"{name}, {per_channel=}, {packed=}, {dtype}, {compiled=}"
                    found[key] = partial(check, name, dtype, per_channel, packed, compiled, 5, rank, world)
    # The states that are sent have more columns than values may have.
    if world == 2:
        found["V=512"] = partial(check, "gated_delta_rule", torch.float32, False, False, False, 512, rank, world)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_one_process_does(world: int, tmp_path: Path, device: torch.device) -> None:
    errors = errors_of_ranks(checks, world, tmp_path, device.type)
    assert not errors, "\n".join(errors)
