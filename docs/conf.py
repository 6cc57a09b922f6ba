"""Sphinx settings. One page per operator is written from its record before the build."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from docutils import nodes  # noqa: E402
from markdown_parts import literal_blocks  # noqa: E402
from op_pages import write_pages  # noqa: E402
from report_pages import write_reports  # noqa: E402

import llmk  # noqa: E402 the path comes first

project = "llmk"
version = release = llmk.__version__
project_copyright = ""
html_show_copyright = False
html_show_sphinx = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "mathml"]
html_math_renderer = "mathml"
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write code in single backticks
INCLUDED = (
    "_checks",
    "_targets",
    "_benchmarks",
    "_steps",
    "_families",
    "_versions",
    "_sweep",
    "_layers",
    "_first",
    "_graphs",
    "_gallery",
    "_experts",
    "_experts_over_ranks",
    "_estimate_form",
    "_estimate_checks",
    "_estimate_formula",
)  # in other pages
exclude_patterns = ["_build", *(f"ops/{name}.md" for name in INCLUDED)]

html_theme = "furo"
html_title = f"llmk {version}"
html_static_path = ["_static"]
html_extra_path = ["ops/reports"]
html_css_files = ["llmk.css"]
python_maximum_signature_line_length = 80  # a long signature has one argument on a line
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = "$ "
autodoc_typehints = "none"  # the docstrings say what arguments are
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_use_ivar = True


write_reports(DOCS / "ops" / "reports")


def strip_listings(app, doctree):
    """A piece of a file ends with the empty lines before the next one: leave them out."""
    for node in doctree.findall(nodes.literal_block):
        text = node.astext().rstrip()
        node.rawsource, node.children = text, [nodes.Text(text)]


def keep_lines(app, what, name, obj, options, lines):
    """Formulas in docstrings are indented paragraphs."""
    lines[:] = literal_blocks("\n".join(lines)).split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", keep_lines, priority=400)  # before napoleon
    app.connect("builder-inited", lambda _: write_pages(DOCS / "ops"))
    app.connect("doctree-read", strip_listings)
