"""Hugging Face causal language models made from a configuration, and the training settings that suit their sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config


@dataclass(frozen=True)
class Preset:
    config: Callable[..., Any]
    sizes: dict[str, Any]
    batch_size: int = 8
    seq_len: int = 2048
    steps: int = 100
    lr: float = 3e-4
    text_vocab_size: int = 32768  # tokens of the tokenizer; the model's vocabulary may have more

    @property
    def vocab_size(self) -> int:
        return self.sizes["vocab_size"]


@dataclass(frozen=True)
class Nano(Preset):
    """Two layers for a CPU; 4 key-value heads and 512 tokens, which 2 or 4 ranks can share."""

    batch_size: int = 8
    seq_len: int = 32
    steps: int = 20
    lr: float = 3e-3
    text_vocab_size: int = 512


NANO: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


PRESETS = {
    "llama-nano": Nano(LlamaConfig, NANO | {"tie_word_embeddings": False}),
    "qwen3-nano": Nano(Qwen3Config, NANO),
    "gemma2-nano": Nano(Gemma2Config, NANO | {"query_pre_attn_scalar": 8}),
    "llama-1b": Preset(  # the sizes of Llama 3.2 1B
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope(5e5),
        },
    ),
    "qwen3-0.6b": Preset(
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "rope_parameters": rope(1e6),
        },
    ),
    "gemma2-2b": Preset(Gemma2Config, {"vocab_size": 256000}, batch_size=4, lr=2e-4),  # the sizes are the defaults
}

COMMON: dict[str, Any] = {
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,  # the tokenizer's text has none of theirs
}


def build(preset: Preset, seq_len: int, seed: int, device: torch.device) -> PreTrainedModel:
    """The model in float32, with the same random weights for the same seed and kind of device."""
    config = preset.config(**COMMON, **preset.sizes, max_position_embeddings=max(seq_len, 2048))
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()
