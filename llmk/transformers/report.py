"""What `patch` did to a model, and how it is undone."""

import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

WIDTH = 80


class Entry(NamedTuple):
    """One place in the model."""

    name: str
    kind: str
    place: str
    """The module's class."""
    replaced: bool
    text: str
    """What replaces it, or why it was left."""


@dataclass
class Report:
    """What was replaced, what was left and why. `print(report)` shows it as a table.

    Attributes:
        model: The model that was patched.
        entries: One for each replacement and for each candidate that was left.
    """

    model: nn.Module
    entries: list[Entry] = field(default_factory=list)
    _originals: list[tuple[nn.Module, str]] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> dict[str, int]:
        """How many places of each kind were replaced."""
        return dict(Counter(entry.kind for entry in self.entries if entry.replaced))

    @property
    def left(self) -> dict[str, str]:
        """Why each candidate that was left was left, by the module's name."""
        return {entry.name: entry.text for entry in self.entries if not entry.replaced}

    def unpatch(self) -> None:
        """Undo it: the model runs its own code again."""
        while self._originals:
            module, attribute = self._originals.pop()
            vars(module).pop(attribute, None)

    def _set(self, module: nn.Module, attribute: str, value: Any) -> None:
        setattr(module, attribute, value)
        self._originals.append((module, attribute))

    def __str__(self) -> str:
        counts = Counter((e.kind, e.place, e.replaced, e.text) for e in self.entries)
        rows = [("", "module", "", "")]
        for (kind, place, replaced, text), count in sorted(counts.items(), key=lambda item: (not item[0][2], item[0])):
            rows.append((kind, place, str(count), text if replaced else f"left: {text}"))
        return "\n".join(line for row in _aligned(rows) for line in row)


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[list[str]]:
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    indent = sum(widths) + 6
    table = []
    for kind, place, count, text in rows:
        start = f"{kind:<{widths[0]}}  {place:<{widths[1]}}  {count:>{widths[2]}}  "
        lines = textwrap.wrap(text, max(WIDTH - indent, 20)) or [""]
        table.append([(start + lines[0]).rstrip(), *(" " * indent + line for line in lines[1:])])
    return table
