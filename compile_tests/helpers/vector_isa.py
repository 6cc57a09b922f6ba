"""Imported, it has Inductor find out what vectors the processor has, once for all processes that are forked afterwards.

Inductor compiles and loads five programs to know, which takes 2 seconds, and 14 in an empty cache.
"""

from torch._inductor.cpu_vec_isa import valid_vec_isa_list

valid_vec_isa_list()
