"""Pieces of Markdown that the written pages are made of."""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def prose(text: str) -> str:
    """Plain text with code in backticks, as Markdown."""
    spans = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(spans), 2):
        escaped = re.sub(r"([*_#|<>$\[\]])", r"\\\1", spans[i])
        spans[i] = re.sub(r"https?://[^\s,;)]*[^\s,;).]", lambda m: f"<{m[0].replace(chr(92), '')}>", escaped)
    return "".join(spans)


def fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def doc_parts(doc: str) -> Iterator[str]:
    """The paragraphs of a docstring; indented ones keep their lines."""
    for block in re.split(r"\n\n(?=\S)|\n\n(?= )", doc.rstrip()):
        indented = all(line.startswith("    ") for line in block.splitlines() if line)
        yield fence("text", inspect.cleandoc(block)) if indented else _paragraph(block)


def _paragraph(text: str) -> str:
    """A paragraph, whose bold beginning stays bold."""
    bold = re.match(r"\*\*(.+?)\*\*", text)
    return f"**{prose(bold[1])}**{prose(text[bold.end() :])}" if bold else prose(text)


def literal_blocks(doc: str) -> str:
    """Return a docstring for Sphinx, each indented paragraph as a literal block, whose lines stay as they are."""
    return re.sub(r"\n\n(?=    \S)", "\n\n::\n\n", doc)


def code_list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def folded(title: str, parts: Iterable[str]) -> Iterator[str]:
    """Parts without headings, behind a title that opens."""
    yield f"<details><summary>{title}</summary>"
    yield from parts
    yield "</details>"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
