# The types of distributions, for the compiled form of `distributions.py`.
cimport cython

cdef object bisect_left


@cython.final
cdef class BucketCounts:
    cdef public object bounds, total
    cdef public list counts

    cpdef add(self, value, long long count=*)
