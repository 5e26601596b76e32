# The types of messages of gRPC as bytes, for the compiled form of `wire.py`.
cimport cython

cdef unsigned long long _RAW_INPUT_TAG
cdef unsigned int _VARINT, _FIXED64, _LENGTH, _FIXED32
cdef Py_ssize_t _TAG_BYTES


@cython.final
cdef class FieldReader:
    cdef public bytes message
    cdef const unsigned char* _bytes
    cdef Py_ssize_t _at, _end, _field
    cdef bint _is_cut
    cdef public Py_ssize_t begin, size
    cdef public unsigned long long number, tag

    @cython.locals(tag=cython.ulonglong, size=cython.ulonglong, left=cython.ulonglong, kind=cython.uint)
    cpdef bint next(self) except -1
    @cython.locals(number=cython.ulonglong, byte=cython.ulonglong, shift=cython.int)
    cdef unsigned long long _varint(self) except? 0
    cpdef FieldReader inner(self, FieldReader reader)
    cpdef text(self)
    @cython.locals(reader=FieldReader)
    cpdef bint numbers(self, list found, Py_ssize_t most) except -1
    cpdef field(self)


cdef _signed(unsigned long long number)
cpdef bytes text_field(int number, bytes text)
@cython.locals(pieces=list)
cpdef list join(bytes head, list tensors, bytes tag=*)
