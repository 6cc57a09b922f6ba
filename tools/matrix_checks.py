"""The checks that `tools.matrix` runs on each release: `python -m tools.matrix_checks NAME`.

The last line it writes says what it saw.

Numbers are right by opcheck's accuracy rule, against float64 and PyTorch's own composition in the same release.
"""

import copy
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FEW = ("rms_norm", "cross_entropy", "fused_linear_ce", "swiglu", "rope")
"""Operators of five families: a plain kernel, a loss, an opaque driver, one that a graph decomposes, two outputs."""


def _opcheck(*arguments: str) -> None:
    command = [sys.executable, "-m", "llmk.opcheck", "--device", "cpu", "--dtype", "float32", "--jobs", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        broken = [line for line in lines if " breaks " in line]
        sys.exit("; ".join(broken) or done.stderr.strip() or lines[-1])
    print(lines[-1])


def imports() -> None:
    """`import llmk`, and the versions"""
    from llmk.registry import OPS

    assert len(OPS) > 0
    packages = ("triton", "numpy", "transformers", "trl", "peft")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps(versions | {name: metadata.version(name) for name in packages}))


def numbers() -> None:
    """values and gradients of every operator, plain PyTorch on a CPU"""
    _opcheck("--path", "reference", "--only", "values_and_gradients")


def interpreter() -> None:
    """values and gradients of every operator's kernels in Triton's interpreter"""
    _opcheck("--path", "interpreter", "--only", "values_and_gradients")


def compiled() -> None:
    """Inductor: operators of five families in one graph with neighbours"""
    _opcheck(*FEW, "--path", "reference", "--only", "compiled,no_recompile")


def opcheck() -> None:
    """every promise of operators of five families, plain PyTorch"""
    _opcheck(*FEW, "--path", "reference")


def opcheck_kernels() -> None:
    """every promise of operators of three families, kernels in the interpreter"""
    _opcheck("rms_norm", "cross_entropy", "rope", "--path", "interpreter")


def ahead() -> None:
    """the kernels of every operator's samples built for sm_90 and gfx942, without a GPU"""
    from compile_tests.helpers.aot import TARGETS, compile_for, launches
    from llmk.registry import OPS

    built = 0
    for name in ("sm_90", "gfx942"):
        for op in OPS.values():
            for launch in launches(op, torch.bfloat16, workloads=False, target=name):
                compile_for(launch, TARGETS[name])
                built += 1
    print(f"{built} kernels built")


def launching() -> None:
    """graphs and launches as a GPU gets them: tests of snapshots, the launcher, its cache and the fast path"""
    names = ("launcher", "launch_cache", "eager", "private")
    _tests("compile_tests/ops/test_snapshots.py", *(f"compile_tests/registry/test_{name}.py" for name in names))


def _tests(*files: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--show-capture=no", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTEST_ADDOPTS": "-o addopts="})
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        sys.exit("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or done.stderr)
    print(lines[-1].strip("= "))


def trl() -> None:
    """TRL's trainers: tests of the patched and of the unpatched ones' losses"""
    _tests("compile_tests/trl/test_trl.py", "compile_tests/trl/test_trainers.py")


def llama() -> None:
    """a patched tiny Llama trains like the unpatched one, eager and compiled"""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    _train_patched(LlamaForCausalLM(config), kinds=("mlp", "norm", "rope", "loss"))


def mixture() -> None:
    """a patched tiny Qwen3-MoE trains like the unpatched one, eager and compiled"""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options: dict[str, Any] = {
        "experts_implementation": "eager",
        "use_cache": False,
        "vocab_size": 320,
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = Qwen3MoeConfig(max_position_embeddings=64, **options)
    torch.manual_seed(0)
    _train_patched(Qwen3MoeForCausalLM(config), kinds=("experts", "norm", "rope", "loss"))


def _train_patched(original: Any, kinds: Sequence[str]) -> None:
    """Loss and gradients of a model patched with the kinds named, as the unpatched one's; compiled in one graph."""
    from llmk.accuracy.rule import accuracy_violation
    from llmk.transformers import patch

    patched = copy.deepcopy(original)
    report = patch(patched)
    if missing := set(kinds) - set(report.replaced):
        sys.exit(f"{report}\nnot patched: {', '.join(sorted(missing))}")
    tokens = torch.randint(0, original.config.vocab_size, (2, 24))

    def results(model: torch.nn.Module, call: Callable[..., torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss = (call or (lambda: model(input_ids=tokens, labels=tokens).loss))()
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def own_and_right(seed: int | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The unpatched model's, in float32 and float64, with each weight moved by a unit in its last place."""
        model = copy.deepcopy(original)
        if seed is not None:
            torch.manual_seed(seed)
            for p in model.parameters():
                p.data *= 1 + torch.finfo(p.dtype).eps * torch.empty_like(p).bernoulli_().mul_(2).sub_(1)
        return results(model), results(copy.deepcopy(model).double())

    (own, right), near = own_and_right(None), [own_and_right(seed) for seed in range(4)]
    compiled = torch.compile(lambda: patched(input_ids=tokens, labels=tokens).loss, fullgraph=True)
    for way, ours in (("eager", results(patched)), ("compiled", results(patched, compiled))):
        assert ours.keys() == right.keys()
        for name, value in right.items():
            neighbours = [(there[name], exact[name]) for there, exact in near]
            if violation := accuracy_violation(ours[name], own[name], value, neighbours=neighbours):
                sys.exit(f"{report}\n{way}: {name}: {violation}")
    print(f"{len(right)} gradients and losses, eager and compiled")


def export() -> None:
    """`torch.export` keeps the operators; saved, loaded and decomposed it computes the same"""
    from llmk.nn import RMSNorm, SwiGLUMLP

    module = torch.nn.Sequential(RMSNorm(64), SwiGLUMLP(64, 160))
    x = torch.randn(5, 64)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
    kept = sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("llmk.")})
    assert kept == ["llmk.rms_norm.default", "llmk.swiglu.default"], kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pt2"
        torch.export.save(program, path)
        loaded = torch.export.load(path)
    y = torch.randn(9, 64)
    for what in (program.module(), loaded.module(), program.run_decompositions().module()):
        assert torch.equal(what(y), module(y))
    print(", ".join(name.removesuffix(".default") for name in kept))


CHECKS: dict[str, Callable[[], None]] = {
    "import": imports,
    "numbers": numbers,
    "interpreter": interpreter,
    "compile": compiled,
    "opcheck": opcheck,
    "kernels": opcheck_kernels,
    "ahead": ahead,
    "launches": launching,
    "llama": llama,
    "mixture": mixture,
    "trl": trl,
    "export": export,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
