"""Products that stop at a number of tokens that the device alone knows; here the interpreter is the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.chunked import _dynamic_rows, _linear, kept_rows
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        not INTERPRET, reason="on a CPU the host knows how many tokens count; interpreted it asks nobody"
    ),
]

N, H, V = 11, 16, LONGEST_SHORT + 13  # rows of fewer classes have kernels that leave nothing


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill what a product leaves unwritten past the count with NaN; give the counts of the chunks."""
    seen: list[int] = []

    def nan_filled(name: str) -> Any:
        product = getattr(_dynamic_rows, name)

        def run(a: Tensor, b: Tensor, end: Tensor) -> Tensor:
            result = product(a, b, end)
            result[int(end) :] = float("nan")
            seen.append(int(end))
            return result

        return run

    for name in ("outputs", "input_gradient"):
        monkeypatch.setattr(_linear, name, nan_filled(name))

    def float32_outputs(x: Tensor, weight: Tensor, end: Tensor, logits: Tensor) -> None:
        _dynamic_rows.float32_outputs(x, weight, end, logits)
        logits[int(end) :] = float("nan")
        seen.append(int(end))

    monkeypatch.setattr(_linear, "float32_outputs", float32_outputs)
    return seen


def inputs(features: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, features, dtype=torch.bfloat16), torch.randn(V, features, dtype=torch.bfloat16)


