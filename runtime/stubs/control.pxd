# The types of the rate limiter, for the compiled form of `control.py`.

# Found without a look into the module's dictionary.
cdef object MESSAGES_PER_S, MESSAGE_BYTES


cdef class MessageRateLimiter:
    cdef public object _reactor
    cdef public list _fds
    cdef public double _left, _at_s, _unpaid

    cpdef took(self, size_bytes, double messages=*)
    cpdef settle(self)
