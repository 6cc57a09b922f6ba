"""The site that is built from the docs: every page is there, links lead somewhere, nothing is wider than a phone."""

import importlib.util
import json
import re
import shutil
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
PHONE = 390


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


def words_that_search_does_not_find(site: Path) -> Iterator[str]:
    index = (site / "searchindex.js").read_text()
    terms = json.loads(index[index.index("{") : index.rindex("}") + 1])["terms"]
    words = ("patch", "liger", "checkp", "rotary", "vocabul", "distil", "logit", "export", "autocast", "triton")
    yield from (word for word in words if not any(term.startswith(word) for term in terms))


MEASURE = """<body><script>
const pages = %s, wide = [];
function next() {
  if (!pages.length) { document.title = 'wide:' + JSON.stringify(wide); return; }
  const page = pages.pop(), frame = document.createElement('iframe');
  frame.style = 'width: %dpx; height: 800px; border: 0';
  frame.onload = () => {
    const parts = frame.contentDocument.querySelectorAll('html, body, .page, .main, .content, article, section');
    const width = Math.max(...Array.from(parts, part => part.scrollWidth));
    if (width > %d) wide.push(page + ': ' + width);
    frame.remove(); next();
  };
  frame.src = page; document.body.append(frame);
}
next();
</script></body>"""


def pages_wider_than_a_phone(site: Path) -> Iterator[str]:
    """Yield the pages that a browser lays out wider than a phone, where there is a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return
    names = [str(path.relative_to(site)) for path in pages(site)]
    (site / "measure.html").write_text(MEASURE % (json.dumps(names), PHONE, PHONE))
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--virtual-time-budget=60000", "--dump-dom", (site / "measure.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>wide:(.*?)</title>", result.stdout)
    assert found is not None, result.stderr[-2000:]
    yield from json.loads(found[1])


CHECKS = (
    operators_without_a_page,
    links_that_lead_nowhere,
    files_from_elsewhere,
    words_that_search_does_not_find,
    pages_wider_than_a_phone,
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
