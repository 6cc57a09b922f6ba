"""The hybrid of examples/hybrid.py: both ways to write it are the recurrence of its formulas, and train the same."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.backend_checks import require_same, results
from compile_tests.helpers.scripts import run_script
from llmk.accuracy.neighbours import to_float64

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the example runs without interpreter"
)

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("hybrid")


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence as the formulas have it."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, out = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        missing = v[:, t] - (k[:, t, :, None] @ state).squeeze(-2)
        state = state + (beta[:, t, :, None] * k[:, t]).unsqueeze(-1) * missing.unsqueeze(-2)
        out.append((q[:, t, :, None] @ state).squeeze(-2) * k.shape[3] ** -0.5)
    return torch.stack(out, 1)


@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_delta_rule_is_the_recurrence(tokens: int, hybrid: Any) -> None:
    """The plain one in float64, up to that dtype's roundings; llmk's is as exact in float32 as the plain one."""
    q, k, v = (torch.randn(2, tokens, heads, 8) for heads in (2, 2, 4))
    inputs = [x.requires_grad_() for x in (q, k, v, -torch.rand(2, tokens, 4), torch.rand(2, tokens, 4))]
    in_float64 = (results(rule, inputs, to_float64) for rule in (hybrid.plain_delta_rule, token_by_token))
    for found, right in zip(*in_float64, strict=True):
        torch.testing.assert_close(found, right)
    by_dtype = {torch.float32: hybrid.plain_delta_rule, torch.float64: token_by_token}
    require_same(hybrid.delta_rule, lambda q, *rest: by_dtype[q.dtype](q, *rest), inputs)


def test_conv_and_gated_norm_agree(hybrid: Any) -> None:
    calls = {
        "conv": [torch.randn(2, 6, 9), torch.randn(6, 1, 4)],
        "gated_norm": [torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8), torch.randn(8)],
    }
    for name, inputs in calls.items():
        options = () if name == "conv" else (1e-5,)
        ours, plain = (getattr(hybrid.FUNCTIONS[kind], name) for kind in ("llmk", "plain"))
        require_same(ours, plain, [*(x.requires_grad_() for x in inputs), *options])


def test_three_recurrent_layers_to_one_of_attention(hybrid: Any) -> None:
    llama, config = importlib.import_module("llama"), hybrid.HybridConfig(64, 32, 64, 8, 2, 1)
    model = llama.Llama(config, hybrid.BLOCKS["llmk"], 8, **CPU)
    kinds = [type(layer.attention).__name__ for layer in model.layers]
    assert kinds == ["GatedDeltaNet", "GatedDeltaNet", "GatedDeltaNet", "Attention"] * 2
    rates = torch.nn.functional.softplus(model.layers[0].attention.decay_bias)
    torch.testing.assert_close(1 / rates, torch.tensor([4.0, 16.0, 64.0, 256.0]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_llmk_and_plain_agree(compiled: bool, hybrid: Any) -> None:
    """The plain one eager, as on a CPU `aot_eager` raises at strides of PyTorch's own softplus backward."""
    llama, config = importlib.import_module("llama"), hybrid.HybridConfig(64, 32, 64, 4, 2, 1)
    tokens = torch.randint(64, (2, 71), generator=torch.Generator().manual_seed(0))
    losses: dict[str, list[float]] = {}
    for name, blocks in hybrid.BLOCKS.items():
        model = llama.Llama(config, blocks, 70, **CPU)
        model.initialize(seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled and name == "llmk" else model
        for _ in range(4):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(name, []).append(loss.item())
    assert losses["llmk"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["llmk"][-1] < losses["llmk"][0] - 0.2


@pytest.mark.breadth
def test_preset_runs(tmp_path: Path) -> None:
    """Inductor compiles the preset, as in `make train`: minutes of a core."""
    done = run_script(
        EXAMPLES / "train.py", "--preset", "tiny-hybrid", "--device", "cpu", "--steps", 6, "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "\nequal within" in done.stdout
    assert max(map(len, done.stdout.replace(str(tmp_path), "runs").splitlines())) <= 80
    for run in json.loads((tmp_path / "run.json").read_text())["runs"].values():
        measured = run["measured"]
        assert (measured["graphs"], measured["graph_breaks"], measured["recompiles"]) == (1, 0, 0)
