"""`python -m llmk.hub OUT`: llmk as a kernel repository for the Hugging Face Hub, into a new folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmk.hub import write


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llmk.hub", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder, empty or not there")
    parser.add_argument("--repository", default="OWNER/llmk", help="its name on the Hub, for the card")
    parser.add_argument("--version", type=int, default=1, help="of the kernel on the Hub, a whole number")
    asked = parser.parse_args(arguments)
    try:
        variant = write(asked.out, asked.repository, asked.version)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    count = sum(1 for path in variant.rglob("*.py"))
    print(f"{variant}: {count} files. To load it here: kernels.get_local_kernel(pathlib.Path({str(asked.out)!r}))")
    print(f"To publish it: hf upload {asked.repository} {asked.out} --repo-type kernel --revision v{asked.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
