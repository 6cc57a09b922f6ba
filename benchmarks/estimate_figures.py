"""`python -m benchmarks.estimate_figures`: write `llmk/estimate/figures.json` from the results.

The measured part is times for each element, rates and chunks, of one run each. The counted part is the bytes that each
way keeps for the backward pass: `BYTES`. `benchmarks.estimate_checks` compares with the training steps measured.
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.targets import PRODUCTS, measured_ms

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "llmk" / "estimate" / "figures.json"
OPS, LAYER, EXPERTS, LOSS = "ops-h200.json", "layer-h200.json", "moe-h200.json", "linear-loss-ops-h200.json"
FLOAT32 = "float32-logits-h100.json"

WAYS = {"PyTorch": "torch eager", "PyTorch compiled": "torch compiled", "llmk": "llmk eager", "llmk compiled": ""}
"""The names of `benchmarks.run` for those of the estimate, where they differ."""
OF_EXPERTS = {"PyTorch": "grouped_mm eager", "PyTorch compiled": "grouped_mm compiled"}

BYTES = {
    # Transformers upcasts the logits: float32 of the log-softmax and of two gradients; compiled, the logits in bfloat16
    # that the output holds, in float32, and their gradient.
    "logit": [12, 10, 0, 0],
    "softcap": [2, 0, 0, 0],  # of a logit: the tanh, which compiled code makes again
    # Of an element of the hidden states: the input in float32 and the normalized one; else the input alone.
    "norm": [6, 2, 2, 2],
    "offset norm": [8, 2, 2, 2],  # Gemma's normalized one is float32
    "norm's output": [2, 0, 0, 0],  # that a linear layer reads; llmk and compiled code make it again
    "norm of q and k": [6, 0, 2, 2],  # compiled PyTorch makes the rotated ones again
    "gated unit": [8, 4, 4, 4],  # gate, up, the activation and the product; in llmk and compiled the first two
    "expert's hidden": [4, 4, 2, 2],  # of a token at an expert: what it reads and gives, which llmk adds up at once
    "expert's width": [8, 4, 4, 4],  # as of a gated unit
}
"""The bytes kept until the backward pass for an element of a part, in the order of WAYS."""

MODEL_TYPES = {
    "norms": {"gemma2": 4, "gemma3": 4, "gemma3_text": 4, "glm4": 4},
    "qk_norm": [
        *("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        *("gemma3", "gemma3_text", "olmo2", "olmo3", "olmoe"),
    ],
    "offset_norms": ["gemma", "gemma2", "gemma3", "gemma3_text"],
    "unknown_keys": [
        "kv_lora_rank",
        "first_k_dense_replace",
        "n_shared_experts",
        "shared_expert_intermediate_size",
        "linear_num_key_heads",
        "mamba_d_state",
        "is_encoder_decoder",
        *("use_bidirectional_attention", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),  # encoders, LayerNorms
    ],
}
"""The facts that a configuration does not say: the norms of a layer if not 2, which are of queries and keys, which
multiply by 1 + weight in float32. A model with an unknown key is refused."""

NORMS = ((262144, 128), (65536, 1024), (32768, 4096), (8192, 8192), (4096, 16384))
HEADS = {"rope": "B4 S4096 32/8 heads D128", "qk_norm_rope": "B4 S4096 32/8 heads D128"}
HEAD_ELEMENTS = 4 * 4096 * (32 + 8) * 128
LOSSES = ((4096, 4096, 32000), (8192, 4096, 128256), (8192, 2048, 151936), (8192, 2304, 256000))
"""Tokens, hidden size and vocabulary."""
ATTENTION = ("sdpa", "fmha", "convert_dq", "compute_dot_do_o")
"""Parts of the names of attention's kernels."""

Points = list[list[float]]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def figures() -> dict[str, Any]:
    return {
        "ways": list(WAYS),
        "model_types": MODEL_TYPES,
        "bytes": BYTES,
        "chunk_rows": _chunk_rows(),
        "rounded_chunks": 3,
        "gpus": {"h200": _h200(), "h100": _h100()},
    }


