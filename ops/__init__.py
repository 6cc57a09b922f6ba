"""The operators, a folder for each family of them. Importing this package registers all of them.

A file whose name begins with an underscore holds no operator: those that need it import it.
"""

import importlib
import pkgutil

_names = (module.name for module in pkgutil.walk_packages(__path__, f"{__name__}."))
for _name in sorted(_names, key=lambda name: name.rpartition(".")[2]):
    if not _name.rpartition(".")[2].startswith("_"):
        importlib.import_module(_name)
