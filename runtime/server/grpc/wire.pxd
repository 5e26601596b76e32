# The types of messages of gRPC as bytes, for the compiled form of `wire.py`.
cimport cython


@cython.locals(
    end=cython.Py_ssize_t, at=cython.Py_ssize_t, begin=cython.Py_ssize_t, field=cython.Py_ssize_t,
    fields=cython.Py_ssize_t, size=cython.Py_ssize_t, tag=cython.Py_ssize_t, kind=cython.int, pieces=list,
    tensors=list,
)
cpdef split(bytes message, bint until_tensor=*)
cpdef varint(message, at)
@cython.locals(digits=bytearray)
cpdef bytes length(Py_ssize_t size)
cpdef bytes text_field(int number, bytes text)
@cython.locals(pieces=list)
cpdef list join(bytes head, list tensors, bytes tag=*)
