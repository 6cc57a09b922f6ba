"""Hugging Face causal language models made from a configuration, and the variants in which they are trained.

Nothing is downloaded: the weights are random, the same for every variant. Dimensions are those of the published models,
with two differences: plain rotary embedding everywhere, and no softcap on Gemma's attention scores, because
`scaled_dot_product_attention` has none and transformers refuses the two together. Its softcap on logits stays. A
mixture of experts and hybrids have fewer layers.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import llmk.transformers


@dataclass(frozen=True)
class Model:
    """A model by the sizes in its configuration, and the sequences of a step.

    Attributes:
        config: The configuration's class in transformers.
        sizes: What the configuration is made with.
        batch_size: Sequences of a step. Plain transformers must fit into 139 GiB too.
        small: What a small one is made with besides `SMALL`.
        compile_limit: Seconds after which a compiled variant is given up, None for no limit.
    """

    config: str
    sizes: dict[str, Any]
    batch_size: int
    small: dict[str, Any] = field(default_factory=dict)
    compile_limit: float | None = None

    @property
    def available(self) -> bool:
        """True if the installed release of transformers has this type of model."""
        return hasattr(transformers, self.config)

    def build(self, device: torch.device, small: bool) -> Any:
        """The model in training mode, in bfloat16; small: a tiny one of the same kind in float32."""
        sizes = self.sizes | (SMALL | self.small if small else {})
        config = getattr(transformers, self.config)(**sizes, tie_word_embeddings=True, use_cache=False)
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if small else torch.bfloat16, attn_implementation="eager"
            )
        # Set afterwards: some versions refuse it for Gemma 2 whether or not there is a softcap on its scores.
        model.config._attn_implementation = "sdpa"
        return model.train()

    def tokens(self, model: Any, batch_size: int, seq_len: int) -> Tensor:
        """The one batch that every step repeats: random tokens `[batch_size, seq_len]`."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(model.config.vocab_size, (batch_size, seq_len), generator=generator).to(model.device)


SEQ_LEN = 2048
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}

MODELS = {
    "llama-3.2-1b": Model(
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        batch_size=8,
    ),
    "gemma-2-2b": Model(
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 30.0,
        },
        # Of 16384 tokens the logits, their softcap, its float32 copy and the gradients alone would take about 75 GiB.
        batch_size=4,
    ),
    "qwen3-0.6b": Model(
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        batch_size=8,
    ),
    # Four of its 48 layers, whose weights, gradients and moments take 19 GiB, and a tied projection.
    "qwen3-30b-a3b-4-layers": Model(
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        batch_size=8,
        small={"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}

HYBRIDS = {
    "qwen3.5-2b-8-layers": Model(
        "Qwen3_5TextConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
        },
        batch_size=4,
        small={
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        compile_limit=600.0,
    ),
    "granite-4.0-h-1b-8-layers": Model(
        "GraniteMoeHybridConfig",
        {
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "shared_intermediate_size": 4096,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 8,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            # Plain transformers 5.17 computes these chunks through a tensor of 12 GiB; with the published 256, of 48.
            "mamba_chunk_size": 64,
            "position_embedding_type": None,
            "attention_multiplier": 1 / 128,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "rms_norm_eps": 1e-5,
            "vocab_size": 100352,
            "max_position_embeddings": 131072,
        },
        batch_size=4,
        small={
            "shared_intermediate_size": 96,
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
        compile_limit=600.0,
    ),
}
"""Models that mix attention with linear recurrences, of which the estimate of a step knows nothing.

In plain transformers their recurrences are loops over chunks and over the rows of a chunk, which a compiler unrolls.
"""


class Variant(NamedTuple):
    """The package whose kernels the model runs, and whether it is compiled; llmk's as one graph or not at all.

    "llmk backend" is the plain model, compiled with `llmk.compile`, which gives no logits beside the loss.
    """

    kernels: str
    compiled: bool


VARIANTS = {
    "eager": Variant("transformers", compiled=False),
    "compiled": Variant("transformers", compiled=True),
    "llmk": Variant("llmk", compiled=False),
    "llmk compiled": Variant("llmk", compiled=True),
    "llmk backend": Variant("llmk backend", compiled=True),
    "liger": Variant("liger-kernel", compiled=False),
    "liger compiled": Variant("liger-kernel", compiled=True),
}
"""The variants in the order in which they run."""


@contextlib.contextmanager
def as_variant(model: Any, variant: Variant, backend: str) -> Iterator[nn.Module | Callable[..., Any]]:
    """The model with the variant's kernels in it, compiled or not. On exit transformers is as it was."""
    # Liger replaces functions and classes in the module that defines the model.
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    try:
        if variant.kernels == "llmk":
            llmk.transformers.patch(model)
        elif variant.kernels == "liger-kernel":
            liger = importlib.import_module("liger_kernel.transformers")
            getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
        if variant.kernels == "llmk backend":
            yield llmk.compile(model, fullgraph=True, drop_logits=True)
        elif variant.compiled:
            yield torch.compile(model, fullgraph=variant.kernels == "llmk", backend=backend)
        else:
            yield model
    finally:
        names.update(before)
