# The types of the checks of details, for the compiled form of `details.py`.

# Found without a look into the module's dictionary.
cdef object ANY_MEMORY, Details, LONG, MAX_PARAMETERS, SHORT, _NONE, _UINT32, _UINT64, isfinite

cdef _whole(str name, value, high, also=*)
cdef _text(str name, value, length)
cpdef with_id(details, str request_id)
cpdef check_finite(parameters)
cdef dict _parameters(parameters)
