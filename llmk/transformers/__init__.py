"""llmk in Hugging Face models: `patch(model)` is all there is to do.

Needs the package `transformers`, 5.17 or newer; nothing else in llmk does.
"""

from llmk._loading import require
from llmk.ranges import check_version

require("transformers", "llmk.transformers", "'llmk[transformers]'")
check_version("transformers", "llmk.transformers")  # before what an older version lacks

from llmk.transformers import experts as experts  # which registers them
from llmk.transformers.auto import AutoModelForCausalLM, PatchCallback
from llmk.transformers.expert_parallel import expert_parallel
from llmk.transformers.kernel_config import kernel_config
from llmk.transformers.patch import patch
from llmk.transformers.report import Entry, Report
from llmk.transformers.tensor_parallel import tensor_parallel

__all__ = [
    "AutoModelForCausalLM",
    "Entry",
    "PatchCallback",
    "Report",
    "expert_parallel",
    "kernel_config",
    "patch",
    "tensor_parallel",
]
