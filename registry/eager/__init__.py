"""The short path of plain eager mode: past PyTorch's dispatcher, Triton's launcher and the launching function itself.

`bypass` says when it may be taken, `launcher` launches a kernel that was built before, and `replay` repeats a whole
call that looks like an earlier one. All of it gives the bits of the registered path.
"""
