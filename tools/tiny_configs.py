"""Tiny configurations of any model of transformers: the default one with what makes it large made small."""

from typing import Any

CLASSES = 99
"""The size of every vocabulary."""

SMALL: dict[int | float, tuple[str, ...]] = {
    CLASSES: ("vocab_size", "vocab_size_per_layer_input", "tgt_vocab_size", "src_vocab_size", "n_token"),
    64: (
        "max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "n_ctx", "max_seq_length",
        "max_source_positions", "max_target_positions",
    ),
    48: (
        "intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
        "hidden_dim", "d_inner", "ffn_intermediate_size",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "n_embed", "embedding_size", "d_embed",
        "out_hidden_size", "projection_dim", "output_dim", "linear_units",
    ),
    16: ("q_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size", "image_size", "mamba_d_head"),
    8: (
        "head_dim", "d_kv", "kv_channels", "d_head", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
        "sliding_window", "state_size", "mamba_d_state", "mamba_chunk_size", "chunk_size",
        "hidden_size_per_layer_input", "attention_window",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads", "mamba_n_heads", "n_mamba_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
        "qk_rope_head_dim", "rotary_dim", "patch_size", "linear_num_key_heads", "linear_num_value_heads",
    ),
    2: (
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k",
        "depth", "type_vocab_size", "eos_token_id", "sep_token_id",
    ),
    1: (
        "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "cls_token_id",
    ),
    0: ("pad_token_id",),
}  # fmt: skip

ONE_OF_EACH = {"layer_types": ["linear_attention", "full_attention"]}

PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": ONE_OF_EACH,
    "bamba": {"attn_layer_indices": [1]},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_groups": 1},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": ONE_OF_EACH,
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
    "hy_v4_vl_vision": {"max_image_size": 16},
    "kimi_linear": {**ONE_OF_EACH, "linear_head_dim": 8, "linear_num_heads": 4},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "prophetnet": {"num_hidden_layers": None},
    "qwen3_5_moe_text": ONE_OF_EACH,
    "qwen3_5_text": ONE_OF_EACH,
    "qwen3_next": ONE_OF_EACH,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""The sizes that a model asks for; None leaves the default."""


IMAGE_ROPE = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl")
"""The families whose text models divide the features of a head among axes, by default for heads of 128."""


def tiny_config(config_class: Any) -> Any:
    """A configuration of this class of small sizes and without dropout; the ones inside it likewise."""
    default = config_class()
    names = default.to_dict()
    values: dict[str, Any] = {
        name: size
        for size, group in SMALL.items()
        for name in group
        if (name in names or hasattr(default, name)) and not isinstance(getattr(config_class, name, None), property)
    }
    values |= {name: 0.0 for name, value in names.items() if "drop" in name and isinstance(value, float)}
    if "kv_lora_rank" in values:  # latent attention has no groups, and turns some features of a head
        values |= {name: 4 for name in ("num_key_value_heads", "head_dim") if name in values}
    if "use_cache" in names:
        values["use_cache"] = False
    if config_class.model_type.startswith(IMAGE_ROPE) and config_class.model_type.endswith("_text"):
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    if getattr(default, "is_encoder_decoder", False):
        values["decoder_start_token_id"] = 1
    for name in getattr(config_class, "sub_configs", None) or {}:
        inner = getattr(default, name, None)
        if inner is not None and not isinstance(inner, dict):
            values[name] = tiny_config(type(inner))
    values |= PARTICULAR.get(config_class.model_type, {})
    return config_class(**{name: value for name, value in values.items() if value is not None})
