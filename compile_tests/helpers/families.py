"""Small random models of the families of transformers, one or two layers each."""

import copy
from typing import Any

import torch
import transformers

from llmk.transformers import patch

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
HYBRID = {
    **MOE,
    "head_dim": 8,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {  # DeepSeek's attention
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

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
    "Olmoe": MOE,
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
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "Qwen3Next": HYBRID,
    "Qwen3_5MoeText": HYBRID,
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
}


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


def small_vision_model(family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A vision-language model and a batch of two rows of text, each around one image."""
    torch.manual_seed(0)
    ids = torch.randint(3, 96, (2, 12))
    inputs = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    vision = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
    clip = {**vision, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8}
    ids[:, 2:6] = 99  # an image is four tokens
    if family == "Llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**clip),
            text_config=transformers.LlamaConfig(**COMMON),
            image_token_index=99,
        )
    elif family == "Gemma3":
        text = {**COMMON, "head_dim": 8, "sliding_window": 8}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=clip, mm_tokens_per_image=4, image_token_index=99
        )
        inputs["token_type_ids"] = (ids == 99).int()
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        tower = {**vision, "depth": 2, "num_heads": 4, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**COMMON, "rope_parameters": rope},
            vision_config={**tower, "window_size": 16},
            image_token_id=99,
        )
        ids[:, 3:6] = 50  # here it is one
        inputs |= {
            "pixel_values": torch.randn(8, 96),
            "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
            "mm_token_type_ids": (ids == 99).int(),
        }
    return getattr(transformers, f"{family}ForConditionalGeneration")(config).train(), inputs


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 101, shape)


def pair(family: str = "Llama", **overrides: Any) -> tuple[Any, Any]:
    """A patched model and the same one unpatched."""
    model = small_model(family, use_cache=False, **overrides)
    original = copy.deepcopy(model)
    patch(model)
    return model, original


def assert_same_training(model: Any, original: Any, run: Any = None, **inputs: Any) -> Any:
    """Loss and gradients; the patched model's output."""
    inputs = {"labels": inputs["input_ids"], **inputs}
    want = original(**inputs)
    want.loss.backward()
    got = (model if run is None else run)(**inputs)
    got.loss.backward()
    torch.testing.assert_close(got.loss.float(), want.loss.float(), rtol=1e-5, atol=0)
    assert got.loss.dim() == 0
    for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)
    model.zero_grad()
    original.zero_grad()
    return got


def loss_and_gradients(model: Any, run: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = run(**inputs, use_cache=False)
    output.loss.backward()
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}  # compiled, a gradient may be zero or None
    return output.loss.detach(), {n: zeros[n] if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_equal(got: Any, want: Any, plain: Any = None) -> None:
    """In float32 a gradient's error is that of the largest one, from which it came.

    Where `want` is exact, PyTorch's own result says how far off that is: 1.5 times its error is allowed besides.
    """
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    largest = max(g.abs().max() for g in want[1].values())
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        difference = (got[1][name] - gradient).abs().max()
        of_plain = 0.0 if plain is None else 1.5 * (plain[1][name] - gradient).abs().max()
        assert difference <= 1e-5 * gradient.abs().max() + 1e-6 * largest + of_plain, name
