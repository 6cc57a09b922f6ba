"""Products that stop at a number of tokens that the device alone knows; here the interpreter is the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.helpers.right_calls import require_call
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.rows import products
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        not INTERPRET, reason="on a CPU the host knows how many tokens count; interpreted it asks nobody"
    ),
]

N, H, V = 11, 16, 45


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill exponentials and scaled rows with NaN before they are made; give the counts of the chunks.

    Products read blocks of rows: past the count, what is made there is 0 in both.
    """
    seen: list[int] = []
    launch_logits, scale_rows = products.launch_logits, products.scale_rows

    def logits(rows: Any, weights: Any, p: Tensor | None, parts: Tensor | None = None, **options: Any) -> None:
        if p is not None and options.get("place") is None:
            p.fill_(float("nan"))
        launch_logits(rows, weights, p, parts, **options)
        if parts is not None and options.get("place") is None:  # the pass that makes statistics of all rows
            parts[..., int(rows.end) :] = float("nan")
            seen.append(int(rows.end))

    def scaled_rows(rows: Any, p: Tensor, scaled: Tensor, *args: Any) -> None:
        scaled.fill_(float("nan"))
        scale_rows(rows, p, scaled, *args)

    monkeypatch.setattr(products, "launch_logits", logits)
    monkeypatch.setattr(products, "scale_rows", scaled_rows)
    return seen


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(N, H, dtype=torch.bfloat16), torch.randn(V, H, dtype=torch.bfloat16)


def chunk_counts(counted: int, chunk_size: int) -> list[int]:
    size = chunk_size or N
    return [min(max(counted - start, 0), size, N - start) for start in range(0, N, size)]


@pytest.mark.parametrize("counted", [0, 1, 7, N])
@pytest.mark.parametrize("chunk_size", [0, 4])
@pytest.mark.parametrize("name", ["fused_linear_ce", "linear_logprobs"])
def test_nothing_past_the_count_is_read(name: str, chunk_size: int, counted: int, ends: list[int]) -> None:
    """Neither are hidden states of tokens that do not count."""
    (x, weight), target = inputs(), torch.randint(0, V, (N,))
    ignored = torch.randperm(N)[counted:]
    target[ignored] = -100
    sample = Sample((x, weight, target), {"skip_ignored": True, "chunk_size": chunk_size}, why=f"{counted} count")
    require_call(OPS[name], sample)
    assert ends == chunk_counts(counted, chunk_size)
    spoiled = x.clone()
    spoiled[ignored] = float("nan")
    same = call(OPS[name], Sample((spoiled, weight, target), sample.kwargs, why="NaN where nothing counts"))
    for found, wanted in zip(same.gradients.values(), call(OPS[name], sample).gradients.values(), strict=True):
        assert found is not None
        assert wanted is not None
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["fused_linear_ce", "linear_logprobs"])
def test_blocks_of_many_tokens_stop_where_logits_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no tile of logits has written is in no gradient: here it is NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        target = torch.randint(0, V, (384,)).masked_fill(torch.arange(384) % 4 == 0, -100)
        x, weight = torch.randn(384, H, dtype=torch.bfloat16), torch.randn(V, H, dtype=torch.bfloat16)
        sample = Sample((x, weight, target), {}, why="384 tokens, every fourth ignored")
        require_call(OPS[name], sample)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"softcap": 3.0}, {"label_smoothing": 0.1}], ids=str)
