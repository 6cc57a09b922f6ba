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
@pytest.mark.parametrize("name", some_of(LOSSES, ("dpo", "kto", "gspo", "distill_both_kinds", "distill_topk")))
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


def dpo(x: Tensor, w: Tensor, t: Tensor, **options: Any) -> Any:
    return losses.dpo(x, w, t, ref_logps=x[:, 0, 0], **options)


WRONG: list[tuple[str, Callable[[Tensor, Tensor, Tensor], Any]]] = [
    ("input: expected an even number", lambda x, w, t: losses.cpo(x[:3], w, t[:3])),
    ("ref_logps: expected .*or in their place ref_input and", lambda x, w, t: losses.dpo(x, w, t)),
    ("ref_linear_weight: .* where ref_logps is None", lambda x, w, t: losses.dpo(x, w, t, ref_input=x)),
    ("use_weighting: expected False with 'aot'", lambda *each: dpo(*each, loss_type="aot", use_weighting=True)),
    (
        "f_divergence_type: expected 'reverse_kl' with loss_type 'aot'",
        lambda *each: dpo(*each, loss_type="aot", f_divergence_type="forward_kl"),
    ),
    (
        "label_smoothing: expected a number from 0 to below 0.5 with loss_type 'robust', got 0.5",
        lambda *each: dpo(*each, loss_type="robust", label_smoothing=0.5),
    ),
    (
        "num_items_in_batch: expected None with use_weighting and 'sft'",
        lambda *each: dpo(*each, loss_type=["ipo", "sft"], use_weighting=True, num_items_in_batch=7),
    ),
    (
        "ref_per_token_logps: expected shape .* where beta is 0.1, got None",
        lambda x, w, t: losses.grpo(x, w, t, x[:, 0, 0], beta=0.1),
    ),
    (
        r"sequence_ids: expected input of shape \[1, T, H\]",
        lambda x, w, t: losses.orpo(x, w, t, sequence_ids=t, pair_order="interleaved"),
    ),
    (
        "max_completion_length: expected a number with 'dr_grpo'",
        lambda x, w, t: losses.grpo(x[:1], w, t[:1], x[:1, :, 0], sequence_ids=t[:1], loss_type="dr_grpo"),
    ),
    (
        "max_completion_length: expected a number with 'constant' and sequence_ids",
        lambda x, w, t: losses.reinforce(x[:1], w, t[:1], x[:1, :, 0], sequence_ids=t[:1], loss_agg="constant"),
    ),
    (
        "num_items_in_batch: expected 1, one for each of inputs, got 2",
        lambda x, w, t: losses.multi_token([x], w, [t], num_items_in_batch=[1.0, 2.0]),
    ),
]


@pytest.mark.parametrize(("message", "fn"), WRONG)
def test_errors_name_the_argument(message: str, fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=message):
        fn(*batch([3, 4, 2, 5], torch.device("cpu")))


def test_a_token_of_no_sequence_makes_the_loss_nan(device: torch.device) -> None:
    x, weight, target = batch([6], device)
    ids = torch.arange(target.numel(), device=device).view(1, -1) % 3
    advantages = torch.ones(2, device=device)
    assert losses.grpo(x, weight, target, advantages, sequence_ids=ids)[0].isnan()
    assert losses.grpo(x, weight, target.where(ids < 2, -100), advantages, sequence_ids=ids)[0].isfinite()
