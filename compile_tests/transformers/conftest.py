"""What tests of patched models begin with."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Make tensors on the device, with nothing compiled before and no advice of transformers'."""
    pytest.importorskip("transformers").logging.set_verbosity_error()
    torch._dynamo.reset()
    with device, torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
