"""`triton.jit` with types: a kernel is launched on a grid, and a function that kernels call gives what it returns."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class Kernel:
        def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def jit(fn: Callable[..., Any]) -> Kernel: ...
else:
    import triton

    jit = triton.jit
