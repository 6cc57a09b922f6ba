"""`python -m benchmarks.opcheck_summary FILE`: opcheck's report, as `--json` writes it, on a line for each operator.

A line holds an operator on a path in a dtype. For each promise, in the order of the list at the top, it has the number
of calls and the seconds, null where the promise was not asked for; `broken` has the messages of those that are not
kept, `wrong` the results that they name, if they do, `accepted` a baseline's reasons, and `no_kernel` why none was
interpreted. `results_of` gives the results back, with seconds to a hundredth. The file is replaced.
"""

import argparse
import json
from pathlib import Path
from typing import Any

KEY = ("op", "device", "dtype", "path")
DETAILS = ("wrong", "accepted", "no_kernel")
"""The parts of a result that say something in a few words, mostly nothing."""


def summary(report: dict[str, Any]) -> str:
    results: list[dict[str, Any]] = report["results"]
    promises = list(dict.fromkeys(result["promise"] for result in results))
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result[name] for name in KEY), {})[result["promise"]] = result
    lines = [json.dumps(_row(key, group, promises), separators=(",", ":")) for key, group in groups.items()]
    about = {name: value for name, value in report.items() if name != "results"} | {"promises": promises}
    head = json.dumps(about, indent=1).removesuffix("\n}")
    return f'{head},\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def _row(key: tuple[str, ...], group: dict[str, dict[str, Any]], promises: list[str]) -> dict[str, Any]:
    found = [group.get(promise) for promise in promises]
    row = dict(zip(KEY, key, strict=True)) | {
        "calls": [result and result["calls"] for result in found],
        "seconds": [result and round(result["seconds"], 2) for result in found],
        "broken": {name: result["message"] for name, result in group.items() if not result["passed"]},
    }
    for field in DETAILS:
        given = {name: result[field] for name, result in group.items() if result[field]}
        row |= {field: given} if given else {}
    return row


def results_of(summary: dict[str, Any]) -> dict[str, Any]:
    """The report of a summary: a result for each operator, path, dtype and promise."""
    results = []
    for row in summary["rows"]:
        key, broken = {name: row[name] for name in KEY}, row["broken"]
        for promise, calls, seconds in zip(summary["promises"], row["calls"], row["seconds"], strict=True):
            if calls is not None:
                verdict = {"passed": promise not in broken, "message": broken.get(promise, "")}
                details = {field: row.get(field, {}).get(promise, "") for field in DETAILS}
                took = {"seconds": seconds, "calls": calls, **details}
                results.append({**key, "promise": promise, **verdict, **took})
    return {name: value for name, value in summary.items() if name not in ("promises", "rows")} | {"results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    file.write_text(summary(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
