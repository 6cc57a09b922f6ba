"""Small random models of the families of transformers, one or two layers each."""

from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # DeepSeek's attention
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama4Text": {"intermediate_size_mlp": 48, "head_dim": 8, **MOE},
    "Mistral": {"head_dim": 8},
    "Mixtral": MOE,
    "Qwen2": {},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 24},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {**MOE, "head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 8},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 8},
    "Phi": {},
    "Phi3": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8},
    "Granite": {"logits_scaling": 3.0, "residual_multiplier": 0.7},
    "GraniteMoe": {**MOE, "logits_scaling": 3.0},
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "Glm4Moe": {**MOE, **LATENT, "head_dim": 8},
    "SmolLM3": {},
    "Nemotron": {},
    "GptOss": {**MOE, "head_dim": 8, "sliding_window": 8},
    "DeepseekV3": {**MOE, **LATENT, "num_key_value_heads": 4},
    "Cohere": {},
    "Cohere2": {"sliding_window": 8},
    "StableLm": {},
    "FalconH1": {
        "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8,
    },
    "GPTNeoX": {},
    "Starcoder2": {},
    "Helium": {"head_dim": 8},
    "Ernie4_5": {"head_dim": 8},
    "SeedOss": {"head_dim": 8, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "Exaone4": {"head_dim": 8, "sliding_window": 8},
    "Arcee": {},
    "HunYuanDenseV1": {"head_dim": 8},
    "Apertus": {},
    "BitNet": {},
    "Dots1": {**MOE, **LATENT, "head_dim": 8},
}  # fmt: skip


def small_model(family: str, **overrides: Any) -> Any:
    """A causal language model of `family` with random weights, in training mode and float32."""
    base = family.removesuffix("Text")
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{base}ForCausalLM")
    torch.manual_seed(0)
    config = config_class(**{**COMMON, **FAMILIES[family], **overrides})
    model = model_class(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norms that start at one or zero would hide an offset
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
