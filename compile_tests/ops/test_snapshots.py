"""Snapshots of what a compiled layer launches and saves for its backward pass.

Two views of the same small step: as it is on a CPU, where the operators are plain PyTorch to Inductor, and as it would
be on a GPU, seen through a stub driver. Run with EXPECTTEST_ACCEPT=1 to rewrite the snapshots after a wanted change.
"""

import re

import pytest
import torch
from torch import Tensor, nn

from compile_tests.helpers.stub_driver import (
    Graphs,
    describe,
    generated_code,
    launches,
    origin,
    saved,
    steps,
    stub_driver,
    trace,
)
from llmk.nn import LinearCrossEntropyLoss, RMSNorm, RotaryEmbedding, SwiGLUMLP
from llmk.registry.devices import INTERPRET
from llmk.registry.graphs import ops_in_graph_as

pytest.importorskip("expecttest")
pytest.importorskip("tqdm")

import expecttest

from benchmarks.layer import PARTS, Sizes, Variant, forms_of, layer

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: kernels run as opaque nodes, on no device")

PINNED = torch.__version__.startswith("2.13.")


class Layer(nn.Module):
    """A Llama layer without the attention between queries and keys, and a loss: 2 sequences of 24 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(64)
        self.q_proj, self.k_proj = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.rotary = RotaryEmbedding(16, 24)
        self.o_proj = nn.Linear(32, 64, bias=False)
        self.mlp = SwiGLUMLP(64, 160)
        self.lm_head = nn.Linear(64, 320, bias=False)
        self.loss = LinearCrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.norm(x)
        q, k = (proj(h).view(2, 24, 2, 16).transpose(1, 2) for proj in (self.q_proj, self.k_proj))
        q, k = self.rotary(q, k)
        x = x + self.o_proj((q + k).transpose(1, 2).flatten(2))
        return self.loss(x + self.mlp(x), self.lm_head.weight, target)


def step(dtype: torch.dtype = torch.bfloat16) -> tuple[Layer, Tensor, Tensor]:
    return Layer().to(dtype), torch.randn(2, 24, 64, dtype=dtype, requires_grad=True), torch.randint(0, 320, (2, 24))


def summary(graphs: Graphs) -> str:
    (forward,), (backward,) = graphs.forward, graphs.backward
    sections = {"forward": steps(forward), "saved": map(describe, saved(graphs)), "backward": steps(backward)}
    return "\n".join(line for name, lines in sections.items() for line in [f"{name}:", *(f"  {x}" for x in lines)])


def without_origins(snapshot: str) -> list[str]:
    """The same for every version of PyTorch: our kernels and ops, and the saved tensors' dtypes and shapes."""
    lines = [line for line in snapshot.splitlines() if "aten." not in line or "[" in line]
    return sorted(line.partition("] ")[0] for line in lines)


class SnapshotCase(expecttest.TestCase):
    def assert_snapshot(self, actual: str, expected: str) -> None:
        if PINNED:
            self.assertExpectedInline(actual, expected, skip=1)
        else:
            assert without_origins(actual) == without_origins(expected)


class OnCPU(SnapshotCase):
    def test_operators_are_plain_pytorch_and_the_fused_loss_is_one_node(self) -> None:
        self.assert_snapshot(
            summary(trace(*step())),
            """\
forward:
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  llmk._fused_linear_ce_fwd
saved:
  bfloat16[2, 24, 64] input
  bfloat16[64] input
  bfloat16[32, 64] input
  bfloat16[32, 64] input
  bfloat16[24, 16] input
  bfloat16[24, 16] input
  bfloat16[64, 32] input
  bfloat16[160, 64] input
  bfloat16[160, 64] input
  bfloat16[64, 160] input
  bfloat16[48, 64] prims.convert_element_type
  bfloat16[48, 32] aten.add.Tensor
  bfloat16[48, 64] aten.add.Tensor
  bfloat16[48, 160] aten.mm
  bfloat16[48, 160] aten.mm
  bfloat16[48, 160] prims.convert_element_type
  bfloat16[2, 24, 64] llmk._fused_linear_ce_fwd[5]
  bfloat16[320, 64] llmk._fused_linear_ce_fwd[6]
  bool[2, 24] aten.ne.Scalar
  float32[2, 24, 1] aten.squeeze.dim
backward:
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm""",
        )


