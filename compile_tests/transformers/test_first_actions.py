"""A fresh model may begin with anything. `tools.first_actions_sweep` tries more families, in a process for each."""

import contextlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.breadth import some_of  # noqa: E402
from compile_tests.helpers.families import small_model, tokens  # noqa: E402
from compile_tests.helpers.first_actions import ACTIONS, NotRun, first_action  # noqa: E402

LATE = ("selective", "inference_mode", "fake tensors", "save and load", "FSDP2")
"""Actions of which each is of its kind: what is tried in a mixture's first call must not be seen by any of them."""
KEPT = [
    *[("Qwen3Moe", "patched", action) for action in ACTIONS],
    *[("Mixtral", "experts_implementation", action) for action in LATE],
    ("GptOss", "patched", "fake tensors"),
    *[("Gemma2", "patched", action) for action in ("selective", "autocast", "DDP")],
    *[("Llama", "backend", action) for action in ("checkpointed", "second thread")],
]
CASES = dict.fromkeys([
    *KEPT,
    *[("Mixtral", "experts_implementation", action) for action in ACTIONS if action != "compiled"],
    *[("GptOss", "patched", action) for action in ("checkpointed", "selective", "FSDP2")],
    *[("Gemma2", "patched", action) for action in ACTIONS if action != "compiled"],
])  # fmt: skip


pytestmark = [pytest.mark.usefixtures("on_device"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", some_of(CASES, KEPT), ids="-".join)
def test_any_action_may_come_first(case: tuple[str, str, str], device: torch.device) -> None:
    family, way, action = case
    if device.type != "cpu":
        pytest.skip("the groups of processes are gloo's")
    options = {"experts_implementation": "eager"} if way == "experts_implementation" else {}
    original, ids = small_model(family, use_cache=False, num_hidden_layers=1, **options), tokens(2, 9)
    with contextlib.suppress(NotRun):  # without llmk either; the step after it is right
        assert first_action(action, way, original, {"input_ids": ids, "labels": ids}) == ""
