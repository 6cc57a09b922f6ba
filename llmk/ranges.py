"""The versions of other packages that llmk is tested with, from its metadata.

pyproject.toml declares the range of a package in the extra of that package's name. A checkout that nobody installed has
no metadata, and there every version is taken for one that was tested. `packaging` comes with all of these packages.
"""

import warnings
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


def declared(distribution: str) -> "SpecifierSet":
    """The versions of a package that llmk's extra of its name asks for; all of them where nothing is declared."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        requirements = [Requirement(line) for line in metadata.requires("llmk") or ()]
    except metadata.PackageNotFoundError:
        return SpecifierSet()
    extra = {"extra": distribution}
    for wanted in requirements:
        if wanted.name == distribution and wanted.marker is not None and wanted.marker.evaluate(extra):
            return wanted.specifier
    return SpecifierSet()


def complaint(distribution: str, module: str) -> str | None:
    """A line that names a version outside the declared ones; None where it is one of them.

    Raises:
        PackageNotFoundError: The package is not installed.
    """
    version = metadata.version(distribution)
    wanted = declared(distribution)
    if wanted.contains(version, prereleases=True):
        return None
    return f"{distribution}: expected {wanted}, the versions that {module} is tested with, got {version}"


def check_version(distribution: str, module: str) -> None:
    """Warn of a version newer than those declared, and refuse an older one. One that is not there has no version.

    Raises:
        ImportError: The version is older than all that are declared.
    """
    from packaging.specifiers import SpecifierSet

    try:
        said = complaint(distribution, module)
    except metadata.PackageNotFoundError:
        return
    if said is None:
        return
    lower = SpecifierSet(",".join(str(bound) for bound in declared(distribution) if bound.operator.startswith(">")))
    if not lower.contains(metadata.version(distribution), prereleases=True):
        raise ImportError(f"{said}: pip install 'llmk[{distribution}]'")
    warnings.warn(said, stacklevel=3)
