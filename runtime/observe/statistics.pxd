# The types of what `statistics.py` counts, for its compiled form.

cimport cython


@cython.final
cdef class Statistics:
    cdef public object name, version, tags, responses, summaries, cache
    cdef public tuple bounds_ns
    cdef public list by_duration
    cdef public dict fail_counts, _batches
    cdef public long long execution_count, fail_count, inference_count, last_inference_ms, success_count
    # Sums over requests: where thousands wait at a time, they outgrow 64 bits within months.
    cdef public object fail_ns, infer_ns, input_ns, output_ns, queue_ns, success_ns

    @cython.locals(batch=list)
    cpdef record_batch(
        self, long long now_ms, long long batch_rows, long long requests, long long rows, long long success_ns,
        long long queue_ns, long long input_ns, long long infer_ns, long long output_ns,
    )
    cpdef list _of_size(self, long long rows)