class OnGPU(SnapshotCase):
    graphs: Graphs

    @classmethod
    def setUpClass(cls) -> None:
        with stub_driver():
            cls.graphs = trace(*step())

    def test_every_operator_is_its_kernels(self) -> None:
        self.assert_snapshot(
            summary(self.graphs),
            """\
forward:
  aten.mm
  aten.mm
  rope_kernel[48, 1, 1]
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  llmk._fused_linear_ce_fwd
saved:
  bfloat16[2, 24, 64] input
  bfloat16[64] input
  bfloat16[32, 64] input
  bfloat16[32, 64] input
  bfloat16[24, 16] input
  bfloat16[24, 16] input
  bfloat16[64, 32] input
  bfloat16[160, 64] input
  bfloat16[160, 64] input
  bfloat16[64, 160] input
  int64[2, 24] input
  float32[2, 24, 1] aten.add.Tensor
  bfloat16[48, 32] aten.add.Tensor
  bfloat16[48, 64] aten.add.Tensor
  bfloat16[48, 160] aten.mm
  bfloat16[48, 160] aten.mm
  bfloat16[2, 24, 64] llmk._fused_linear_ce_fwd[5]
  bfloat16[320, 64] llmk._fused_linear_ce_fwd[6]
backward:
  scale_kernel[1, 1, 1]
  scale_kernel[5, 1, 1]
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  rope_kernel[48, 1, 1]
  aten.mm
  aten.mm
  aten.mm
  aten.mm
  rms_norm_backward_kernel[2, 1, 1]
  sum_partials_kernel[2, 1, 1]""",
        )

    def test_kernels_write_to_new_buffers_only(self) -> None:
        for graph in [*self.graphs.forward, *self.graphs.backward]:
            for launched in launches(graph):
                assert launched.cloned
                for name in launched.cloned:
                    buffer = launched.arguments[name]
                    assert origin(buffer).target is torch.ops.aten.empty.memory_format, (launched.name, name)
                    assert len(buffer.users) == 1, (launched.name, name)

    def test_nothing_is_copied(self) -> None:
        for graph in [*self.graphs.forward, *self.graphs.backward]:
            assert not [line for line in steps(graph) if line.startswith(("aten.clone", "aten.copy"))]

    def test_no_uninitialised_buffer_is_saved(self) -> None:
        assert not [node for node in saved(self.graphs) if "empty" in str(origin(node).target)]


class OnGPUGenerated(SnapshotCase):
    def test_triton_kernels_are_understood(self) -> None:
        """A kernel that PyTorch cannot analyse is taken to write to all of its inputs, with a warning."""
        with stub_driver(), self.assertNoLogs("torch._dynamo", "WARNING"):
            trace(*step(torch.float32))

    def test_generated_code_launches_kernels_and_copies_nothing(self) -> None:
        with stub_driver():
            forward, backward = generated_code(*step())
        assert "clone" not in forward + backward
        assert "copy_(" not in forward + backward
        assert forward.count("_fused_linear_ce_fwd.default(") == 1
        launched = [re.findall(r"(\w+_kernel)_\d+\.run\(", code) for code in (forward, backward)]
        assert launched[0] == ["rope_kernel"]
        assert sorted(launched[1]) == sorted(
            ["scale_kernel", "scale_kernel", "rope_kernel", "rms_norm_backward_kernel", "sum_partials_kernel"]
        )
        # The norm and the gated unit are one kernel each, and again in the backward pass: there the unit's also makes
        # its gradients.
        for code in (forward, backward):
            assert len([name for name in fused_in(code) if "rsqrt" in name]) == 1
            assert len([name for name in fused_in(code) if "silu" in name]) == 1


