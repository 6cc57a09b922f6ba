"""The packages, found in the tree, and the package's page on the index.

The folders at the root that `llmk` links to are installed under it. The page is README. Only a release knows which
repository it is built in (LLMK_REPOSITORY): its page has links into that, at the release's tag.
"""

import os
import re
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
LINKED = ("ops", "registry", "opcheck")


def page(repository: str | None) -> dict[str, Any]:
    """README and the project's addresses; README alone, with links that lead nowhere, where nobody knows them."""
    readme = (ROOT / "README.md").read_text()
    if repository is None:
        return {"long_description": readme}
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "llmk/__init__.py").read_text(), re.MULTILINE)
    files = f"{repository}/blob/v{version}"
    readme = re.sub(r"\]\((?!https?:|#)", f"]({files}/", readme)
    readme = re.sub(r'(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{files}/\2?raw=true"', readme)
    addresses = {"Source": repository, "Changes": f"{files}/CHANGELOG.md", "Issues": f"{repository}/issues"}
    return {"long_description": readme, "project_urls": addresses}


setup(
    packages=[
        *find_packages(include=["llmk", "llmk.*"], exclude=[f"llmk.{name}*" for name in LINKED]),
        *(
            f"llmk.{name}"
            for name in find_packages(include=[pattern for name in LINKED for pattern in (name, f"{name}.*")])
        ),
    ],
    py_modules=["llmk_pytest"],
    package_dir={f"llmk.{name}": name for name in LINKED},
    long_description_content_type="text/markdown",
    **page(os.environ.get("LLMK_REPOSITORY")),
)
