"""llmk in TRL's trainers: `patch(trainer)` is all there is to do.

Needs the package `trl`, 1.16; nothing else in llmk does.
"""

from llmk._loading import require
from llmk.ranges import check_version

require("trl", "llmk.trl", "'llmk[trl]'")
check_version("trl", "llmk.trl")  # before what an older version lacks

from llmk.trl.patch import Report, patch

__all__ = ["Report", "patch"]
