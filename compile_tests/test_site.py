"""The site that is built from the docs: every page is there, links lead somewhere, nothing is wider than a phone."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from llmk.registry import OPS

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "latex2mathml", "matplotlib")
WRITTEN_BY_SPHINX = {"genindex.html", "py-modindex.html", "search.html"}
PHONE = 390


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("site")
    out = folder / "html"
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", folder / "doctrees", ROOT / "docs", out],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return out


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.glob("**/*.html")) if path.name not in WRITTEN_BY_SPHINX]


class Links(HTMLParser):
    """What a page links to and loads, and the places in it that can be linked to."""

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


def test_every_operator_has_its_page(site: Path) -> None:
    index = (site / "ops" / "index.html").read_text()
    for name in OPS:
        text = re.sub(r"<[^>]*>", "", (site / "ops" / f"{name}.html").read_text())
        assert f"= llmk.functional.{name}(" in text or f"= torch.ops.llmk.{name}(" in text
        assert f"llmk::{name}(" in text
        assert f'href="{name}.html"' in index


def test_links_lead_to_pages_and_places(site: Path) -> None:
    seen = {path: Links(path) for path in sorted(site.glob("**/*.html"))}
    wrong = []
    for page in pages(site):
        for link in seen[page].links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists() or (parts.fragment and target in seen and parts.fragment not in seen[target].ids):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    outside = {
        link for page in pages(site) for link in Links(page).loaded if urlsplit(link).scheme in ("http", "https")
    }
    assert outside == set()


def test_search_finds_words(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    terms = json.loads(index[index.index("{") : index.rindex("}") + 1])["terms"]
    words = ("patch", "liger", "checkp", "rotary", "vocabul", "distil", "logit", "export", "autocast", "triton")
    assert [word for word in words if not any(term.startswith(word) for term in terms)] == []


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


def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    names = [str(path.relative_to(site)) for path in pages(site)]
    (site / "measure.html").write_text(MEASURE % (json.dumps(names), PHONE, PHONE))
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--virtual-time-budget=60000", "--dump-dom", (site / "measure.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (site / "measure.html").unlink()
    found = re.search(r"<title>wide:(.*?)</title>", result.stdout)
    assert found is not None, result.stderr[-2000:]
    assert json.loads(found[1]) == []
