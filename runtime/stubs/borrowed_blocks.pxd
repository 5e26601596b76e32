# What the compiled form of `borrowed_blocks.py` calls without a look into dictionaries.

from moonpool.ipc.port._port cimport LentBlocks as LentType

cdef object Block, block_bytes

cdef bint _put_aside(LentType blocks, block) except -1
