"""The results that `llmk.transformers.tensor_parallel` must keep, checked by two ranks together."""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from llmk.transformers import patch, tensor_parallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from hf_models import PRESETS, build

MODELS = ("llama-nano", "qwen3-nano", "gemma2-nano")
SAME = 1e-5  # relative to the largest value


def check_model(name: str, patched: bool) -> None:
    """Losses, all gradients and logits are those of the whole model."""
    whole, split = (build(PRESETS[name], 32, 0, torch.device("cpu")) for _ in range(2))
    for model in (whole, split):
        make_norms_differ(model)
    if patched:
        patch(split)
    tensor_parallel(split, init_device_mesh("cpu", (2,)))
    torch.manual_seed(1)
    tokens, target = torch.randint(512, (2, 3, 16))
    losses = [model(input_ids=tokens, labels=target, shift_labels=target).loss for model in (whole, split)]
    check_same("loss", losses[1], losses[0])
    for loss in losses:
        loss.backward()
    of_whole = dict(whole.named_parameters())
    for parameter_name, parameter in split.named_parameters():
        check_same(parameter_name, parameter.grad, of_whole[parameter_name].grad)
        whole_in_each = "norm" in parameter_name
        assert isinstance(parameter, DTensor) != whole_in_each, parameter_name
    assert of_whole.keys() == dict(split.named_parameters()).keys()  # tied ones are there once
    logits = [model.eval()(input_ids=tokens).logits for model in (whole, split)]
    check_same("logits", logits[1], logits[0])


def make_norms_differ(model: nn.Module) -> None:
    """Draw norms that differ, so that a gradient of the wrong weight shows."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)


def check_same(name: str, ours: Tensor | None, want: Tensor | None) -> None:
    assert ours is not None and want is not None, name  # noqa: PT018
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    difference = float((ours - want).abs().max() / want.abs().max())
    assert difference < SAME, f"{name}: differs by {difference:.1e}"


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    refuses(nn.Linear(3, 3), mesh, "model: Linear has no blocks of")
    refuses(nn.Linear(3, 3), init_device_mesh("cpu", (1, 2)), "mesh: expected one dimension, got 2")
    model = build(PRESETS["qwen3-nano"], 32, 0, torch.device("cpu"))
    model.model.layers[1].self_attn.q_norm = nn.RMSNorm(64)
    refuses(model, mesh, "cannot split model.layers.1.self_attn, which has q_norm beside")
    model.model.layers[1].self_attn.q_norm = nn.Identity()
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(8))
    refuses(model, mesh, "cannot split model.layers.1.self_attn, which has sinks beside")
    del model.model.layers[1].self_attn.sinks
    mlp = model.model.layers[0].mlp
    mlp.gate_up_proj = nn.Linear(64, 256)
    del mlp.gate_proj, mlp.up_proj
    refuses(model, mesh, "cannot split model.layers.0.mlp, which has gate_up_proj beside")
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # nothing is half done


def refuses(model: nn.Module, mesh, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tensor_parallel(model, mesh)


def checks(rank: int, world: int) -> Mapping[str, Callable[[], None]]:
    models = {
        f"{name}, {'patched' if patched else 'as it was'}": functools.partial(check_model, name, patched)
        for name in MODELS
        for patched in (True, False)
    }
    return {"refusals": check_refusals} | models
