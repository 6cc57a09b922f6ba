"""Attention whose mask hides the future alone: found in every spelling, and nothing else taken for it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compile_tests.helpers.backend_checks import require_equal, results, rewritten
from compile_tests.helpers.breadth import some_of
from compile_tests.spellings.masks import CAUSAL, LOWEST, OTHERS, positions
from llmk.compiler import Report
from llmk.compiler.size_tensors import NEVER

S = 6


def attention(mask: Callable[[int], Tensor] | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask and mask(q.shape[2]), **options)


def heads(count: int = 2, length: int = S) -> Tensor:
    return torch.randn(2, count, length, 8, generator=torch.Generator().manual_seed(count)).requires_grad_()


class Calls(list[tuple[bool, bool]]):
    """For each call of attention that a graph has whether it has a mask, and is_causal."""

    def look(self, gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                given = dict(zip(("query", "key", "value", "mask", "dropout", "causal"), node.args, strict=False))
                given |= node.kwargs
                masked = given.get("mask", given.get("attn_mask")) is not None
                self.append((masked, bool(given.get("causal", given.get("is_causal", False)))))


def calls_of_attention(fn: Callable[..., Any], *args: Any) -> list[tuple[bool, bool]]:
    found = Calls()
    rewritten(fn, Report(), look=found.look)(*args)
    return found


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_mask(name: str) -> None:
    found = Calls()
    report = require_equal(attention, [CAUSAL[name], heads(), heads(), heads()], look=found.look)
    assert report.replaced == {"attention": 1}, str(report)
    assert found == [(False, True)]


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_left(name: str) -> None:
    args = OTHERS[name], heads(), heads(), heads()
    report = Report()
    got = results(rewritten(attention, report), args)
    assert report.replaced == {}
    assert len(report.left) == 1, str(report)
    for x, y in zip(got, results(attention, args), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


LONG: dict[str, Callable[[int, int], Tensor]] = {
    "window of 40": lambda rows, n: CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - 40),
    "window of 5000": lambda rows, n: CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - 5000),
    "window of 8 times 8": lambda rows, n: (
        CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - torch.full((), 8) * 8)
    ),
    "window of 30 and 30": lambda rows, n: CAUSAL["compared"](n) & (positions(n)[1] + 30 > positions(n)[0] - 30),
    "the whole text from token 100 on": lambda rows, n: CAUSAL["compared"](n) | (positions(n)[0] >= 100),
    "window of half of the text": lambda rows, n: CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - n // 2),
    "hidden but the last 40": lambda rows, n: CAUSAL["compared"](n) & (positions(n)[1] >= n - 40),
    "hidden at first": lambda rows, n: CAUSAL["compared"](n) & (positions(n)[1] >= n // 64),
    "positions in 8 bits": lambda rows, n: positions(n)[1].to(torch.int8) <= positions(n)[0].to(torch.int8),
    "positions in bfloat16": lambda rows, n: positions(n)[1].to(torch.bfloat16) <= positions(n)[0].to(torch.bfloat16),
    "the whole text in later rows": lambda rows, n: (
        CAUSAL["compared"](n) | (torch.arange(rows)[:, None, None, None] >= 50)
    ),
    "window as long as there are rows": lambda rows, n: (
        CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - rows)
    ),
    "dropped": lambda rows, n: CAUSAL["compared"](n) & (torch.rand(n, n) < 1.0),
}
"""Masks of rows and tokens that hide what comes after a token while there are few, and something else then."""


@pytest.mark.parametrize("name", LONG)
def test_masks_that_change_in_longer_texts_are_left(name: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, LONG[name](q.shape[0], q.shape[2]))

    args = [heads(), heads(), heads()]
    for x in args:
        for axis in (0, 2):
            torch._dynamo.maybe_mark_dynamic(x, axis)
    assert calls_of_attention(attend, *args) == [(True, False)]


WINDOWS = {"wide window": 8, "long window": 32768}
LENGTHS = {"short": 200, "long": 2100, "any length": None}
"""The masks of a long text are larger than those that the backend computes."""
AT_LENGTHS = [(name, size) for size in LENGTHS for name in (*CAUSAL, "long window")]
FEW = (*WINDOWS, "tril", "compared", "packed")
"""Masks in a long text, where each is found as at any length; `test_causal_mask` has a short text of all."""
KEPT = [
    (name, size) for name, size in AT_LENGTHS if size == "any length" or name in (FEW if size == "long" else WINDOWS)
]


@pytest.mark.parametrize("case", some_of(AT_LENGTHS, KEPT), ids="-".join)
def test_causal_masks_of_any_length(case: tuple[str, str]) -> None:
    """They are found at their own size, at others in its place, and where the size is a symbol."""
    name, length = case[0], LENGTHS[case[1]]
    wanted = name not in WINDOWS or WINDOWS[name] >= (length or NEVER)

    def masked(n: int) -> Tensor:
        q, k = positions(n)
        return (k > q - WINDOWS[name]) & (k <= q) if name in WINDOWS else CAUSAL[name](n)

    args = [heads(length=length or S) for _ in range(3)]
    for x in args if length is None else ():
        torch._dynamo.mark_dynamic(x, 2)
    with torch.no_grad():
        assert calls_of_attention(attention, masked, *args) == [(not wanted, wanted)]


def given_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    n = q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - window))


def test_window_that_is_an_argument() -> None:
    """A number that Dynamo has seen change is a symbol, and wide only in this call."""
    run, seen = rewritten(given_window, Report()), []
    for window in (100, 200, 3):
        args = heads(), heads(), heads()
        seen.append(run(*args, window) - given_window(*args, window))
    torch.testing.assert_close(torch.stack(seen), torch.zeros(3, *seen[0].shape))


def given_number(q: Tensor, k: Tensor, v: Tensor, number: float) -> Tensor:
    n = q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, torch.full((n, n), number).triu(1))


def test_number_that_is_an_argument() -> None:
    run, args = rewritten(given_number, Report()), (heads(), heads(), heads())
    for number in (-1.0, LOWEST, -2.0):
        torch.testing.assert_close(run(*args, number), given_number(*args, number))


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, torch.arange(1000)[:n] <= torch.arange(1000)[:n, None])


def test_mask_that_ends() -> None:
    """No length is tried that the graph does not take."""
    args = [heads(), heads(), heads()]
    for x in args:
        torch._dynamo.mark_dynamic(x, 2)
    assert calls_of_attention(sliced, *args) == [(False, True)]


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


def padded_elsewhere(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    mask = CAUSAL["compared"](S) & ~pad[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("fn", [padded, padded_elsewhere])
def test_padding_is_left(fn: Callable[..., Any]) -> None:
    """A mask of True is left as one of False is: no number stands for what is in a tensor."""
    assert calls_of_attention(fn, heads(), heads(), heads(), torch.ones(2, S, dtype=torch.bool)) == [(True, False)]


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
@pytest.mark.parametrize("family", some_of(MODELS, ["Gemma2"]))
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
