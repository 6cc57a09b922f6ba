"""A report of opcheck as one page: operators by promises, and behind each cell what was asked and what came out.

The page needs nothing but itself: no script, no font, no picture from elsewhere.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from llmk.opcheck.promises.table import GPU_PROMISES, INTERPRETER_PROMISES, PROMISES
from llmk.opcheck.report.causes import causes
from llmk.opcheck.runner import Result

Record = dict[str, Any]

MARKS = {"kept": "✓", "broken": "✗", "accepted": "≈", "empty": "·", "unasked": ""}
WORDS = {
    "kept": "kept",
    "broken": "broken",
    "accepted": "broken as accepted",
    "empty": "nothing to check",
    "unasked": "not asked",
}

STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5a6470; --back: #ffffff; --line: #d7dce1; --card: #f5f7f9;
  --kept: #1a7f4b; --kept-back: #d9f2e4; --broken: #b3261e; --broken-back: #ffdad6; --empty-back: #e8ebee; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e6ea; --soft: #9aa5b1; --back: #14171a; --line: #343b42; --card: #1d2226;
    --kept: #6fd6a0; --kept-back: #17402b; --broken: #ffb4ab; --broken-back: #6b1a15; --empty-back: #2a3036; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
code { font: .92em ui-monospace, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; }
summary { cursor: pointer; padding: .35rem .5rem; }
summary:hover { background: var(--card); }
.op { border-top: 1px solid var(--line); }
.op > summary { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; }
.op > summary::before { content: "▸"; color: var(--soft); }
.op[open] > summary::before { content: "▾"; }
.name { flex: 0 0 15rem; font-weight: 600; }
.cells { display: flex; flex-wrap: wrap; gap: 2px; }
.cell { display: inline-block; width: 1.3rem; height: 1.3rem; border-radius: 3px; text-align: center;
  font: .8rem/1.3rem system-ui, sans-serif; }
.kept { background: var(--kept-back); color: var(--kept); }
.broken { background: var(--broken-back); color: var(--broken); }
.empty { background: var(--empty-back); color: var(--soft); }
.unasked { border: 1px dotted var(--line); }
.count { color: var(--soft); font-size: .9rem; }
.promise { margin-left: 1rem; border-left: 2px solid var(--line); }
.inside { padding: .2rem .5rem .6rem 2.4rem; }
.asked { color: var(--soft); margin: 0 0 .4rem; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
.message { white-space: pre-wrap; font: .85rem/1.4 ui-monospace, monospace; }
@media (max-width: 40rem) { .name { flex: 0 1 auto; } .cells { order: 1; flex-basis: 100%; }
  .promise { margin-left: 0; } .inside { padding-left: .5rem; } }
"""


def page(report: Record) -> str:
    """The page of a report, as `--json` writes it."""
    results = [Result(**result) for result in report["results"]]
    by_op: dict[str, list[Result]] = {}
    for result in results:
        by_op.setdefault(result.op, []).append(result)
    promises = promises_in(results)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>opcheck: {escape(_subject(report))}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(_title(report, list(by_op)))}</h1>",
        *_head(report, results, len(by_op)),
        *_broken(results),
        "<h2>Operators</h2>",
        '<p class="asked">Each square is a promise, in the same order for every operator. Open an operator to see '
        "its promises.</p>",
        *(part for op, rows in by_op.items() for part in _operator(op, rows, promises)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def verdict_of_all(results: Sequence[Result]) -> str:
    found = {result.verdict for result in results}
    return next((word for word in ("broken", "accepted", "kept", "empty") if word in found), "unasked")


def promises_in(results: Sequence[Result]) -> dict[str, str]:
    """Return the checks in opcheck's order, each with its promise's text; others come last."""
    known = {promise.__name__: promise for promise in INTERPRETER_PROMISES + PROMISES + GPU_PROMISES}
    named = dict.fromkeys(result.promise for result in results)
    ordered = [name for name in known if name in named] + [name for name in named if name not in known]
    return {name: inspect.getdoc(known[name]) or "" if name in known else "" for name in ordered}


def _head(report: Record, results: Sequence[Result], ops: int) -> Iterator[str]:
    counts = Counter(result.verdict for result in results)
    total = ", ".join(f"{counts[word]} {WORDS[word]}" for word in ("kept", "broken", "empty"))
    facts = {
        "Checks": f"{total}, of {ops} operators",
        "On": f"{report['device']} ({', '.join(report['paths'])}), {report['date']}",
        "With": ", ".join(f"{name} {report[name]}" for name in ("llmk", "torch", "triton", "python")),
    }
    yield "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()) + "</dl>"


def _title(report: Record, ops: list[str]) -> str:
    """Name what was checked: the modules of a user's operators, or else a few operators by name."""
    names = _own_modules(report) or ops
    if len(names) == 1:
        return f"What {names[0]} promises"
    return f"What {', '.join(names) if len(names) <= 3 else f'{len(names)} operators'} promise"


def _subject(report: Record) -> str:
    return ", ".join([*_own_modules(report), report["device"]])


def _own_modules(report: Record) -> list[str]:
    return [name for name in report.get("modules", ()) if not name.startswith("llmk.")]


def _broken(results: Sequence[Result]) -> Iterator[str]:
    found = causes(results)
    if not found:
        return
    yield "<h2>What is broken</h2><ul>"
    for cause in found:
        others = f'<p class="asked">{escape(cause.others)}</p>' if cause.others else ""
        message = f'<div class="message">{escape(cause.first.message)}</div>'
        yield f"<li><code>{escape(cause.headline)}</code>{message}{others}</li>"
    yield "</ul>"


def _operator(op: str, results: Sequence[Result], promises: dict[str, str]) -> Iterator[str]:
    by_promise = {name: [result for result in results if result.promise == name] for name in promises}
    verdicts = {name: verdict_of_all(rows) for name, rows in by_promise.items()}
    count = Counter(verdicts.values())
    cells = "".join(
        f'<span class="cell {word}" title="{escape(name)}: {WORDS[word]}">{MARKS[word]}</span>'
        for name, word in verdicts.items()
    )
    yield (
        f'<details class="op" id="{escape(op)}"><summary><code class="name">{escape(op)}</code>'
        f'<span class="cells">{cells}</span>'
        f'<span class="count">{count["kept"]}/{count["kept"] + count["broken"]}</span></summary>'
    )
    for name, rows in by_promise.items():
        if rows:
            yield from _promise(name, promises[name], verdicts[name], rows)
    yield "</details>"


def _promise(name: str, asked: str, word: str, results: Sequence[Result]) -> Iterator[str]:
    yield (
        f'<details class="promise"><summary><span class="cell {word}">{MARKS[word]}</span> '
        f'<code>{escape(name)}</code></summary><div class="inside">'
    )
    if asked:
        yield f'<p class="asked">{escape(asked)}</p>'
    yield "<table><tr><th>path</th><th>dtype</th><th>result</th><th>calls</th><th>seconds</th></tr>"
    for result in results:
        path = f"{result.path}, no kernel" if result.no_kernel else result.path
        cells = [path, result.dtype, WORDS[result.verdict], str(result.calls), f"{result.seconds:.2f}"]
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"
    for result in results:
        if result.message:
            yield f'<div class="message">{escape(result.message)}</div>'
    yield "</div></details>"