@pytest.mark.parametrize("counted", [0, 1, 7, N])
@pytest.mark.parametrize("chunk_size", [0, 4, 6])
@pytest.mark.parametrize("logits_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused_linear_ce", "linear_logprobs", "fused_linear_jsd"])
def test_nothing_past_the_count_is_read(
    name: str, logits_dtype: torch.dtype | None, chunk_size: int, counted: int, ends: list[int]
) -> None:
    target = torch.randint(0, V, (N,))
    target[torch.randperm(N)[counted:]] = -100
    kwargs: dict[str, Any] = {"skip_ignored": True, "chunk_size": chunk_size, "logits_dtype": logits_dtype}
    args: tuple[Tensor, ...] = (*inputs(H), target)
    if name == "fused_linear_jsd":
        args, kwargs = (*inputs(H), *inputs(24)), kwargs | {"labels": target}
    sample = Sample(args, kwargs, why=f"{counted} tokens count")
    require_accurate(OPS[name], sample, call(OPS[name], sample))
    kept = kept_rows(N, H, V, 4, chunk_size) if name == "linear_logprobs" and logits_dtype is None else 0
    first = min(chunk_size or N, kept or N)  # a block ends where the rows do whose logits are kept
    assert ends[0] == min(counted, first)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_bias_sums_no_row_past_the_count(reduction: str, ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    bias = torch.randn(V, dtype=torch.bfloat16)
    kwargs = {"linear_bias": bias, "skip_ignored": True, "reduction": reduction, "chunk_size": 4}
    sample = Sample((*inputs(H), target), kwargs, why="a bias")
    require_accurate(OPS["fused_linear_ce"], sample, call(OPS["fused_linear_ce"], sample))
    assert ends


def test_rows_that_do_not_fit_take_all_tokens(ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    sample = Sample((*inputs(H - 4), target), {"skip_ignored": True}, why="rows of 24 bytes")
    require_accurate(OPS["fused_linear_ce"], sample, call(OPS["fused_linear_ce"], sample))
    assert not ends


def test_a_weight_that_begins_between_aligned_addresses_takes_all_tokens(ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    x, weight = inputs(H)
    wide = torch.zeros(V, H + 8, dtype=torch.bfloat16)
    wide[:, 1 : H + 1] = weight
    skipped = torch.ops.llmk.fused_linear_ce(x, wide[:, 1 : H + 1], target, skip_ignored=True)
    assert not ends
    torch.ops.llmk.fused_linear_ce(x, weight, target, skip_ignored=True)
    assert ends
    assert skipped.isfinite()


G, S = 5, 3
"""Groups, and the tokens of a sequence."""
PAIRS: list[dict[str, Any]] = [
    {"loss_type": "sigmoid"},
    {"loss_type": "ipo+robust", "label_smoothing": 0.1, "linear_bias": torch.randn(V).bfloat16()},
    {"loss_type": "orpo", "softcap": 4.0, "logits_dtype": torch.bfloat16},
    {"loss_type": "sigmoid_norm", "f_divergence_type": "js_divergence"},
]
SEQUENCES: list[dict[str, Any]] = [
    {"importance_sampling_level": "sequence", "loss_type": "clipped"},
    {"importance_sampling_level": "sequence_sum", "loss_type": "cispo", "logits_dtype": torch.bfloat16},
    {"importance_sampling_level": "sequence", "loss_type": "gmpo", "use_bias_correction_kl": True},
]


def targets(*shape: int) -> Tensor:
    """Of the first group all count but one, of the second none, of the others some."""
    target = torch.randint(0, V, shape).view(shape[0], -1)
    kept = torch.rand(target.shape) < 0.6
    kept[0], kept[1], kept[2, 0] = True, False, True
    kept[0, 1] = False
    return target.masked_fill(~kept, -100).view(shape)


def of_pairs(options: dict[str, Any], chunk_size: int) -> Sample:
    shape, types = (G, 2, S), options["loss_type"].count("+") + 1
    weights = {name: torch.rand(shape) for name in ("token_weight", "nll_weight")}
    weights |= {
        "ref_logps": -6.0 * S + torch.randn(G, 2),
        "group_weight": torch.rand(types, G)[0 if types == 1 else ...],
    }
    x, weight = torch.randn(*shape, H).bfloat16(), torch.randn(V, H).bfloat16() / 4
    kwargs = {**weights, **options, "skip_ignored": True, "chunk_size": chunk_size}
    return Sample((x, weight, targets(*shape)), kwargs, why="pairs")


def of_sequences(options: dict[str, Any], chunk_size: int) -> Sample:
    x, weight, target = torch.randn(G, S, H).bfloat16(), torch.randn(V, H).bfloat16() / 4, targets(G, S)
    logps = (x.float() @ weight.float().t()).log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    near = {name: logps + 0.3 * torch.randn(G, S) for name in ("old_logps", "ref_logps")}
    given = {name: torch.rand(G, S) for name in ("token_weight", "kl_weight", "entropy_weight")}
    kwargs = {**near, **given, **options, "advantages": torch.randn(G, S), "skip_ignored": True}
    return Sample((x, weight, target), kwargs | {"chunk_size": chunk_size}, why="sequences")


GROUPS = [("fused_linear_preference", of_pairs, 2 * S, options) for options in PAIRS]
GROUPS += [("fused_linear_policy", of_sequences, S, options) for options in SEQUENCES]
groups = pytest.mark.parametrize(
    ("name", "make", "group", "options"), GROUPS, ids=[case[3]["loss_type"] for case in GROUPS]
)


@pytest.mark.parametrize("each", [0, 1, 2])
@groups
def test_a_chunk_of_whole_groups_has_its_own_count(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], each: int, ends: list[int]
) -> None:
    """Logits are made once, in a chunk of `each` groups or of all, and one product by one makes the gradients."""
    sample = make(options, each * group + (each > 0))
    counts = [int(chunk.sum()) for chunk in (sample.args[2] != -100).view(G, -1).split(each or G)]
    assert each != 1 or counts[1] == 0
    with FlopCounterMode(display=False) as counter:
        found = call(OPS[name], sample)
    assert ends == [count for count in counts for _ in ("logits", "dx")]
    assert counter.get_total_flops() == 3 * 2 * G * group * H * V
    require_accurate(OPS[name], sample, found)


@groups
def test_a_group_that_no_chunk_holds_is_skipped_over_the_batch(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], ends: list[int]
) -> None:
    sample = make(options, 2)
    require_accurate(OPS[name], sample, call(OPS[name], sample))
    total = int((sample.args[2] != -100).sum())
    starts = range(0, G * group, 2)
    assert ends[: len(starts)] == [min(max(total - start, 0), min(2, G * group - start)) for start in starts]


@pytest.mark.parametrize("dynamic", [False, True])
@groups
def test_compiled_groups(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], dynamic: bool, ends: list[int]
) -> None:
    torch._dynamo.reset()
    op, sample = OPS[name], make(options, 2 * group)
    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, dynamic=dynamic)
    require_accurate(op, sample, call(op, sample, fn=fn))
    assert len(ends) == 2 * 3


@groups
def test_loss_without_gradients(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], ends: list[int]
) -> None:
    """One product of each chunk, with the same results."""
    sample = make(options, 2 * group)
    wanted, _, _ = OPS[name].overload(
        *(each.requires_grad_(each.is_floating_point()) for each in sample.args), **sample.kwargs
    )
    ends.clear()
    with torch.no_grad():
        found, _, _ = OPS[name].overload(*sample.args, **sample.kwargs)
    assert len(ends) == 3
    assert torch.equal(found, wanted)
