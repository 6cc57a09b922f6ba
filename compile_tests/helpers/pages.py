"""The fenced blocks of README and documentation, as the tests and `tools.installed` run them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of its first line."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


PYTHON_PAGES = [page for page in PAGES if blocks(page, "python")]


def script_of(page: Path, folder: Path) -> Path:
    """A page's Python as one file in `folder`, as a reader would paste it, with the page's line numbers."""
    script = ""
    for line, code in blocks(page, "python"):
        script += "\n" * (line - script.count("\n")) + code
    path = folder / f"{page.stem}.py"
    path.write_text(script)
    return path
