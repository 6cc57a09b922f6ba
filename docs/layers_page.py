"""Writes the table of the layers of transformers' models that `patch` leaves, by the number of families that have them.

The families are found by what their code is called in transformers, which copies names from one family to the next.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import transformers


@dataclass(frozen=True)
class Layer:
    name: str
    written_as: str  # a regular expression that the code of a family with this layer matches
    operator: str = ""  # of llmk, for models that call it themselves
    why: str = ""  # why there is none


LAYERS = (
    Layer("scan of Mamba", r"selective_scan_fn"),
    Layer("recurrence of RWKV", r"rwkv_linear_attention"),
    Layer("recurrence of RG-LRU", r"rg_lru|RgLru|Rglru"),
    Layer("recurrence of xLSTM", r"mlstm_chunkwise"),
    Layer("linear attention with a fixed decay", r"LightningAttention"),
    Layer("attention with sinks", r"self\.sinks|s_aux", why="attention is PyTorch's or a kernel package's"),
    Layer("attention with a soft cap", r"attn_logit_softcap", why="attention is PyTorch's or a kernel package's"),
    Layer("attention with a bias for distances", r"relative_attention_bias|relative_position_bias|build_alibi"),
    Layer("selection of keys by an indexer", r"class \w*Indexer"),
    Layer("projections of latent attention", r"kv_a_proj_with_mqa", why="products: cuBLAS has them"),
    Layer("gate on the output of attention", r"attn_output \* torch\.sigmoid\(gate\)|torch\.sigmoid\(gate"),
    Layer("rotation of image patches, in two directions", r"apply_rotary_pos_emb_vision"),
    Layer("L2 norm of queries and keys", r"def l2norm|use_qk_l2norm", why="a part of `gated_delta_rule`"),
    Layer("hyper-connections", r"HyperConnection|hyper_connection", operator="write_streams"),
    Layer("router of a mixture", r"class \w*Top[kK]Router", operator="router_topk"),
    Layer("group norm", r"nn\.GroupNorm", operator="group_norm"),
    Layer("batch norm", r"nn\.BatchNorm", why="cuDNN has it"),
    Layer("scale of a layer's output", r"class \w*LayerScale", why="one multiplication, which Inductor fuses"),
    Layer("stochastic depth", r"class \w*DropPath", why="one multiplication, which Inductor fuses"),
)


def layers_table() -> str:
    code = _code_of_families()
    having = {layer: [name for name, text in code.items() if re.search(layer.written_as, text)] for layer in LAYERS}
    counted = sorted(having.items(), key=lambda each: -len(each[1]))
    head = f"Of {len(code)} families in transformers {transformers.__version__}:"
    rows = [f"| {layer.name} | {len(names)} | {_names(names)} | {_answer(layer)} |" for layer, names in counted]
    return "\n".join([head, "", "| layer | families | which | in llmk |", "|---|---|---|---|", *rows, ""])


def _code_of_families() -> dict[str, str]:
    code: dict[str, str] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        code[path.parent.name] = code.get(path.parent.name, "") + path.read_text()
    return code


MOST_NAMES = 6


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _answer(layer: Layer) -> str:
    return f"[`{layer.operator}`](ops/{layer.operator}.md), called by yourself" if layer.operator else layer.why or "-"
