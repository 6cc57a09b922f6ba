"""Writes what came out when `tools.first_actions_sweep` began with each of many actions, as a table."""

import json
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "first_actions.json"
WAYS = {"patched": "`patch`", "experts_implementation": "`experts_implementation`", "backend": "compile backend"}


def first_actions_table() -> str:
    result: dict[str, Any] = json.loads(RESULT.read_text())
    families: dict[str, dict[str, dict[str, str]]] = result["families"]
    lines = [f"| model type | {' | '.join(WAYS.values())} |", "|---|" + "---|" * len(WAYS)]
    for name, ways in sorted(families.items()):
        lines.append(f"| {name} | {' | '.join(_cell(ways.get(way, {})) for way in WAYS)} |")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    actions = dict.fromkeys(action for ways in families.values() for of in ways.values() for action in of)
    date = result["date"]
    head = (
        f"The actions are {', '.join(actions)}. The table has the number of actions whose results are right, with "
        f"{versions}, on {date}; `-` was not run:"
    )
    return "\n".join([head, "", *lines, ""])


def _cell(found: dict[str, str]) -> str:
    """The number that is right; the others by name."""
    if not found:
        return "-"
    not_run = [action for action, text in found.items() if text.startswith("not run")]
    wrong = [action for action, text in found.items() if text != "right" and action not in not_run]
    parts = [f"{len(found) - len(not_run) - len(wrong)} right"]
    parts += [f"does not run without llmk: {', '.join(not_run)}"] * bool(not_run)
    parts += [f"**wrong: {', '.join(wrong)}**"] * bool(wrong)
    return "; ".join(parts)
