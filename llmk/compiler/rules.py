"""The rules of the backend: an operator, and a computation in plain PyTorch that it replaces."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from llmk.compiler import attention
from llmk.compiler.patterns import RewritePattern
from llmk.registry import OPS


@dataclass(frozen=True)
class RewriteRule:
    """An operator, and one way to write it in plain PyTorch.

    Attributes:
        name: The operator's name in the report and the options.
        overload: The operator.
        differentiable: The names of its arguments that get gradients.
        pattern: The computation that it replaces, and how.
    """

    name: str
    overload: Callable[..., Any]
    differentiable: tuple[str, ...]
    pattern: RewritePattern


def all_rules() -> list[RewriteRule]:
    """Return the rules of llmk's operators, and those of attention, which is PyTorch's own operator."""
    found = [
        RewriteRule(name, op.overload, op.differentiable, pattern)
        for name, op in OPS.items()
        for pattern in op.patterns
    ]
    names = "query", "key", "value"
    return found + [RewriteRule("attention", attention.OVERLOAD, names, pattern) for pattern in attention.ATTENTION]


def rule_names() -> list[str]:
    return sorted({rule.name for rule in all_rules()})


def chosen(only: Collection[str] | None, without: Collection[str] | None) -> frozenset[str]:
    """Return the names of the rules to try.

    Raises:
        ValueError: A name is none of a rule's.
        TypeError: `only` or `without` is a string.
    """
    known = rule_names()
    for argument, names in (("only", only), ("without", without)):
        if isinstance(names, str):
            raise TypeError(f"{argument}: expected a list of operators, got the string {names!r}")
        for name in names or ():
            if name not in known:
                raise ValueError(f"{argument}: expected some of {', '.join(known)}, got {name!r}")
    return frozenset(known if only is None else only) - frozenset(without or ())
