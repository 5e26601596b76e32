# The types of numbers in messages, for the compiled form of `protobuf.py`.
cimport cython


@cython.locals(digits=bytearray)
cpdef bytes varint(Py_ssize_t number)
cpdef read_varint(message, at)
