"""Promises of every function of `llmk.losses`: one graph, finite gradients, the right errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map

from compile_tests.helpers.breadth import some_of
from compile_tests.helpers.loss_calls import LOSSES, given, gradients
from compile_tests.helpers.loss_references import batch
from llmk import losses

SHAPES = [[3, 4, 2, 5], [9, 8, 1, 2, 3, 4], [2, 2, 0, 1], [1, 0, 3, 4, 5, 6, 7, 8], [12, 0, 11, 3, 1, 1]]
"""Lengths of sequences, of five batches."""


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("name", some_of(LOSSES, ("sft", "dpo", "kto", "gspo", "distill_both_kinds", "distill_topk")))
def test_one_graph_for_all_sizes(device: torch.device, name: str) -> None:
    torch._dynamo.reset()
    # One through Inductor; the others are only traced, forward and backward.
    counter = CompileCounterWithBackend("inductor" if name == "kto" else "aot_eager")
    fn = LOSSES[name][0]
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for lengths in SHAPES:
        args = given(name, lengths, device)
        for eager, ours in zip(gradients(fn, *args), gradients(compiled, *args), strict=True):
            torch.testing.assert_close(ours, eager)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1, graphs


def _chosen(tensor: Any, sizes: tuple[int, int], index: tuple[Tensor, Tensor]) -> Any:
    """The tensor at some of its sequences and tokens, which its axes of these sizes are."""
    if isinstance(tensor, Tensor):
        for size, places in zip(sizes, index, strict=True):
            for dim in (dim for dim, other in enumerate(tensor.shape) if other == size):
                tensor = tensor.index_select(dim, places)
    return tensor


@pytest.mark.parametrize("name", some_of([name for name in LOSSES if name != "dpo_types"], ("kto", "distill_topk")))
def test_numbers_of_sequences_and_tokens_that_data_decides(device: torch.device, name: str) -> None:
    """One graph, which does not ask for them. PyTorch's gradient of logsigmoid, which a type of `dpo` takes, asks."""
    B, S = 6, 11
    fn, (inputs, others) = LOSSES[name][0], given(name, [S] * B, device)

    def of_those(mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        pairs, tokens = mask[0, : B // 2].nonzero().squeeze(-1), mask[0].nonzero().squeeze(-1)
        index = torch.cat([pairs, pairs + B // 2]), tokens
        args, kwargs = tree_map(lambda x: _chosen(x, (B, S), index), (args, kwargs))
        return fn(*args, **kwargs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = partial(torch.compile(of_those, fullgraph=True, backend="aot_eager"), inputs[2] == inputs[2])
        for eager, ours in zip(gradients(fn, inputs, others), gradients(compiled, inputs, others), strict=True):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_sequence_leaves_the_others_finite(device: torch.device, name: str) -> None:
    for lengths in ([4, 0, 3, 2], [0, 0], [0, 3], [3, 0], [0, 0, 0, 0]):
        inputs, others = given(name, lengths, device)
        loss, dx, dw = gradients(LOSSES[name][0], inputs, others)
        assert loss.isfinite(), lengths
        assert dx.isfinite().all(), lengths
        assert dw.isfinite().all(), lengths
        assert not dx[inputs[2] == -100].any(), lengths
        if not any(lengths):  # no metric of a mean is NaN either
            x, weight, target = inputs
            _, metrics = LOSSES[name][0](x.requires_grad_(), weight.requires_grad_(), target, **others)
            assert all(value.isfinite() for value in metrics.values()), lengths


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"dft"}))  # whose gradient is that of another: below
def test_gradient_is_the_slope(device: torch.device, name: str) -> None:
    """Along a direction, from finite differences: their error is what another step changes, and rounding."""
    (x, weight, target), others = given(name, [3, 4, 2, 5], device)
    # Drawn on a CPU: along some directions the slope is so small that it would be lost in rounding.
    ways, fn = [torch.randn(of.shape, device="cpu").to(device) for of in (x, weight)], LOSSES[name][0]
    loss, *slopes = gradients(fn, (x, weight, target), others)
    slope = sum(float((way * of).sum()) for way, of in zip(ways, slopes, strict=True))

    def difference(step: float) -> float:
        ahead, behind = (fn(x + s * ways[0], weight + s * ways[1], target, **others)[0] for s in (step, -step))
        return float(ahead.double() - behind.double()) / (2 * step)

    step = 2.0**-8
    rounding = 64 * torch.finfo(torch.float32).eps * (1 + float(loss.abs())) / step
    assert abs(slope) > 2 * rounding
    assert abs(difference(step) - slope) <= abs(difference(2 * step) - difference(step)) + rounding


def test_dft_is_sft_with_probabilities(device: torch.device) -> None:
    """The probabilities are weights that are constant."""
    x, weight, target = batch([3, 4, 2, 5], device)
    scores = torch.nn.functional.linear(x, weight).softmax(-1)
    of_tokens = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    wanted = gradients(losses.sft, (x, weight, target), {"token_weights": of_tokens})
    for ours, theirs in zip(gradients(losses.dft, (x, weight, target), {}), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


WRONG: list[tuple[str, type[Exception], str, Callable[[Tensor, Tensor, Tensor], Any]]] = [
    (
        "no batch",
        ValueError,
        r"input: expected shape \[B, S, H\], got \(4,",
        lambda x, w, t: losses.orpo(x[:, 0], w, t),
    ),
    (
        "advantages",
        ValueError,
        r"advantages: expected shape \(4,\) \(one for each sequence\) or \(4, 7\) \(that of target\), got \(4, 2\)",
        lambda x, w, t: losses.grpo(x, w, t, x[:, :2, 0]),
    ),
    ("odd", ValueError, "input: expected an even number", lambda x, w, t: losses.cpo(x[:3], w, t[:3])),
    (
        "no reference",
        ValueError,
        "ref_logps: expected log-probabilities of the reference model.*or in their place ref_input and",
        lambda x, w, t: losses.dpo(x, w, t),
    ),
    (
        "half a reference",
        ValueError,
        "ref_linear_weight: expected a tensor where ref_logps is None",
        lambda x, w, t: losses.dpo(x, w, t, ref_input=x),
    ),
    (
        "sorted",
        ValueError,
        "use_weighting: expected False with 'aot'",
        lambda x, w, t: losses.dpo(x, w, t, ref_logps=x[:, 0, 0], loss_type="aot", use_weighting=True),
    ),
    (
        "divergence",
        ValueError,
        "f_divergence_type: expected 'reverse_kl' with loss_type 'aot'",
        lambda x, w, t: losses.dpo(x, w, t, ref_logps=x[:, 0, 0], loss_type="aot", f_divergence_type="forward_kl"),
    ),
    (
        "smoothing",
        ValueError,
        "label_smoothing: expected a number from 0 to below 0.5 with loss_type 'robust', got 0.5",
        lambda x, w, t: losses.dpo(x, w, t, ref_logps=x[:, 0, 0], loss_type="robust", label_smoothing=0.5),
    ),
    (
        "kl",
        ValueError,
        "ref_per_token_logps: expected shape .* where beta is 0.1, got None",
        lambda x, w, t: losses.grpo(x, w, t, x[:, 0, 0], beta=0.1),
    ),
    (
        "ids",
        ValueError,
        r"sequence_ids: expected input of shape \[1, T, H\]",
        lambda x, w, t: losses.orpo(x, w, t, sequence_ids=t, pair_order="interleaved"),
    ),
    (
        "length",
        ValueError,
        "max_completion_length: expected a number with 'dr_grpo'",
        lambda x, w, t: losses.grpo(x[:1], w, t[:1], x[:1, :, 0], sequence_ids=t[:1], loss_type="dr_grpo"),
    ),
    (
        "items of heads",
        ValueError,
        "num_items_in_batch: expected 1, one for each of inputs, got 2",
        lambda x, w, t: losses.multi_token([x], w, [t], num_items_in_batch=[1.0, 2.0]),
    ),
    (
        "a product of means",
        ValueError,
        "num_items_in_batch: expected None with use_weighting and 'sft'",
        lambda x, w, t: losses.dpo(
            x, w, t, ref_logps=x[:, 0, 0], loss_type=["ipo", "sft"], use_weighting=True, num_items_in_batch=7
        ),
    ),
    (
        "length of a packed batch",
        ValueError,
        "max_completion_length: expected a number with 'constant' and sequence_ids",
        lambda x, w, t: losses.reinforce(x[:1], w, t[:1], x[:1, :, 0], sequence_ids=t[:1], loss_agg="constant"),
    ),
    *(
        (
            f"bound of {fn.__name__}",
            ValueError,
            f"max_log_ratio: expected a finite positive number, got {bound}",
            lambda x, w, t, fn=fn, bound=bound: fn(x, w, t, x[:, 0, 0], max_log_ratio=bound),
        )
        for fn, bound in ((losses.grpo, 0.0), (losses.ppo, float("inf")), (losses.rloo, -1.0))
    ),
]


@pytest.mark.parametrize(("error", "message", "fn"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_errors_name_the_argument(error: type[Exception], message: str, fn: Callable[..., Any]) -> None:
    with pytest.raises(error, match=message):
        fn(*batch([3, 4, 2, 5], torch.device("cpu")))


def test_a_token_of_no_sequence_makes_the_loss_nan(device: torch.device) -> None:
    x, weight, target = batch([6], device)
    ids = torch.arange(target.numel(), device=device).view(1, -1) % 3
    advantages = torch.ones(2, device=device)
    assert losses.grpo(x, weight, target, advantages, sequence_ids=ids)[0].isnan()
    assert losses.grpo(x, weight, target.where(ids < 2, -100), advantages, sequence_ids=ids)[0].isfinite()
