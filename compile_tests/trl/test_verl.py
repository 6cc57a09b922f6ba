"""`llmk.verl`: verl's own models and head, from its wheel, give with it what they give without it."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

from compile_tests.helpers import verl_modules
from compile_tests.helpers.families import small_model
from llmk import verl as llmk_verl
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import OPS, Sample

pytestmark = pytest.mark.skipif(verl_modules.SPEC is None, reason="verl is not installed")


@pytest.fixture
def head() -> Iterator[Any]:
    """verl's class, which is its own again after the test."""
    verl_modules.add_packages()
    yield importlib.import_module(llmk_verl.HEAD).FusedLinearForPPO
    llmk_verl.unpatch()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_its_head(shape: tuple[int, ...], dtype: torch.dtype, head: Any, device: torch.device) -> None:
    """Both outputs and their gradients, as near to float64 as the operator's must be."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, 16, generator=generator).to(device, dtype) for size in (shape, (37,)))
    ids = torch.randint(0, 37, shape, generator=generator).int().to(device)
    llmk_verl.patch()
    llmk_verl.patch()
    for backend in ("torch", "liger"):
        sample = Sample((hidden, weight, ids), {"temperature": 0.7}, why=backend)
        outcome = call(OPS["linear_logprobs"], sample, fn=head(impl_backend=backend))
        assert [output.dtype for output in outcome.outputs] == [torch.float32, torch.float32]
        require_accurate(OPS["linear_logprobs"], sample, outcome)


def steps(patched: bool, **inputs: Any) -> tuple[list[Tensor], Any]:
    """Three steps of a policy's loss with an entropy bonus, by the model that verl's own function makes."""
    patching = importlib.import_module("verl.models.transformers.monkey_patch")
    model = small_model("Llama")
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})  # verl changes the class
    patching.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    advantages = torch.randn(inputs["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    (llmk_verl.patch if patched else llmk_verl.unpatch)()
    for _ in range(3):
        output = model(**inputs, temperature=0.8, return_dict=True)
        assert (output.log_probs.grad_fn.name() != "FusedLinearForPPOFunctionBackward") == patched
        loss = -(advantages * output.log_probs).mean() - 0.01 * output.entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_its_models(packed: bool, head: Any) -> None:
    ids = torch.randint(3, 101, (2, 7), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long()}
    if packed:
        inputs = {"input_ids": ids.view(1, -1), "position_ids": torch.arange(7).repeat(1, 2)}
    want, original = steps(False, **inputs)
    got, model = steps(True, **inputs)
    torch.testing.assert_close(got, want)
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_under_autocast(head: Any) -> None:
    """Hidden states and projection may be in float32 there."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (5, 37))
    ids = torch.arange(5)
    llmk_verl.patch()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = head()(hidden.bfloat16(), weight, ids)
    right = F.linear(hidden.bfloat16().double(), weight.bfloat16().double()).log_softmax(-1)[range(5), ids]
    torch.testing.assert_close(found, right.float())


def test_the_line_of_its_configuration(head: Any) -> None:
    """verl imports what `external_lib` names."""
    original = head.forward
    sys.modules.pop("llmk.verl.patched", None)
    importlib.import_module("verl.utils.import_utils").import_external_libs("llmk.verl.patched")
    assert head.forward is not original
    llmk_verl.unpatch()
    assert head.forward is original


def test_another_version_of_it(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "forward", lambda self, hidden, weight: None)
    with pytest.raises(TypeError, match=r"verl: expected FusedLinearForPPO.forward\(self, hidden_states, .*got"):
        llmk_verl.patch()
    assert "llmk_original" not in vars(head)
