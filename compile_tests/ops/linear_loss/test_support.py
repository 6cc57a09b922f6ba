"""Supports: softmaxes over the classes that a sampler kept, against float64 over each token's own list of classes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compile_tests.helpers.right_calls import require_call
from llmk.nn import LinearLogProbs
from llmk.ops.linear_loss._records import Make, linear_reference
from llmk.ops.linear_loss.rows.support import MOST_SUPPORT
from llmk.registry import OPS, Op, Sample
from llmk.registry.devices import INTERPRET

H, V, L = 8, 37, 7


def by_lists(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, support: Tensor, linear_bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    logits_dtype: torch.dtype | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and entropies, a token at a time, over the set of the classes in its list."""
    logits = linear_reference(input, linear_weight, linear_bias, logits_dtype)
    logits = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    logprobs, entropies = [], []
    for row, label, ids in zip(logits, target.tolist(), support.tolist(), strict=True):
        classes = sorted({index for index in ids if index >= 0}) or list(range(row.numel()))
        scores = row[classes].log_softmax(-1)
        counts = label != ignore_index
        logprobs.append(scores[classes.index(label)] if counts else 0 * row[0])
        entropies.append(-(scores.exp() * scores).sum() if counts else 0 * row[0])
    return torch.stack(logprobs), torch.stack(entropies)


def replay(
    tokens: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", **options: Any
) -> Sample:
    """Supports with a repeated id and padding, one without ids, and every fourth token ignored."""
    make = Make(torch.device(device), dtype)
    target = make.classes(V, tokens, ignore_index=options.get("ignore_index", -100))
    options["support"] = make.support(target.unsqueeze(-1), V, L)
    return Sample((make.randn(tokens, H), make.randn(V, H), target), options, why="replay")


def require(sample: Sample, reference: Any = by_lists, name: str = "linear_logprobs") -> None:
    op = replace(OPS[name], reference=reference)
    require_call(op, sample)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk_size": 4},
    {"logits_dtype": torch.bfloat16},
    {"skip_ignored": True, "chunk_size": 4},
    {"temperature": 0.7, "logit_scale": 0.5, "softcap": 4.0, "ignore_index": 5},
]


@pytest.mark.parametrize(
    ("tokens", "options"),
    [*((6, options) for options in OPTIONS), (33, OPTIONS[0])],
    ids=str,
)
@pytest.mark.kernels
def test_values_and_gradients(tokens: int, options: dict[str, Any], device: torch.device) -> None:
    require(replay(tokens, torch.bfloat16, device, **options))


@pytest.mark.parametrize("ids", [1, 300])
@pytest.mark.kernels
def test_one_id_and_many(ids: int, device: torch.device) -> None:
    target = torch.randint(0, 500, (5,), device=device)
    support = torch.randint(0, 500, (5, ids), device=device).int()
    support[:, -1] = target
    sample = Sample(
        (torch.randn(5, H, device=device), torch.randn(500, H, device=device), target), {"support": support}
    )
    require(sample)
    if ids == 1:
        assert not torch.ops.llmk.linear_logprobs(*sample.args, support=support)[1].any()


@pytest.mark.kernels
def test_all_classes_are_the_plain_softmax(device: torch.device) -> None:
    sample = replay(9, torch.bfloat16, device)
    everything = torch.stack([torch.randperm(V) for _ in range(9)]).to(device)
    plain = lambda *args, support, **options: OPS["linear_logprobs"].reference(*args, **options)  # noqa: E731
    for support in (everything, torch.full_like(everything, -1)):  # and without ids
        require(replace(sample, kwargs={"support": support}), plain)


@pytest.mark.kernels
def test_a_target_outside_of_its_support(device: torch.device) -> None:
    """It has no probability; the gradient of the others is that of a sum with it at -inf."""
    sample = replay(9, device=device)
    x, weight, target = sample.args
    support = torch.full((9, 3), 2, device=device)
    target.fill_(0)
    target[4], support[4] = 7, torch.tensor([7, 2, 3])
    x.requires_grad_()
    logprobs, entropy = torch.ops.llmk.linear_logprobs(x, weight, target, support=support)
    assert (logprobs == float("-inf")).tolist() == [i != 4 for i in range(9)]
    assert entropy.isfinite().all()
    loss, returned, _ = torch.ops.llmk.fused_linear_policy(x, weight, target, loss_type="reinforce", support=support)
    torch.testing.assert_close((loss, returned), (-logprobs[4], logprobs), rtol=0, atol=0)  # it has no part in a loss
    by_module = LinearLogProbs()(x, weight, target, support=support)
    torch.testing.assert_close(by_module, (logprobs, entropy), rtol=0, atol=0)
    (dx,) = torch.autograd.grad(logprobs.sum(), x)
    own = F.one_hot(torch.tensor(2), V).float().to(device)
    torch.testing.assert_close(dx[:4], (-own @ weight).expand(4, H))


@pytest.mark.kernels
def test_an_id_past_the_last_class(device: torch.device) -> None:
    """It raises on a CPU; kernels read nothing there, and make NaN of the token's results and gradient alone."""
    x, weight, target = replay(6, device=device).args
    support = target.clamp(min=0).unsqueeze(-1).repeat(1, 4)
    support[1, 2] = V
    x.requires_grad_()
    if device.type == "cpu" and not INTERPRET:
        with pytest.raises(IndexError, match=rf"support: expected class indices below {V}, .* got {V}"):
            torch.ops.llmk.linear_logprobs(x, weight, target, support=support)
        return
    logprobs, entropy = torch.ops.llmk.linear_logprobs(x, weight, target, support=support)
    (dx,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), x)
    for results in (logprobs, entropy, dx.sum(-1)):
        assert results.isnan().tolist() == [i == 1 for i in range(6)]


def test_one_graph_for_any_number_of_tokens_and_ids() -> None:
    def step(x: Tensor, weight: Tensor, target: Tensor, support: Tensor) -> Tensor:
        logprobs, entropy = torch.ops.llmk.linear_logprobs(x, weight, target, support=support)
        ones = torch.ones_like(logprobs)
        policy = torch.ops.llmk.fused_linear_policy(x, weight, target, advantages=ones, support=support)[0]
        return logprobs.square().sum() + entropy.sum() + policy

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens, ids in ((10, 7), (20, 9), (70, 12)):
        sample = replay(tokens)
        x, weight, target = sample.args
        support, inputs = F.pad(sample.kwargs["support"], (0, ids - L), value=-1), (x, weight)
        for tensor in inputs:
            tensor.requires_grad_()
        found, wanted = (
            torch.autograd.grad(function(x, weight, target, support), inputs) for function in (compiled, step)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("support", "error", "message"),
    [
        (torch.zeros(5, 0, dtype=torch.int64), ValueError, r"support: expected shape .* got \(5, 0\)"),
        (torch.zeros(5, MOST_SUPPORT + 1, dtype=torch.int64), ValueError, "support: expected shape"),
    ],
)
@pytest.mark.parametrize("name", ["linear_logprobs", "fused_linear_policy"])
def test_refusals(name: str, support: Tensor, error: type[Exception], message: str) -> None:
    x, weight, target = replay(5).args
    op: Op = OPS[name]
    with pytest.raises(error, match=message):
        op.overload(x, weight, target, support=support)
