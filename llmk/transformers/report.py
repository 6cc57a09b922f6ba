"""The record of what `patch` did to a model, and its undoing."""

import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.classes import changes_of, set_classes, unpatched_class
from llmk.transformers.guards import FELL_BACK
from llmk.transformers.rewrite import source_of_method

REPORT = "_llmk_report"
"""The attribute of a patched model that holds its report."""

WIDTH = 80
NARROWEST = 24
"""A column of text that is less wide goes below."""


class Entry(NamedTuple):
    """One place in the model."""

    name: str
    kind: str
    place: str
    """The module's class."""
    replaced: bool
    text: str
    """The replacement, or why it was left."""


@dataclass
class Report:
    """The modules that were replaced or left, and why. `print(report)` shows it as a table.

    Attributes:
        model: The model that was patched.
        entries: One for each replacement and for each candidate that was left.
    """

    model: nn.Module
    entries: list[Entry] = field(default_factory=list)

    @property
    def replaced(self) -> dict[str, int]:
        """The number of places of each kind that were replaced."""
        return dict(Counter(entry.kind for entry in self.entries if entry.replaced))

    @property
    def left(self) -> dict[str, str]:
        """Why each candidate that was left was left, by the module's name."""
        left: dict[str, str] = {}
        for entry in self.entries:
            if not entry.replaced:
                left[entry.name] = "; ".join(filter(None, (left.get(entry.name), entry.text)))
        return left

    @property
    def fell_back(self) -> dict[str, str]:
        """The guards that failed since patch(), by the module's name, and what ran in place of the replacement."""
        found: dict[str, str] = {}
        for name, module in self.model.named_modules():
            if FELL_BACK in vars(module):
                found[name] = "; ".join(f"{why}: {ran}" for why, ran in vars(module)[FELL_BACK].items())
        return found

    def source(self, name: str = "") -> str:
        """The source of the `forward` that a module runs now, and where the functions come from that it calls.

        Args:
            name: The module's name in the model, as in `named_modules`; the model itself without.
        """
        return source_of_method(self.model.get_submodule(name), "forward")

    def unpatch(self) -> None:
        """Undo it: the model runs its own code again.

        Raises:
            RuntimeError: A patched module has been wrapped since in a way that changed its class, as FSDP2 does.
        """
        patched = [module for module in self.model.modules() if changes_of(module)]
        set_classes([(module, unpatched_class(module)) for module in patched])
        for module in self.model.modules():
            vars(module).pop(REPORT, None)
            vars(module).pop(FELL_BACK, None)

    def __str__(self) -> str:
        counts = Counter((e.kind, e.place, e.replaced, e.text) for e in self.entries)
        rows = [("", "module", "", "")] if counts else []
        for (kind, place, replaced, text), count in sorted(counts.items(), key=lambda item: (not item[0][2], item[0])):
            rows.append((kind, place, str(count), text if replaced else f"left: {text}"))
        places = ((type(self.model.get_submodule(name)).__name__, text) for name, text in self.fell_back.items())
        rows += [("guard", place, str(count), text) for (place, text), count in sorted(Counter(places).items())]
        lines = [line for row in _aligned(rows) for line in row]
        if not self.replaced:
            place = type(self.model).__name__
            lines.insert(0, f"{place}: nothing replaced" + ("" if rows else ", nothing found that operators compute"))
        return "\n".join([*_dtypes_that_do_not_run(self.model), *lines])


def _dtypes_that_do_not_run(model: nn.Module) -> list[str]:
    """A line where no operator takes the weights' dtype, and the guards would leave every call to the model's code."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if not dtypes or dtypes & set(FLOAT_DTYPES):
        return []
    found, taken = (", ".join(sorted(map(str, of))) for of in (dtypes, FLOAT_DTYPES))
    return textwrap.wrap(f"The weights are {found}, operators take {taken}: the model's own code runs.", WIDTH)


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[list[str]]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    indent = sum(widths) + 6
    beside = WIDTH - indent >= NARROWEST
    table = []
    for kind, place, count, text in rows:
        start = f"{kind:<{widths[0]}}  {place:<{widths[1]}}  {count:>{widths[2]}}  "
        lines = textwrap.wrap(text, WIDTH - indent if beside else WIDTH - 10) or [""]
        if beside:
            table.append([(start + lines[0]).rstrip(), *(" " * indent + line for line in lines[1:])])
        else:
            table.append([start.rstrip(), *(" " * 10 + line for line in lines if line)])
    return table
