"""A kernel's layers, by transformers' name of the slot."""

from llmk.transformers.slots import LAYERS

globals().update(LAYERS)
