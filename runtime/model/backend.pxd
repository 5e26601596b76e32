# The types of an instance, for the compiled form of `backend.py`.

cdef class ModelInstance:
    cdef object __weakref__
    cdef public object backend, broken, device_id, host_policy, is_healthy, kind, model, name, port, rate_limits
    cdef public object recycle, report_broken, report_grown, report_worn, respond, state
    cdef public double serves_until
    cdef public long long served
    cdef public bint accepts, blocks
