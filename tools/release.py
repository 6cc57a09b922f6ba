"""Prints the text of a release: `python -m tools.release vX.Y.Z` gives that version's section of CHANGELOG.md.

The tag has to name the version that llmk and CITATION.cff have, and CHANGELOG.md a section of it with its date.
"""

import re
import sys
from pathlib import Path

import llmk

ROOT = Path(__file__).resolve().parents[1]


def release_text(tag: str, version: str, changelog: str, citation: str) -> str:
    """The text of a release.

    Raises:
        ValueError: Something has another version, or there is nothing to say.
    """
    if tag != f"v{version}":
        raise ValueError(f"tag: expected v{version}, as llmk.__version__ has it, got {tag}")
    if f"\nversion: {version}\n" not in citation:
        raise ValueError(f"CITATION.cff: expected version: {version}")
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    parts = re.split(heading, changelog, flags=re.MULTILINE)
    if len(parts) != 2:
        raise ValueError(f"CHANGELOG.md: expected one section '## {version} (YYYY-MM-DD)', got {len(parts) - 1}")
    text = re.split(r"^## ", parts[1], flags=re.MULTILINE)[0].strip()
    if not text:
        raise ValueError(f"CHANGELOG.md: the section of {version} is empty")
    return text


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.release vX.Y.Z")
    files = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    try:
        print(release_text(sys.argv[1], llmk.__version__, *files))
    except ValueError as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