def _h200() -> dict[str, Any]:
    ops = read(OPS)
    times = {
        "norm": [_points(way, "rms_norm", {f"{n}x{h}": (h, n * h) for n, h in NORMS}) for way in WAYS],
        "norm with residual": [
            _points(way, "add_rms_norm", {f"{n}x{h}": (h, n * h) for n, h in NORMS if h in (1024, 4096, 16384)})
            for way in WAYS
        ],
        "rotation": [_points(way, "rope", {HEADS["rope"]: (128, HEAD_ELEMENTS)}) for way in WAYS],
        "rotation with norms": [
            _points(way, "qk_norm_rope", {HEADS["qk_norm_rope"]: (128, HEAD_ELEMENTS)}) for way in WAYS
        ],
        **{
            name: [_points(way, name, {"32768x14336": (14336, 32768 * 14336)}) for way in WAYS]
            for name in ("swiglu", "geglu")
        },
        "logits": [_points(way, "fused_linear_ce", {_shape(n): (n[2], n[0] * n[2]) for n in LOSSES}) for way in WAYS],
        "experts": [_expert_points(way) for way in WAYS],
    }
    return {
        "device": ops["device"],
        "date": ops["date"],
        "torch": ops["torch"],
        "from": [OPS, LAYER, EXPERTS, LOSS],
        "copy": round(ops["ceilings"]["copy_bytes_per_s"]),
        "products": round(statistics.median(6e3 * n * h * v / _products(n, h, v) for n, h, v in LOSSES)),
        "attention": [_attention(layer) for layer in read(LAYER)["layers"]],
        "ns": times,
    }


def _h100() -> dict[str, Any]:
    """Return what was measured there: the logits with llmk, and the products alone beside them."""
    results = read(FLOAT32)
    rows = [row for row in results["rows"] if row["workload"].startswith("fused_linear_ce ")]
    sizes = [[int(size) for size in row["workload"].split()[1].split("x")] for row in rows]
    points: dict[int, list[float]] = {}
    for (n, _, v), row in zip(sizes, rows, strict=True):
        points.setdefault(v, []).append(1e6 * (row["ways"]["float32"]["ms"] - row["ways"][PRODUCTS]["ms"]) / (n * v))
    llmk = [[v, _rounded(statistics.mean(values))] for v, values in sorted(points.items())]
    rates = [6e3 * n * h * v / row["ways"][PRODUCTS]["ms"] for (n, h, v), row in zip(sizes, rows, strict=True)]
    empty: dict[str, list[None]] = {name: [None] * len(WAYS) for name in _h200()["ns"]}
    return {
        "device": results["device"],
        "date": results["date"],
        "torch": results["torch"],
        "from": [FLOAT32],
        "copy": None,
        "products": round(statistics.median(rates)),
        "attention": None,
        "ns": empty | {"logits": [None, None, llmk, llmk]},
    }


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _row(op: str, workload: str, way: str) -> dict[str, Any]:
    key = (op, workload, way)
    rows = read(LOSS if op == "fused_linear_ce" else OPS)["rows"]
    return next(row for row in rows if (row["op"], row["workload"], row["way"]) == key)


def _products(n: int, h: int, v: int) -> float:
    return measured_ms(_row("fused_linear_ce", _shape((n, h, v)), PRODUCTS))


def _points(way: str, op: str, workloads: dict[str, tuple[int, int]]) -> Points:
    """Nanoseconds for an element by a size; of a loss, above what its products alone take."""
    found = []
    for workload, (size, elements) in workloads.items():
        row = _row(op, workload, WAYS[way] or way)
        alone = measured_ms(_row(op, workload, PRODUCTS)) if op == "fused_linear_ce" else 0
        found.append([size, _rounded(1e6 * (measured_ms(row) - alone) / elements)])
    return sorted(found)


def _expert_points(way: str) -> Points:
    """Nanoseconds for a token at an expert, hidden feature and feature of the expert, by tokens of each of 128."""
    name = OF_EXPERTS.get(way, way)
    rows = [row for row in read(EXPERTS)["rows"] if row["way"] == name and row["experts"] == 128]
    return sorted(
        [
            row["tokens"] * row["top_k"] / row["experts"],
            _rounded(1e6 * row["ms"] / (row["tokens"] * row["top_k"] * row["hidden"] * row["intermediate"])),
        ]
        for row in rows
    )


def _attention(layer: dict[str, Any]) -> list[float]:
    """Features of a head, and operations a second: 3.5 times the forward pass's, of which causal masks leave half."""
    kernels = layer["rows"][0]["kernels_us"]
    seconds = 1e-6 * sum(us for name, us in kernels.items() if any(part in name for part in ATTENTION))
    return [
        layer["hidden"] // layer["heads"],
        round(7 * layer["batch"] * layer["sequence"] ** 2 * layer["hidden"] / seconds),
    ]


def _chunk_rows() -> Points:
    """Tokens whose logits exist at a time, by vocabulary: from the peak, less the gradients."""
    rows = []
    for n, h, v in LOSSES:
        mib = _row("fused_linear_ce", _shape((n, h, v)), PRODUCTS)["peak_mib"]
        rows.append([v, round((mib * 2**20 - 2 * v * h - 2 * n * h) / (2 * v))])
    return rows


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def text() -> str:
    """The file, with each list of numbers on a line."""
    indented = json.dumps(figures(), indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), indented) + "\n"


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.estimate_figures", description=__doc__).parse_args()
    FIGURES.write_text(text())
    print(FIGURES.relative_to(ROOT))


if __name__ == "__main__":
    main()
