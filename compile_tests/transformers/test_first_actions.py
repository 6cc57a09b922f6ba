"""A fresh model may begin with anything. `tools.first_actions_sweep` tries more families, in a process for each."""

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.families import small_model, tokens  # noqa: E402
from compile_tests.helpers.first_actions import ACTIONS, NotRun, first_action  # noqa: E402

CASES = [
    *[("Qwen3Moe", "patched", action) for action in ACTIONS],
    *[("Mixtral", "experts_implementation", action) for action in ACTIONS if action != "compiled"],
    *[("GptOss", "patched", action) for action in ("checkpointed", "selective", "fake tensors", "FSDP2")],
    *[("Gemma2", "patched", action) for action in ACTIONS if action != "compiled"],
    *[("Llama", "backend", action) for action in ("checkpointed", "second thread")],
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        yield


@pytest.mark.parametrize(("family", "way", "action"), CASES)
def test_any_action_may_come_first(family: str, way: str, action: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the groups of processes are gloo's")
    options = {"experts_implementation": "eager"} if way == "experts_implementation" else {}
    original, ids = small_model(family, use_cache=False, num_hidden_layers=1, **options), tokens(2, 9)
    with contextlib.suppress(NotRun):  # without llmk either; the step after it is right
        assert first_action(action, way, original, {"input_ids": ids, "labels": ids}) == ""