def test_a_bias_sums_no_row_past_the_count(options: dict[str, Any], ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    bias = torch.randn(V, dtype=torch.bfloat16)
    kwargs = {"linear_bias": bias, "skip_ignored": True, "chunk_size": 4, **options}
    sample = Sample((*inputs(), target), kwargs, why="a bias")
    require_call(OPS["fused_linear_ce"], sample)
    assert ends == chunk_counts(7, 4)


def unaligned(matrix: Tensor) -> Tensor:
    """The same numbers between aligned addresses, in rows of an odd number of bytes."""
    wide = torch.zeros(len(matrix), matrix.shape[1] + 3, dtype=matrix.dtype)
    wide[:, 1:-2] = matrix
    return wide[:, 1:-2]


def test_operands_that_no_descriptor_reads_stop_at_the_count_too(ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    x, weight = inputs()
    losses = [
        torch.ops.llmk.fused_linear_ce(*args, target, skip_ignored=True)
        for args in ((x, weight), (unaligned(x), weight), (x, unaligned(weight)))
    ]
    assert ends == [7] * 3
    assert torch.equal(losses[1], losses[0])
    assert torch.equal(losses[2], losses[0])


@pytest.fixture
def ends_of_logits(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill the logits past the count with NaN too; give the counts of the blocks."""
    seen: list[int] = []
    launch_logits = products.launch_logits

    def logits(rows: Any, weights: Any, p: Tensor | None, parts: Tensor | None = None, **options: Any) -> None:
        launch_logits(rows, weights, p, parts, **options)
        if p is not None and options.get("logits"):
            p[int(rows.end) :] = float("nan")
            seen.append(int(rows.end))

    monkeypatch.setattr(products, "launch_logits", logits)
    return seen


@pytest.mark.parametrize("counted", [0, 7])
@pytest.mark.parametrize("aligned", [True, False])
def test_divergences_read_nothing_past_the_count(aligned: bool, counted: int, ends_of_logits: list[int]) -> None:
    """Whether descriptors read the rows or pointers."""
    classes, features = LONGEST_SHORT + 13, H if aligned else H - 4  # rows of fewer classes leave nothing
    student, teacher = ((torch.randn(N, h).bfloat16(), torch.randn(classes, h).bfloat16()) for h in (features, 24))
    labels = torch.randint(0, classes, (N,))
    labels[torch.randperm(N)[counted:]] = -100
    sample = Sample(
        (*student, *teacher), {"skip_ignored": True, "chunk_size": 6, "labels": labels}, why=f"{counted} count"
    )
    require_call(OPS["fused_linear_jsd"], sample)
    assert ends_of_logits[:4] == [end for end in chunk_counts(counted, 6) for _ in ("student", "teacher")]


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
    """Make targets of which all of the first group count but one, none of the second, and some of the others."""
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
IDS, EACH = [case[3]["loss_type"] for case in GROUPS], ("name", "make", "group", "options")
groups = pytest.mark.parametrize(EACH, GROUPS, ids=IDS)
COMPILED = ("ipo+robust", "clipped")
"""One of pairs and one of sequences; what differs between the others is computed by the same kernels."""
some_groups = pytest.mark.parametrize(
    EACH,
    [
        pytest.param(*case, marks=() if name in COMPILED else pytest.mark.breadth, id=name)
        for name, case in zip(IDS, GROUPS, strict=True)
    ],
)


@pytest.mark.parametrize("each", [0, 1, 2])
@groups
def test_a_chunk_of_whole_groups_has_its_own_count(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], each: int, ends: list[int]
) -> None:
    """Logits are made once, in a chunk of `each` groups or of all, and one product by one makes the gradients.

    In 16 bits those of a policy are made again, for the gradient of its entropies.
    """
    sample = make(options, each * group + (each > 0))
    counts = [int(chunk.sum()) for chunk in (sample.args[2] != -100).view(G, -1).split(each or G)]
    assert each != 1 or counts[1] == 0
    with FlopCounterMode(display=False) as counter:
        found = call(OPS[name], sample)
    assert ends == counts
    assert counter.get_total_flops() == (3 + ("entropy_weight" in sample.kwargs)) * 2 * G * group * H * V
    require_accurate(OPS[name], sample, found)


@groups
def test_a_group_that_no_chunk_holds_is_skipped_over_the_batch(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], ends: list[int]
) -> None:
    sample = make(options, 2)
    require_call(OPS[name], sample)
    total = int((sample.args[2] != -100).sum())
    starts = range(0, G * group, 2)
    assert ends == [min(max(total - start, 0), min(2, G * group - start)) for start in starts]


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("dynamic", [False, True])
@some_groups
def test_compiled_groups(
    name: str, make: Callable[..., Sample], group: int, options: dict[str, Any], dynamic: bool, ends: list[int]
) -> None:
    torch._dynamo.reset()
    op, sample = OPS[name], make(options, 2 * group)
    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, dynamic=dynamic)
    require_call(op, sample, fn=fn)
    assert len(ends) == 3


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
