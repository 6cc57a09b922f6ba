"""The packages, found in the tree: the folders at the root that `llmk` links to are installed under it."""

from setuptools import find_packages, setup

LINKED = ("ops", "registry", "opcheck")

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
)
