"""The `[tool.llmk.opcheck]` table of a project's pyproject.toml, as options of the command line."""

import tomllib
from pathlib import Path
from typing import Any

OPTIONS = ("only", "skip", "dtype", "device", "path")


def words_of_table(file: Path) -> list[str]:
    """Return the table's entries as words of the command line; none where the file or the table is missing.

    Raises:
        ValueError: The file is no TOML, or the table has an entry that is no option or no text.
    """
    if not file.is_file():
        return []
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(str(error)) from None
    table = project.get("tool", {}).get("llmk", {}).get("opcheck", {})
    return [word for name, value in table.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    if name not in OPTIONS:
        raise ValueError(f"[tool.llmk.opcheck] has no {name!r}; it may have {', '.join(OPTIONS)}")
    values: list[Any] = value if isinstance(value, list) and name in ("only", "skip", "dtype") else [value]
    if not all(isinstance(item, str) for item in values):
        raise ValueError(f"[tool.llmk.opcheck] {name}: expected text, or a list of texts for only, skip and dtype")
    return [word for item in values for word in (f"--{name}", item)]
