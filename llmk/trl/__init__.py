"""llmk in TRL's trainers: `patch(trainer)` is all there is to do.

Needs the package `trl`, 1.16; nothing else in llmk does.
"""

from llmk._loading import require

require("trl", "llmk.trl", "'llmk[trl]'")

from llmk.trl.patch import Report, patch

__all__ = ["Report", "patch"]
