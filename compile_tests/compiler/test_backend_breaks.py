"""Graphs that Dynamo breaks: what one of them gives is no result of the model's."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_tests.helpers.backend_checks import require_same_step, rewriting
from llmk.compiler import Report


def z_loss(logits: Tensor) -> Tensor:
    return 0.5 * logits.logsumexp(-1).pow(2).mean()


class Broken(nn.Module):
    """Dynamo goes on after the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        logits = self.head(x)
        loss = F.cross_entropy(logits, t)
        torch._dynamo.graph_break()
        return loss + z_loss(logits)


def loss_and_logits(logits: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    torch._dynamo.graph_break()
    return F.cross_entropy(logits, t), logits


class BrokenInAFunction(Broken):
    """The function that breaks has a graph that ends with what it returns."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        loss, logits = loss_and_logits(self.head(x), t)
        return loss + z_loss(logits)


class Inner(Broken):
    """It gives its logits to the module around it."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x * 2
        torch._dynamo.graph_break()
        logits = self.head(x)
        return F.cross_entropy(logits, t), logits


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        loss, logits = self.inner(x, t)
        return loss + z_loss(logits)


class WholeInside(Around):
    """The inner module has a whole graph, and the caller of it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Returning()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        losses = []
        for inner in self.parts():
            loss, logits = inner(x, t)
            losses.append(loss + z_loss(logits))
        return torch.stack(losses).sum()

    @torch.compiler.disable(recursive=False)
    def parts(self) -> Iterator[nn.Module]:
        yield self.inner


class Hooked(Broken):
    """Its own hook reads what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, result: result[0] + z_loss(result[1]))

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x * 2
        torch._dynamo.graph_break()
        logits = self.head(x)
        return F.cross_entropy(logits, t), logits


class Returning(Broken):
    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.head(x)
        return F.cross_entropy(logits, t), logits


MODELS: list[Callable[[], nn.Module]] = [Broken, BrokenInAFunction, Around, WholeInside, Hooked]


def args() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6)


@pytest.mark.parametrize("make", MODELS)
def test_logits_that_go_on_are_never_dropped(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, found = make(), Report()
    require_same_step(model, torch.compile(model, backend=rewriting(found, drop_logits=True)), args())
    assert found.graphs > 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_one_graph_drops_its_logits(in_place: bool) -> None:
    """However it is compiled."""
    torch._dynamo.reset()
    model, found = Returning(), Report()
    backend = rewriting(found, drop_logits=True)
    if in_place:
        model.compile(backend=backend)
    run = model if in_place else torch.compile(model, backend=backend)
    with torch.no_grad():
        assert run(*args())[1].shape == (6, 11)
    assert run(*args())[1].shape == (6, 0)
    assert found.replaced["fused_linear_ce"] == 1
