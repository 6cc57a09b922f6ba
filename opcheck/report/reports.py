"""A run's reports: a table and what is broken on a terminal, JSON, a page, JUnit's XML, SARIF, GitHub's annotations."""

import datetime
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import torch
import triton

import llmk
from llmk.opcheck.foreign.samples import GivenSamples
from llmk.opcheck.report.causes import causes, described
from llmk.opcheck.report.page import page
from llmk.opcheck.runner import NO_PROMISES, Result, check
from llmk.registry import Op

Place = tuple[str, int]
"""A file and a line in it."""
VERSION = 1
"""The version of the report in JSON: it grows where a key changes its meaning or goes."""


def table(results: Sequence[Result]) -> str:
    """A line for each operator, path and dtype: how many promises it keeps; or that no kernel was checked there."""
    lines = [f"{'op':<26}{'path':<14}{'dtype':<11}{'kept':>9}{'seconds':>10}"]
    for (op, path, dtype), group in _grouped(results):
        checked = [result for result in group if result.verdict in ("kept", "broken")]
        kept = sum(result.passed for result in checked)
        count = "no kernel" if any(result.no_kernel for result in group) else f"{kept}/{len(checked)}"
        mark = "" if kept == len(checked) else "  BROKEN"
        seconds = sum(result.seconds for result in group)
        lines.append(f"{op:<26}{path:<14}{dtype:<11}{count:>9}{seconds:>10.1f}{mark}")
    return "\n".join(lines)


def notes(results: Sequence[Result]) -> Iterator[str]:
    """Yield what was made for an operator, what is no fault but to be known, or a path without code; each line once."""
    told = ((result, f"{result.message if result.passed else ''}\n{result.no_kernel}") for result in results)
    yield from dict.fromkeys(
        f"{result.op} ({result.path}): {line}" for result, said in told for line in said.splitlines() if line
    )


def nothing_to_check(results: Sequence[Result]) -> str:
    """How many promises had nothing to check, and which they are."""
    empty = [result.promise for result in results if result.verdict == "empty" and result.promise not in NO_PROMISES]
    which = f": {', '.join(dict.fromkeys(empty))}" if empty else ""
    return f"{len(empty)} with nothing to check{which}"


def _grouped(results: Sequence[Result]) -> Iterable[tuple[tuple[str, str, str], list[Result]]]:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.path, result.dtype), []).append(result)
    return groups.items()


def report(
    results: Sequence[Result],
    device: torch.device,
    modules: Sequence[str],
    places: Mapping[str, Place],
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "modules": list(modules),
        "llmk": llmk.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "date": datetime.date.today().isoformat(),
        "paths": sorted({result.path for result in results}),
        "causes": [described(cause, places.get(cause.first.op)) for cause in causes(results)],
        "results": [asdict(result) for result in results],
    }


def junit(results: Sequence[Result]) -> str:
    """JUnit's XML: a test suite for each operator, path and dtype, a test case for each promise."""
    root = ElementTree.Element("testsuites", name="llmk.opcheck")
    for (op, path, dtype), group in _grouped(results):
        counts = {
            "tests": len(group),
            "failures": sum(result.verdict == "broken" for result in group),
            "skipped": sum(result.verdict in ("empty", "accepted") for result in group),
            "errors": 0,
        }
        suite = ElementTree.SubElement(root, "testsuite", name=f"{op} {dtype} ({path})")
        suite.attrib |= {name: str(count) for name, count in counts.items()}
        suite.set("time", f"{sum(result.seconds for result in group):.3f}")
        for result in group:
            case = ElementTree.SubElement(suite, "testcase", classname=f"{op}.{path}.{dtype}", name=result.promise)
            case.set("time", f"{result.seconds:.3f}")
            if result.verdict == "broken":
                ElementTree.SubElement(case, "failure", message=_one_line(result.message)).text = _xml(result.message)
            elif result.verdict != "kept":
                ElementTree.SubElement(case, "skipped", message=_xml(result.accepted) or "nothing to check")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _one_line(text: str) -> str:
    return _xml(text.partition("\n")[0])


def _xml(text: str) -> str:
    """The text without the control characters that XML has no way to write."""
    return "".join(char for char in text if char in "\t\n" or char >= " ")


def annotations(results: Sequence[Result], places: Mapping[str, Place]) -> Iterator[str]:
    """GitHub's workflow commands, which show each cause at the line where the operator's reference begins."""
    for cause in causes(results):
        where = ""
        if cause.first.op in places:
            file, line = places[cause.first.op]
            where = f"file={_property(file)},line={line},"
        body = "\n".join(filter(None, [cause.first.message, cause.others]))
        yield f"::error {where}title={_property(cause.headline.removesuffix(':'))}::{_data(body)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(results: Sequence[Result], places: Mapping[str, Place]) -> dict[str, Any]:
    """SARIF 2.1.0, which code scanning reads: a result for each cause, whose rule is the promise."""
    found = causes(results)
    rules = [{"id": promise} for promise in sorted({cause.first.promise for cause in found})]
    driver = {"name": "llmk.opcheck", "version": llmk.__version__, "rules": rules}
    listed = []
    for cause in found:
        entry = {"ruleId": cause.first.promise, "level": "error", "message": {"text": str(cause)}}
        if cause.first.op in places:
            file, line = places[cause.first.op]
            place = {"artifactLocation": {"uri": quote(file)}, "region": {"startLine": line}}
            entry["locations"] = [{"physicalLocation": place}]
        listed.append(entry)
    return {"$schema": _SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": listed}]}


_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def write_reports(
    results: Sequence[Result],
    device: torch.device,
    files: Mapping[str, Path | None],
    modules: Sequence[str],
    places: Mapping[str, Place],
) -> None:
    """Write the files that are asked for, by kind: json, html, junit and sarif."""
    about = report(results, device, modules, places)
    texts = {
        "json": lambda: json.dumps(about, indent=1) + "\n",
        "html": lambda: page(about),
        "junit": lambda: junit(results),
        "sarif": lambda: json.dumps(sarif(results, places), indent=1) + "\n",
    }
    for kind, text in texts.items():
        file = files[kind]
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text(), encoding="utf-8")


def assert_passes(
    op: Op | Callable[..., Any],
    samples: GivenSamples | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> list[Result]:
    """Check an operator as `check` does, in a test: the results, if every promise is kept.

    Raises:
        AssertionError: A promise is broken, or nothing was checked; its text is the report of the command line.
        ValueError: There is no promise of such a name.
    """
    results = check(op, samples, reference=reference, device=device, dtypes=dtypes, only=only, skip=skip)
    if any(not result.passed for result in results):
        said = "\n".join([table(results), *notes(results)])
        raise AssertionError("\n\n".join([said, *map(str, causes(results))]))
    if all(result.verdict == "empty" for result in results):
        said = "".join(f"\n{line}" for line in notes(results))
        raise AssertionError(f"nothing was checked: no promise of those asked for applies here{said}")
    return results
