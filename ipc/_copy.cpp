// Copies large buffers past the processor's caches.
//
// A tensor of some megabytes is written by one process and read by another, later and perhaps on another core, so it need not go
// through the caches of the writer. Stores that bypass them save reading the old contents of each line, and leave what lies in the
// caches alone. The C library does this only above three quarters of the last cache, which a virtual machine shares with
// strangers. Where the processor is none with SSE2, this is `memcpy`.

#include "objects.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

#ifdef __SSE2__
constexpr size_t kWord = sizeof(__m128i), kLine = 4 * kWord;
// The pages from which lines are copied in turn: the processor fetches each of them ahead, and so reads more at a time.
constexpr size_t kPage = 4096, kPages = 4;

void copy_line(char* target, const char* source) {
  auto* to = reinterpret_cast<__m128i*>(target);
  const auto* from = reinterpret_cast<const __m128i*>(source);
  const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}
#endif

void copy_past_caches(char* target, const char* source, size_t size) {
#ifdef __SSE2__
  // Stores past the caches need aligned addresses.
  size_t done = std::min(-reinterpret_cast<uintptr_t>(target) % kLine, size);
  std::memcpy(target, source, done);
  for (; size - done >= kPages * kPage; done += kPages * kPage) {
    for (size_t line = 0; line < kPage; line += kLine) {
      for (size_t page = 0; page < kPages; ++page) {
        const size_t at = done + page * kPage + line;
        copy_line(target + at, source + at);
      }
    }
  }
  // Other processes must not see a message about this memory earlier than its contents.
  _mm_sfence();
  std::memcpy(target + done, source + done, size - done);
#else
  std::memcpy(target, source, size);
#endif
}

// copy(target, offset, source): both must be contiguous buffers, or it raises BufferError. Lets other threads run meanwhile.
PyObject* copy(PyObject*, PyObject* arguments) {
  PyObject *to = nullptr, *from = nullptr;
  Py_ssize_t offset = 0;
  if (!PyArg_ParseTuple(arguments, "OnO:copy", &to, &offset, &from)) return nullptr;
  Py_buffer target, source;
  if (PyObject_GetBuffer(to, &target, PyBUF_WRITABLE) != 0) return nullptr;
  if (PyObject_GetBuffer(from, &source, PyBUF_SIMPLE) != 0) {
    PyBuffer_Release(&target);
    return nullptr;
  }
  const bool fits = offset >= 0 && offset <= target.len && source.len <= target.len - offset;
  if (fits) {
    Py_BEGIN_ALLOW_THREADS
    copy_past_caches(static_cast<char*>(target.buf) + offset, static_cast<const char*>(source.buf),
                     static_cast<size_t>(source.len));
    Py_END_ALLOW_THREADS
  } else {
    PyErr_Format(PyExc_ValueError, "%zd bytes at %zd do not fit into %zd", source.len, offset, target.len);
  }
  PyBuffer_Release(&source);
  PyBuffer_Release(&target);
  if (!fits) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {{"copy", copy, METH_VARARGS, "Copy a contiguous buffer into another one, past the caches."},
                          {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot kSlots[] = {{Py_mod_exec, reinterpret_cast<void*>(moonpool::python::add_sources)}, {0, nullptr}};
PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_copy", "Copies large buffers.", 0, kMethods, kSlots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__copy() { return PyModuleDef_Init(&kModule); }
