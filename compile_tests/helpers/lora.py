"""Models with adapters of PEFT's LoRA."""

import warnings
from typing import Any

import peft
import torch


def lora_config(**options: Any) -> Any:
    """Make a configuration in which neither A nor B begins at zero."""
    return peft.LoraConfig(**{"init_lora_weights": False, **options})


def with_lora(model: Any, **options: Any) -> Any:
    """Give a model adapters of this configuration, always the same ones."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        return peft.get_peft_model(model, lora_config(**options)).train()
