# The types of heads, for the compiled form of `head.py`.
cimport cython

# Found without a look into the module's dictionary.
cdef object _LENGTHS


@cython.final
cdef class Head:
    cdef object __weakref__
    cdef public object content_length, header_length, forwarded, method, plan, raw_headers, target, version
    cdef public dict headers
    cdef public bint expects_continue, has_repeated, is_chunked, keeps_alive

    cpdef Head of_lengths(self, content_length, header_length)


@cython.final
cdef class HeadParser:
    cdef public Head head
    cdef object _parser
    cdef bytes _target
    cdef list _headers

    cpdef feed(self, bytes piece)
    cpdef Head finish(self)


@cython.final
cdef class Heads:
    cdef object _known, _forms

    @cython.locals(head=Head, parts=list, lengths=list, form=tuple)
    cpdef Head read(self, bytes raw, parser)