KERNELS = {
    "rms_norm": ["rms_norm_kernel"],
    "add_rms_norm": ["rms_norm_kernel"],
    "rope": ["rope_kernel"],
    "qk_norm_rope": ["qk_norm_rope_kernel"],
    "swiglu": ["gated_unit_kernel"],
    "relu_squared": ["relu_squared_kernel"],
    "cross_entropy": ["cross_entropy_short_kernel", "mean_of_rows_kernel"],
}
BACKWARD_KERNELS = {
    "rms_norm": ["rms_norm_backward_kernel", "sum_partials_kernel"],
    "add_rms_norm": ["rms_norm_backward_kernel", "sum_partials_kernel"],
    "rope": ["rope_kernel"],
    "qk_norm_rope": ["qk_norm_rope_backward_kernel", "sum_two_partials_kernel"],
    "swiglu": ["gated_unit_backward_kernel"],
    "relu_squared": ["relu_squared_backward_kernel"],
    "fused_linear_ce": ["scale_kernel", "scale_kernel"],
    "cross_entropy": ["cross_entropy_short_backward_kernel"],
}


def decoder_layer(variant: Variant) -> tuple[str, str]:
    """The code generated for the forward and backward pass of the benchmarks' layer."""
    sizes, cpu = Sizes(256, 512, 8, 2, 2, 32, 512), torch.device("cpu")
    arguments = (sizes.head_dim, sizes.parameters(cpu), *sizes.inputs(cpu))
    with stub_driver(), ops_in_graph_as(variant.kernel_forms()):
        forward, backward = generated_code(lambda *args: layer(variant, *args), *arguments)
    return forward, backward


def launched_in(code: str) -> list[str]:
    return re.findall(r"(\w+_kernel)_\d+\.run\(", code)


def fused_in(code: str) -> list[str]:
    """The operations of Inductor's own kernels, by their names; attention on a CPU, which needs one more, left out."""
    names = re.findall(r"^ +(?:cpp|triton_\w+?)_fused_(\w+?)_\d+(?:\.run)?\(", code, re.MULTILINE)
    return [name for name in names if "flash_attention_for_cpu_backward" not in name]


OTHER_PARTS = PARTS | {"turn": "qk_norm_rope", "mlp": "relu_squared", "loss": "cross_entropy"}


@pytest.mark.parametrize("parts", [PARTS, OTHER_PARTS], ids=["first", "others"])
def test_a_decoder_layer_launches_kernels_and_copies_nothing(parts: dict[str, str]) -> None:
    variant = Variant("kernels", parts, forms_of(("rms_norm", *parts.values()), "kernel"))
    forward, backward = decoder_layer(variant)
    norm, turn, mlp, loss = variant.parts["add_norm"], *(variant.parts[part] for part in ("turn", "mlp", "loss"))
    order = ["rms_norm", turn, norm, mlp, norm, loss]
    assert launched_in(forward) == [kernel for op in order for kernel in KERNELS.get(op, [])]
    assert sorted(launched_in(backward)) == sorted(kernel for op in order for kernel in BACKWARD_KERNELS[op])
    assert "clone" not in forward + backward
    assert "copy" not in forward + backward
    assert not fused_in(forward)
    # Sums of the gradients that a tensor gets from several products.
    assert all(set(re.split("_+", fused)) <= {"", "add", "div", "expand", "view"} for fused in fused_in(backward))
    assert len([fused for fused in fused_in(backward) if "add" in fused]) == (2 if mlp == "relu_squared" else 3)


@pytest.mark.skipif(not PINNED, reason="other versions of PyTorch fuse otherwise")
@pytest.mark.parametrize("op", [pytest.param("rope", marks=pytest.mark.breadth), "qk_norm_rope"])
def test_plain_pytorch_turns_heads_in_one_kernel_each(op: str) -> None:
    parts = PARTS | {"turn": op}
    variant = Variant(f"{op} aten", parts, forms_of(("rms_norm", *parts.values()), "aten", op))
    # As on a GPU, where concatenation is fused.
    with torch._inductor.config.patch(cpu_backend="triton", force_pointwise_cat=True):
        forward, backward = decoder_layer(variant)
    assert len([fused for fused in fused_in(forward) if "cat" in fused]) == 2
    assert len([fused for fused in fused_in(backward) if "cat" in fused]) == 2
    assert len(fused_in(forward)) == 2
