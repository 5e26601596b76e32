# The types of what the protocols count, for the compiled form of `meter.py`.
cimport cython

from moonpool.runtime.observe._distributions cimport BucketCounts as BucketsType

# Found without a look into the module's dictionary.
cdef object monotonic_ns


@cython.final
cdef class ClientRequests:
    cdef object _lock
    cdef BucketsType _durations
    cdef long long _failures

    cpdef ended(self, long long received_ns, bint has_failed)


@cython.final
cdef class Meter:
    cdef public ClientRequests clients
    cdef dict _answers
    cdef long long _opened, _closed

    cpdef answered(self, status)
