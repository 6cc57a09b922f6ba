"""Losses of a router: values and gradients of the logits by definitions of our own, eager and as one graph."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compile_tests.helpers.rank_processes import errors_of_ranks, here
from llmk import losses
from llmk.functional import router_topk_sums
from llmk.opcheck import accuracy_violation

L, B, T, E, K = 3, 2, 5, 12, 3
COUNTED = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]])


def probabilities(x: Tensor, scoring: str) -> Tensor:
    scores = x.sigmoid() if scoring == "sigmoid" else x.exp()
    return scores / scores.sum(-1, keepdim=True)


def balance(x: Tensor, m: Tensor, scoring: str, over: tuple[int, ...]) -> Tensor:
    """The share of tokens that chose an expert times its mean probability, over these axes of `[L, B, T, E]`."""
    m = m.to(x.dtype).expand(x.shape[:-1]).unsqueeze(-1)
    chosen = torch.zeros_like(x).scatter(-1, x.topk(K).indices, 1.0)
    tokens = m.sum(over).clamp(min=1)
    return ((m * chosen).sum(over) / tokens * (m * probabilities(x, scoring)).sum(over) / tokens).sum(-1)


def z(x: Tensor, m: Tensor) -> Tensor:
    return (m * x.exp().sum(-1).log().square()).sum() / (L * m.sum())


def sums(x: Tensor, scoring: str) -> tuple[Tensor, Tensor, Tensor]:
    _, of_probabilities, squares, _, counts = router_topk_sums(
        x, K, scoring=scoring, counted=COUNTED.to(x.device).expand(x.shape[:-1])
    )
    return of_probabilities, squares, counts


def ours(by: str, scoring: str) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        of_probabilities, _, counts = sums(x, scoring)
        if by != "layer":
            return losses.router_balance(of_probabilities, counts, K, by=by)[0]
        of_layers = zip(of_probabilities, counts, strict=True)
        return torch.stack([losses.router_balance(p, c, K)[0] for p, c in of_layers]).sum()

    return loss


CASES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "all layers at once": (ours("batch", "softmax"), lambda x, m: E * balance(x, m, "softmax", (0, 1, 2))),
    "layer by layer": (ours("layer", "softmax"), lambda x, m: E * balance(x, m, "softmax", (1, 2)).sum()),
    "sequence by sequence": (ours("sequence", "sigmoid"), lambda x, m: E / K * balance(x, m, "sigmoid", (2,)).mean()),
    "z": (lambda x: losses.router_z(*sums(x, "softmax")[1:], K)[0], z),
}


def logits(dtype: torch.dtype, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(L, B, T, E).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype, compiled: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    own, definition = CASES[name]
    own = torch.compile(own, backend="aot_eager", fullgraph=True) if compiled else own
    m = COUNTED.to(device)
    x = logits(dtype, device)
    found = [[y, *torch.autograd.grad(y, [x])] for y in (own(x), definition(x.float(), m).float())]
    exact = x.detach().double().requires_grad_()
    right = definition(exact, m)
    for got, composition, expected in zip(*found, [right, *torch.autograd.grad(right, [exact])], strict=True):
        assert got.dtype == composition.dtype
        assert (violation := accuracy_violation(got, composition, expected)) is None, str(violation)


TRANSFORMERS = ("mixtral.modeling_mixtral", "switch_transformers.modeling_switch_transformers")


def test_the_definitions_are_those_of_transformers() -> None:
    """Of tokens of which some do not count, and of all; the z-loss of all alone."""
    mixtral, switch = (pytest.importorskip(f"transformers.models.{x}", exc_type=ImportError) for x in TRANSFORMERS)
    x = logits(torch.float64, torch.device("cpu"))
    for counted in (None, COUNTED):
        theirs: Any = mixtral.load_balancing_loss_func(tuple(x.flatten(1, 2)), E, K, counted)
        every = torch.ones(B, T) if counted is None else counted
        torch.testing.assert_close(theirs.double(), E * balance(x, every, "softmax", (0, 1, 2)), rtol=1e-6, atol=0)
    z_loss: Any = switch.router_z_loss_func(x.flatten(0, 1))
    torch.testing.assert_close(z_loss, z(x, torch.ones(B, T)))


def test_it_is_least_where_all_are_busy(device: torch.device) -> None:
    """One expert of each token, in turn: the loss is 1, as its papers say, and no expert has more than its share."""
    x = 30.0 * torch.eye(E, device=device)
    _, of_probabilities, _, _, counts = router_topk_sums(x, 1)
    for by in ("batch", "sequence"):
        loss, metrics = losses.router_balance(of_probabilities, counts, 1, by=by)
        torch.testing.assert_close(loss.cpu(), torch.tensor(1.0))
        assert metrics["load/max"] == 1.0


def test_without_tokens_it_is_0(device: torch.device) -> None:
    x = logits(torch.float32, device)
    _, of_probabilities, squares, _, counts = router_topk_sums(x, K, counted=torch.zeros_like(x[..., 0]).long())
    balances = [losses.router_balance(of_probabilities, counts, K, by=by)[0] for by in ("batch", "sequence")]
    total = torch.stack([*balances, losses.router_z(squares, counts, K)[0]]).sum()
    (grad,) = torch.autograd.grad(total, [x])
    assert total == 0.0
    assert not grad.any()


def total(x: Tensor, by: str, **groups: Any) -> Tensor:
    """The loss by `by` and the z-loss; all tokens count."""
    _, of_probabilities, squares, _, counts = router_topk_sums(x, K)
    balanced, _ = losses.router_balance(of_probabilities, counts, K, by=by, **groups)
    return balanced + losses.router_z(squares, counts, K, **groups)[0]


def check_on_ranks(by: str, group: str, rank: int, world: int) -> None:
    """Each rank has its sequences, or its tokens of all; the loss is that of all."""
    x = logits(torch.float32, here())[0].detach().repeat(2, 1, 1).requires_grad_()
    part = x.tensor_split(world, 0 if group == "group" else 1)[rank]
    loss, whole = total(part, by, **{group: dist.group.WORLD}), total(x, by)
    torch.testing.assert_close(loss, whole)
    found, expected = (torch.autograd.grad(y, [x])[0] for y in (loss, whole))
    dist.all_reduce(found)
    torch.testing.assert_close(found, expected)


def checks(rank: int, world: int) -> dict[str, Callable[[], None]]:
    return {
        f"{by}, {group}": functools.partial(check_on_ranks, by, group, rank, world)
        for by in ("batch", "sequence")
        for group in ("group", "context_group")
    }


def test_ranks_have_one_loss(tmp_path: Path, device: torch.device) -> None:
    errors = errors_of_ranks(checks, 2, tmp_path, device.type)
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sums": torch.zeros(2, 3)}, r"counts: expected shape \(2, 3\) .* got \(2, 4\)"),
        ({"top_k": 5}, "top_k: expected 1 to 4, got 5"),
        ({"by": "layer"}, "by: expected one of 'batch', 'sequence', got 'layer'"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    arguments = {"sums": torch.zeros(2, 4), "counts": torch.zeros(2, 4, dtype=torch.int64), "top_k": 2} | change
    with pytest.raises((TypeError, ValueError), match=message):
        losses.router_balance(**arguments)
