# The types of the checks of details, for the compiled form of `details.py`.

# Found without a look into the module's dictionary.
cdef object isfinite

cdef _whole(str name, value, high, also=*)
cdef _text(str name, value, length)
cpdef check_finite(parameters)
cdef dict _parameters(parameters)
