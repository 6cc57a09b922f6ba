"""What docs/frameworks.md says of training frameworks, with the frameworks themselves.

`python -m tools.frameworks` installs each release named here, without what it depends on, into a folder of its own,
runs the tests of the page with it, and writes what came out to docs/frameworks.json. The page has these releases.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "frameworks.json"
TESTS = "compile_tests/docs/test_frameworks.py"
LONGEST = 1800  # seconds of the tests of a framework

# By the word in the names of its tests: its release, and what importing the parts that the page names takes besides.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torchtitan": ("torchtitan==0.3.0", "spmd-types==0.2.3", "tyro", "docstring_parser", "typeguard", "shtab"),
    "torchtune": (
        "torchtune==0.6.1",
        "torchao==0.9.0",
        "omegaconf",
        "antlr4-python3-runtime==4.9.*",
        "sentencepiece",
        "tiktoken",
    ),
    "axolotl": ("axolotl==0.19.0", "addict"),
    "llama_factory": ("llamafactory==0.9.5",),
    "ms_swift": ("ms-swift==4.6.0", "modelscope", "modelscope-hub", "json-repair"),
    "lightning": ("lightning==2.6.6", "lightning-utilities", "torchmetrics"),
    "nemo_automodel": ("nemo-automodel==0.7.0",),
}


def install(packages: tuple[str, ...], folder: Path) -> None:
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == "\n".join(packages):
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*command, *packages], check=True, env=os.environ | {"PIP_CONSTRAINT": ""})
    stamp.write_text("\n".join(packages))


def run_tests(name: str, folder: Path) -> dict[str, object]:
    """Return whether every test of a framework ran and passed, and the last line that pytest wrote."""
    settings = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-rs", TESTS, "-k", name]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=LONGEST)
    said = done.stdout.strip().splitlines()[-1]
    passed = done.returncode == 0 and "skipped" not in said
    if not passed:
        sys.stderr.write(f"{done.stdout}{done.stderr}")
    return {"passed": passed, "said": said.partition(",")[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", choices=[*FRAMEWORKS, []], help="all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / ".frameworks", help="where they are installed")
    asked = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    beside = {name: metadata.version(name) for name in ("torch", "transformers")}
    for name in asked.frameworks or FRAMEWORKS:
        folder = asked.folder.resolve() / name
        install(FRAMEWORKS[name], folder)
        outcome = run_tests(name, folder)
        version = FRAMEWORKS[name][0].partition("==")[2]
        results[name] = {"version": version, **beside, "date": date.today().isoformat(), **outcome}
        print(f"{name:<16}{version:<10}{'ok' if outcome['passed'] else 'FAILED'}  {outcome['said']}", flush=True)
        RESULT.write_text(json.dumps({name: results[name] for name in sorted(results)}, indent=1) + "\n")
    return 0 if all(results[name]["passed"] for name in asked.frameworks or FRAMEWORKS) else 1


if __name__ == "__main__":
    sys.exit(main())
