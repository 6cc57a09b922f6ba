"""The layer's benchmark runs where there is no GPU, and its variants differ in what they are meant to differ in."""

import json
from pathlib import Path

import pytest
import torch

from compile_tests.helpers.stub_driver import Graphs, steps, stub_driver, trace
from llmk.registry.devices import INTERPRET
from llmk.registry.graphs import ops_in_graph_as

pytest.importorskip("tqdm")

from benchmarks.layer import Sizes, Variant, layer, main, variants

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: kernels run as opaque nodes, on no device")

VARIANTS = {variant.name: variant for variant in variants(["rms_norm", "swiglu", "geglu"], everything=True)}


def graphs(variant: Variant) -> Graphs:
    sizes, cpu = Sizes.of(64, 24), torch.device("cpu")
    arguments = (sizes.head_dim, sizes.parameters(cpu), *sizes.inputs(cpu))
    with stub_driver(), ops_in_graph_as(variant.kernel_forms()):
        return trace(lambda *args: layer(variant, *args), *arguments)


def kernels(variant: Variant) -> set[str]:
    """The kernels of the forward graph, without their grids."""
    (graph,) = graphs(variant).forward
    return {step.partition("[")[0] for step in steps(graph) if "aten" not in step}


def test_one_operator_changes_form() -> None:
    everything = {"rms_norm_kernel", "rope_kernel", "gated_unit_kernel", "llmk._fused_linear_ce_fwd"}
    assert kernels(VARIANTS["all kernel"]) == everything
    assert kernels(VARIANTS["all recorded"]) <= everything
    assert kernels(VARIANTS["all aten"]) == {"llmk._fused_linear_ce_fwd"}
    assert kernels(VARIANTS["all plain"]) == set()
    assert kernels(VARIANTS["swiglu aten"]) == everything - {"gated_unit_kernel"}
    assert kernels(VARIANTS["swiglu plain"]) == everything - {"gated_unit_kernel"}
    assert kernels(VARIANTS["geglu aten"]) == everything - {"gated_unit_kernel"}


@pytest.mark.parametrize(
    ("forms", "message"),
    [
        ({"rms_norm": "aten"}, r"forms: expected names of kernel ops, got 'rms_norm'"),
        ({"_rms_norm_fwd": "plain"}, r"forms\['_rms_norm_fwd'\]: expected 'kernel' or 'aten', got 'plain'"),
    ],
)
def test_forms_are_checked(forms: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message), ops_in_graph_as(forms):
        pass


@pytest.mark.usefixtures("no_cpp")
def test_variants_are_compiled_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["all kernel"]  # compiling all takes minutes
    monkeypatch.setattr("benchmarks.layer.variants", lambda *_, **__: [VARIANTS[name] for name in names])
    file, code = tmp_path / "results.json", tmp_path / "code"
    assert main(["rms_norm", "--device", "cpu", "--json", str(file), "--code", str(code)]) == 0
    (results,) = json.loads(file.read_text())["layers"]
    assert [row["name"] for row in results["rows"]] == names
    assert all(row["step_ms"] > 0 for row in results["rows"])
    written = {path.name for path in code.glob("hidden-64/*.py")}
    assert written == {f"{name.replace(' ', '-')}-{way}.py" for name in names for way in ("forward", "backward")}
