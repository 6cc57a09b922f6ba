"""Operators that the backend finds in models of published packages, and whether anything changes.

`python -m tools.published_sweep [NAME ...]`, with x-transformers, vit-pytorch, diffusers and litgpt
installed as far as there; outside CI. Without names all models that can be imported are tried and docs/published.txt is
written. What is there is counted in the unchanged model: norms and functions that turn features as they are called,
gated units and losses as the example says. Then eager mode and the backend are compared: values, gradients, layout,
random state.
"""
# pyright: reportMissingImports=false
# nothing of llmk's installs these packages

import argparse
import contextlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_tests.helpers.backend_compare import difference, eager, exact_outcome, outcome, to_float64, with_backend
from llmk.compiler import Report
from tools.published_models import GPTWithRotation, Llama2

RESULT = Path(__file__).resolve().parents[1] / "docs" / "published.txt"
KINDS = {
    "norms": ("rms_norm", "add_rms_norm", "layer_norm"),
    "gated units": ("swiglu", "geglu"),
    "rotations": ("rope",),
    "loss": ("fused_linear_ce", "cross_entropy"),
}
ROTATION = re.compile(r"apply_(rotary|rope)|apply_rotary_emb|rotated$")
V, S = 31, 6


@dataclass(frozen=True)
class Example:
    """A small model of a package, what it is called with, and how many gated units and losses a call has."""

    package: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    gates: int = 0
    losses: int = 0


class Called(nn.Module):
    """A module called with arguments by name, or with a loss of its logits behind it."""

    def __init__(self, module: nn.Module, names: tuple[str, ...] = (), loss: bool = False, **options: Any) -> None:
        super().__init__()
        self.module, self.names, self.loss, self.options = module, names, loss, options

    def forward(self, *args: Tensor) -> Any:
        named = args[len(args) - len(self.names) :]
        plain = args[: len(args) - len(self.names)]
        out = self.module(*plain, **dict(zip(self.names, named, strict=True)), **self.options)
        return F.cross_entropy(out.flatten(0, -2), args[0].flatten()) if self.loss else out


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, V, (2, S)),)


def x_transformers_model(causal_options: dict[str, Any]) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **causal_options)
    return Called(TransformerWrapper(num_tokens=V, max_seq_len=S, attn_layers=layers), loss=True)


def x_llama() -> nn.Module:
    return x_transformers_model(
        {
            "use_rmsnorm": True,
            "ff_glu": True,
            "ff_swish": True,
            "ff_no_bias": True,
            "rotary_pos_emb": True,
            "attn_flash": True,
        }
    )


def x_gpt() -> nn.Module:
    return x_transformers_model({"rotary_pos_emb": True, "rotary_xpos": True})


def x_simple_norm() -> nn.Module:
    return x_transformers_model({"use_simple_rmsnorm": True, "ff_relu_squared": True})


def vit(module: str, name: str = "ViT", **options: Any) -> nn.Module:
    with _stand_in_for_torchvision():
        made = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    common = {"image_size": 16, "patch_size": 8, "num_classes": V, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
    return made(**(common | options))


@contextlib.contextmanager
def _stand_in_for_torchvision() -> Iterator[None]:
    """vit-pytorch imports transforms of torchvision for models that are not tried here."""
    names = "torchvision", "torchvision.transforms"
    made = {name: ModuleType(name) for name in names if importlib.util.find_spec(names[0]) is None}
    if made:
        made[names[0]].transforms = made[names[1]]  # type: ignore[attr-defined]
    sys.modules |= made
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def image() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 16, 16),)


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    names = "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids"
    return Called(model, ("hidden_states", *names), return_dict=False)


def flux_inputs() -> tuple[Tensor, ...]:
    states = torch.randn(2, 16, 4), torch.randn(2, S, 16), torch.randn(2, 16), torch.rand(2)
    return *states, torch.rand(16, 3), torch.zeros(S, 3)


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    names = "hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"
    return Called(model, names, return_dict=False)


def sd3_inputs() -> tuple[Tensor, ...]:
    return torch.randn(2, 4, 8, 8), torch.randn(2, S, 16), torch.randn(2, 16), torch.rand(2)


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        norm_num_groups=2,
        num_embeds_ada_norm=10,
    )
    return Called(model.eval(), ("hidden_states", "timestep", "class_labels"), return_dict=False)


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=16,
    )
    return Called(model, ("hidden_states", "timestep", "encoder_hidden_states"), return_dict=False)


def litgpt(**options: Any) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import GPT

    common = {"block_size": S, "vocab_size": V, "padded_vocab_size": V, "n_layer": 2, "n_head": 2, "n_embd": 32}
    return Called(GPT(Config(**(common | options))), loss=True)


