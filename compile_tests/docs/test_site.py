"""The site that is built from the docs: every page is there, links lead somewhere, nothing is wider than a phone."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from llmk.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "latex2mathml", "matplotlib")
WRITTEN_BY_SPHINX = {"genindex.html", "py-modindex.html", "search.html"}


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.glob("**/*.html")) if path.name not in WRITTEN_BY_SPHINX]


class Links(HTMLParser):
    """The links and loads of a page, and the anchors in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name == "href" and value and tag == "a":
                self.links.append(value)
            elif name in ("href", "src") and value:
                self.loaded.append(value)


def operators_without_a_page(site: Path) -> Iterator[str]:
    index = (site / "ops" / "index.html").read_text()
    for name in OPS:
        text = re.sub(r"<[^>]*>", "", (site / "ops" / f"{name}.html").read_text())
        if not re.search(rf"= (llmk\.functional|torch\.ops\.llmk)\.{name}\(", text):
            yield f"{name}: no example"
        if f"llmk::{name}(" not in text:
            yield f"{name}: no schema"
        if f'href="{name}.html"' not in index:
            yield f"{name}: not in the index"


def links_that_lead_nowhere(site: Path) -> Iterator[str]:
    seen = {path: Links(path) for path in sorted(site.glob("**/*.html"))}
    for page in pages(site):
        for link in seen[page].links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists() or (parts.fragment and target in seen and parts.fragment not in seen[target].ids):
                yield f"{page.relative_to(site)}: {link}"


def files_from_elsewhere(site: Path) -> Iterator[str]:
    for page in pages(site):
        yield from (f"{page.relative_to(site)}: {link}" for link in Links(page).loaded if urlsplit(link).netloc)


CHECKS = (
    operators_without_a_page,
    links_that_lead_nowhere,
    files_from_elsewhere,
)


def test_site(tmp_path: Path) -> None:
    """One test, so that the site is built once however the tests are spread over processes."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    out = tmp_path / "html"
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-b",
        "html",
        "-d",
        tmp_path / "doctrees",
        ROOT / "docs",
        out,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [f"{check.__name__}: {problem}" for check in CHECKS for problem in check(out)] == []
