"""Causal masks that need not be built, because attention's own `is_causal` says the same."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from llmk.transformers.rewrite import Edit, Source, argument_names, load, replace

FUNCTIONS = (create_causal_mask, create_sliding_window_causal_mask)


@dataclass(frozen=True)
class CausalMask(Edit):
    """transformers' functions of these names, which build a mask whenever a compiler traces them."""

    names: tuple[str, ...]
    kind = "mask"

    @property
    def what(self) -> str:
        return "omitted where is_causal suffices"

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        replace(definition, self._asked)
        # What the caller gave, before the body fills in positions and a cache of its own.
        given: list[ast.expr] = [load(name) for name in GIVEN if name in argument_names(definition)]
        definition.body.insert(0, ast.Assign([ast.Name("llmk_given", ast.Store())], ast.Tuple(given, ast.Load())))
        return {"llmk_mask": mask_if_needed}

    def _asked(self, node: Any) -> ast.AST:
        is_one = isinstance(node, ast.Name) and node.id in self.names
        return ast.Call(load("llmk_mask"), [node, load("llmk_given")], []) if is_one else node


GIVEN = ("position_ids", "past_key_values")


def find_masks(module: nn.Module, source: Source) -> CausalMask | None:
    names = {node.id for node in ast.walk(source.definition) if isinstance(node, ast.Name)}
    found = sorted(name for name in names if source.scope.get(name) in FUNCTIONS)
    return CausalMask(tuple(found)) if found and "position_ids" in argument_names(source.definition) else None


def mask_if_needed(create: Callable[..., Any], given: tuple[Any, ...]) -> Callable[..., Any]:
    """`create` where there is something to mask but the future, None where attention's `is_causal` says it all."""

    def create_mask(*args: Any, **kwargs: Any) -> Any:
        if any(value is not None for value in given) or not _only_causal(create, *args, **kwargs):
            return create(*args, **kwargs)
        return None

    return create_mask


def _only_causal(
    create: Callable[..., Any],
    config: Any = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: Any = None,
    **others: Any,
) -> bool:
    """Return whether sdpa is used without padding, packing, cache or a window that reaches less far than the row.

    `past_key_values` is the model's own empty cache here, if any.
    """
    if attention_mask is not None or inputs_embeds is None or any(value is not None for value in others.values()):
        return False
    if config is None or config._attn_implementation != "sdpa" or not getattr(config, "is_causal", True):
        return False
    if create is create_causal_mask:
        return True
    window = getattr(config, "sliding_window", None)
    return create is create_sliding_window_causal_mask and (window is None or inputs_embeds.shape[1] <= window)