LLAMA = {"mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "intermediate_size": 64, "bias": False}

MODELS = {
    "x-transformers, Llama's options": Example("x-transformers", x_llama, ids, gates=2, losses=1),
    "x-transformers, xPos": Example("x-transformers", x_gpt, ids, losses=1),
    "x-transformers, simple RMSNorm": Example("x-transformers", x_simple_norm, ids, losses=1),
    "vit-pytorch ViT": Example("vit-pytorch", lambda: vit("vit"), image),
    "vit-pytorch SimpleViT": Example("vit-pytorch", lambda: vit("simple_vit", "SimpleViT"), image),
    "vit-pytorch ViT, norms of q and k": Example(
        "vit-pytorch", lambda: vit("simple_vit_with_qk_norm", "SimpleViT"), image
    ),
    "diffusers Flux": Example("diffusers", flux, flux_inputs),
    "diffusers SD3": Example("diffusers", sd3, sd3_inputs),
    "diffusers DiT": Example(
        "diffusers", dit, lambda: (torch.randn(2, 4, 8, 8), torch.tensor([1, 2]), torch.tensor([3, 4]))
    ),
    "diffusers Wan": Example(
        "diffusers", wan, lambda: (torch.randn(1, 4, 1, 4, 4), torch.tensor([5]), torch.randn(1, S, 16))
    ),
    "litgpt Llama": Example("litgpt", lambda: litgpt(**LLAMA, rotary_percentage=1.0), ids, gates=2, losses=1),
    "litgpt Pythia": Example("litgpt", lambda: litgpt(rotary_percentage=0.25), ids, losses=1),
    "a model like llama2.c": Example("", Llama2, ids, gates=2, losses=1),
    "a model like modded-nanoGPT": Example("", GPTWithRotation, ids, losses=1),
}


def is_norm(owner: Any) -> bool:
    """Return True if it is called a norm, and does nothing else, such as a shift by a condition."""
    name = type(owner).__name__
    return isinstance(owner, nn.Module) and name.endswith("Norm") and not name.startswith(("Ada", "PreNorm"))


def counted(example: Example) -> Counter[str]:
    """Calls of norms, the outer of two, and of functions that turn features: those of q and of k are one rotation."""
    model, args = example.model(), example.inputs()
    found, turned, inside = Counter({"gated units": example.gates, "loss": example.losses}), 0, 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal turned, inside
        step = {"call": 1, "return": -1}.get(event, 0)
        if ROTATION.match(frame.f_code.co_name):
            turned += step == 1
        elif step and frame.f_code.co_name == "forward" and is_norm(frame.f_locals.get("self")):
            found["norms"] += step == 1 and inside == 0
            inside += step

    sys.setprofile(look)
    try:
        model(*args)
    finally:
        sys.setprofile(None)
    found["rotations"] = (turned + 1) // 2
    return found


def tried(example: Example, dtype: torch.dtype) -> tuple[Report, str]:
    """The report, and how the model changes, in words; nothing where it does not."""
    torch.manual_seed(0)
    model = example.model().to(dtype)
    args = [x.to(dtype) if x.is_floating_point() else x for x in example.inputs()]
    report = Report()
    got = outcome(with_backend(report), model, args)
    plain = outcome(eager, model, args)
    exact = exact_outcome(model, args, to_float64, plain.incoming)
    missing = plain.values.keys() - exact.values.keys()
    if plain.error or exact.error or missing:
        return report, f"not compared: {plain.error or exact.error or sorted(missing)}"
    return report, difference(got, model, args) or ""


def cells(example: Example, report: Report) -> list[str]:
    there, row = counted(example), []
    for kind, names in KINDS.items():
        got = sum(report.replaced.get(name, 0) for name in names)
        row.append(f"{got} of {max(there[kind], got)}" if max(there[kind], got) else "-")
    return row


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package) if package else "-"
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; without them all, and the table is kept")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"names: expected some of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    lines = [f"| | version | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    differences = []
    for name in args.names or MODELS:
        example = MODELS[name]
        version = installed(example.package)
        if not version:
            print(f"{name}: {example.package} is not installed", flush=True)
            continue
        report, say = tried(example, torch.float32)
        row = cells(example, report)
        lines.append(f"| {name} | {version} | {' | '.join(row)} |")
        print(name, *(f"{kind} {cell}" for kind, cell in zip(KINDS, row, strict=True)), say, sep="  ", flush=True)
        differences += [f"{name}: {say}"] if say else []
        if args.names:
            print(report)
    if not args.names:
        day = datetime.now(UTC).date()
        RESULT.write_text(f"torch {torch.__version__}, {day}:\n\n" + "\n".join(lines) + "\n")
    if differences:
        sys.exit("\n".join(["what changes:", *differences]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
