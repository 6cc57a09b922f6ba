"""The fast path of plain eager mode, without PyTorch's dispatcher, Triton's launcher and the launching function.

`bypass` says when a call may take it, `launcher` launches a kernel that was built before, and `launch_cache` repeats
the launches of a call that looks like an earlier one. All of it gives the bits of the registered path.
"""
