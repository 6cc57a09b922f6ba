"""Attention whose mask hides the future alone: found in every spelling, and nothing else taken for it."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compile_tests.helpers.backend_checks import require_equal, results, rewritten
from llmk.compiler import Report
from llmk.compiler.formulas import Formula, Region
from llmk.compiler.segments import segments
from llmk.compiler.trace import traced

S = 6
LOWEST = torch.finfo(torch.float32).min


def positions(n: int) -> tuple[Tensor, Tensor]:
    """Positions of queries, [N, 1], and of keys, [1, N]."""
    return torch.arange(n).view(n, 1), torch.arange(n)[None, :]


def packed(n: int) -> Tensor:
    """As transformers tells packed sequences apart, of positions that begin once."""
    places = torch.arange(n).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row, (q, k) = torch.arange(2)[:, None, None, None], positions(n)
    alike = sequence[row, q[None, None]] == sequence[row, k[None, None]]
    return (q.new_ones((), dtype=torch.bool) & alike & (k <= q)).expand(2, -1, n, n)


def steps(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool).cumsum(0) - 1


CAUSAL: dict[str, Callable[[int], Tensor]] = {
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "cast tril": lambda n: torch.tril(torch.ones(n, n)).bool().view(1, 1, n, n),
    "not triu": lambda n: ~torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1),
    "compared": lambda n: positions(n)[1] <= positions(n)[0],
    "difference": lambda n: positions(n)[0] - positions(n)[1] > -1,
    "transposed": lambda n: (positions(n)[0] <= positions(n)[1]).transpose(-1, -2),
    "counted": lambda n: steps(n)[:, None] >= steps(n),
    "neither later": lambda n: ~((positions(n)[1] > positions(n)[0]) | (positions(n)[1] >= n)),
    "packed": packed,
    "wide window": lambda n: (positions(n)[1] > positions(n)[0] - 8) & (positions(n)[1] <= positions(n)[0]),
    "infinite triu": lambda n: torch.full((n, n), -math.inf).triu(1),
    "where": lambda n: torch.where(CAUSAL["compared"](n), 0.0, LOWEST),
    "filled": lambda n: torch.zeros(n, n).masked_fill(CAUSAL["tril"](n).logical_not(), -math.inf),
    "filled where 0": lambda n: torch.zeros(n, n).masked_fill(torch.ones(n, n).tril() == 0, -math.inf),
    "filled twice": lambda n: CAUSAL["infinite triu"](n).masked_fill(
        positions(n)[1] >= n, -math.inf
    ),  # nothing is past the end
    "times the lowest": lambda n: (1.0 - torch.ones(n, n).tril()) * LOWEST,
}
"""Masks of N queries by as many keys that hide what comes after a token."""

OTHERS: dict[str, Callable[[int], Tensor]] = {
    "strict": lambda n: (positions(n)[1] < positions(n)[0]) | (positions(n)[0] == 0),
    "one token ahead": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "the past": lambda n: torch.ones(n, n, dtype=torch.bool).triu(),
    "narrow window": lambda n: CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - 3),
    "steps of two": lambda n: positions(n)[1] <= 2 * positions(n)[0],
    "soft": lambda n: torch.where(CAUSAL["compared"](n), 0.0, -10.0),
    "raised": lambda n: torch.where(CAUSAL["compared"](n), 1.0, -math.inf),
    "one sequence each": lambda n: CAUSAL["compared"](n) & (positions(n)[1] // 3 == positions(n)[0] // 3),
}


def attention(mask: Callable[[int], Tensor] | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask and mask(q.shape[2]), **options)


def heads(count: int = 2, length: int = S) -> Tensor:
    return torch.randn(2, count, length, 8, generator=torch.Generator().manual_seed(count)).requires_grad_()


def calls_of_attention(fn: Callable[..., Any], *args: Any) -> list[tuple[bool, bool]]:
    """For each call that remains, whether it has a mask, and is_causal."""
    found: list[tuple[bool, bool]] = []

    def look(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                given = dict(zip(("query", "key", "value", "mask", "dropout", "causal"), node.args, strict=False))
                given |= node.kwargs
                masked = given.get("mask", given.get("attn_mask")) is not None
                found.append((masked, bool(given.get("causal", given.get("is_causal", False)))))

    rewritten(fn, Report(), look=look)(*args)
    return found


def values_of(formula: Formula, shape: torch.Size) -> Tensor:
    index = torch.meshgrid(*map(torch.arange, shape), indexing="ij") if shape else ()
    if isinstance(formula, Region):
        inside = torch.ones(shape, dtype=torch.bool)
        for line in formula.lines:
            inside &= values_of(line, shape) >= 0
        return torch.where(inside, formula.inside, formula.outside)
    return torch.full(shape, formula.start) + sum(s * i for s, i in zip(formula.steps, index, strict=True))


class Checked(torch.fx.Interpreter):
    """Runs a graph, and holds every formula against what is there."""

    seen = 0

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if "formula" in n.meta:
            want = values_of(n.meta["formula"], value.shape).to(value.dtype)
            torch.testing.assert_close(value, want, rtol=0, atol=0, msg=lambda text: f"{n.format_node()}: {text}")
            self.seen += 1
        return value


@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_formulas(name: str) -> None:
    """At every position of every tensor on the way to a mask."""
    checked: list[int] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        (segment,) = segments(gm)
        interpreter = Checked(traced(gm, segment))  # type: ignore[arg-type]
        interpreter.run(*example_inputs)
        checked.append(interpreter.seen)
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: x + (CAUSAL | OTHERS)[name](S).float(), backend=look)(torch.zeros(S, S))
    assert checked[0] > 1


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_mask(name: str) -> None:
    report = require_equal(attention, [CAUSAL[name], heads(), heads(), heads()])
    assert report.replaced == {"attention": 1}, str(report)
    assert calls_of_attention(attention, CAUSAL[name], heads(), heads(), heads()) == [(False, True)]


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_left(name: str) -> None:
    args = OTHERS[name], heads(), heads(), heads()
    report = Report()
    got = results(rewritten(attention, report), args)
    assert report.replaced == {}
    assert len(report.left) == 1, str(report)
    for x, y in zip(got, results(attention, args), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_mask_that_hides_nothing() -> None:
    def everything(n: int) -> Tensor:
        return torch.ones(n, n, dtype=torch.bool).tril(n)

    assert calls_of_attention(attention, everything, heads(), heads(), heads()) == [(False, False)]


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = CAUSAL["compared"](S)
    return checkpoint(F.scaled_dot_product_attention, q, k, v, mask, use_reentrant=False)


def test_mask_from_outside_a_checkpointed_region() -> None:
    assert require_equal(checkpointed, [heads(), heads(), heads()]).replaced == {"attention": 1}


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    mask = CAUSAL["compared"](S) & keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, mask)


def test_padding_is_left() -> None:
    keep = torch.ones(2, S, dtype=torch.bool)
    assert calls_of_attention(padded, heads(), heads(), heads(), keep) == [(True, False)]


def fewer_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, mask)


def test_other_lengths_are_left() -> None:
    report = Report()
    rewritten(fewer_queries, report)(heads(length=4), heads(), heads())
    assert report.replaced == {}
    assert "not known to be equally many" in str(report)


def changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[0, 1] = True
    return F.scaled_dot_product_attention(q, k, v, mask)


def changed_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    with torch.no_grad():
        mask[0, 1] = True
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("fn", [changed, changed_elsewhere])
def test_mask_that_is_written_into(fn: Callable[..., Any]) -> None:
    args = heads(), heads(), heads()
    assert calls_of_attention(fn, *args) == [(True, False)]
    torch.testing.assert_close(rewritten(fn, Report())(*args), fn(*args), rtol=0, atol=0)


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mask = CAUSAL["compared"](S)
    return F.scaled_dot_product_attention(q, k, v, mask), mask.float()


def test_mask_that_is_returned() -> None:
    """It stays for who wants it."""
    assert require_equal(returned, [heads(), heads(), heads()]).replaced == {"attention": 1}


def repeated(x: Tensor) -> Tensor:
    b, n, s, d = x.shape
    return x[:, :, None, :, :].expand(b, n, 2, s, d).reshape(b, 2 * n, s, d)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(CAUSAL["compared"], q, repeated(k), repeated(v), scale=0.3)


def shared_by_interleaving(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("fn", [shared, shared_by_interleaving])
def test_repeated_heads(fn: Callable[..., Any]) -> None:
    """Keys and values are read where they are."""
    report, given = Report(), []

    def look(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                given.append(node.kwargs["enable_gqa"])
            assert "expand" not in str(node.target) or node.args[0] is None
            assert "repeat_interleave" not in str(node.target)

    args = heads(4), heads(), heads()
    rewritten(fn, report, look=look)(*args)
    assert given == [True]
    assert require_equal(fn, args).replaced == {"attention": 1}


def in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True)


def test_heads_in_another_order_are_left() -> None:
    report = Report()
    rewritten(in_another_order, report)(heads(4), heads(), heads())
    assert report.replaced == {}


MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 1},
    "Qwen3": {"num_hidden_layers": 1},
    "Gemma2": {"attn_logit_softcapping": None, "sliding_window": 16},
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", MODELS)
def test_models_of_transformers(family: str, dynamic: bool) -> None:
    """Every other layer of Gemma 2 has a window, which a length that is not known may exceed."""
    families = pytest.importorskip("compile_tests.helpers.families", exc_type=ImportError)
    model, ids = families.small_model(family, use_cache=False, **MODELS[family]), families.tokens(2, 12)
    report = Report()
    model.config._attn_implementation = "sdpa"
    original = copy.deepcopy(model)
    if dynamic:
        for axis in (0, 1):
            torch._dynamo.mark_dynamic(ids, axis)
    families.assert_same_training(model, original, run=rewritten(model, report), input_ids=ids)
    layers = model.config.num_hidden_layers
    assert report.replaced["attention"] == (1 if dynamic else layers), str(report)
