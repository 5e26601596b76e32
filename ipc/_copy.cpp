// Copies large tensors into shared memory, without the interpreter's lock.

#include "sources.h"

#include "copy.h"

namespace {

using Copy = void(char*, const char*, size_t);

// copy(target, offset, source): both must be contiguous buffers, or it raises BufferError. Lets other threads run
// meanwhile.
template <Copy kCopy>
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
    kCopy(static_cast<char*>(target.buf) + offset, static_cast<const char*>(source.buf),
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

PyMethodDef kMethods[] = {{"copy", copy<moonpool::copy>, METH_VARARGS, "Copy a contiguous buffer into another one."},
                          {"copy_past_caches", copy<moonpool::copy_past_caches>, METH_VARARGS,
                           "Copy as a large buffer is copied, whatever its size. For tests."},
                          {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot kSlots[] = {{Py_mod_exec, reinterpret_cast<void*>(moonpool::python::add_sources)}, {0, nullptr}};
PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_copy", "Copies large buffers.", 0, kMethods, kSlots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__copy() { return PyModuleDef_Init(&kModule); }
