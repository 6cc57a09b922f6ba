"""Patches verl when it is imported: the name that verl's option `external_lib` takes."""

from llmk.verl import patch

patch()
