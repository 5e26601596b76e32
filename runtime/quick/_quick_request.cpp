#include "_quick_kinds.h"

// A request whose inputs are arrays of the configured dtypes, in shapes that came before; or whose inputs lie in one message of a client.
namespace moonpool::quick {

namespace {

PyObject* no_row() {
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a tensor has shape, dtype, number and place, and in the message an offset and a size");
  return nullptr;
}

}  // namespace

Ref request_of(Ref arrays, PyObject* shapes, bool has_views) {
  const Requests& of = known.request;
  Ref request = of.kind.make();
  if (!request) return Ref();
  PyObject* const object = request.get();
  const bool is_set =
      of.arrays.set(object, arrays.release()) && of.shapes.set_to(object, shapes) &&
      of.batch_size.set(object, known.shapes.batch_size.get(shapes).release()) &&
      of.signature.set(object, known.shapes.signature.get(shapes).release()) && of.details.set_to(object, Py_None) &&
      of.priority.set_to(object, constants.zero) && of.timeout_us.set_to(object, constants.zero) &&
      of.has_views.set_to(object, has_views ? Py_True : Py_False) && of.targets.set_to(object, constants.nowhere) &&
      of.allocator.set_to(object, Py_None) && of.userp.set_to(object, Py_None) && of.wants_wire.set_to(object, Py_False) &&
      of.takes_devices.set_to(object, Py_False) && of.trace.set_to(object, Py_None) && of.durations_ns.set_to(object, Py_None) &&
      of.states.set_to(object, Py_None) &&
      of.queued_ns.set_to(object, constants.zero) && of.attempts.set_to(object, constants.zero) &&
      of.left.set_to(object, Py_False) && of.is_cancelled.set_to(object, Py_False) &&
      of.fills_place.set_to(object, Py_False) && of.responses.set_to(object, constants.zero) &&
      of.responded_ns.set_to(object, constants.zero) && of.response.set_to(object, Py_None);
  if (!is_set) return Ref();
  ++counts.request;
  return request;
}

PyObject* make_request(PyObject* usual, PyObject* inputs, PyObject* shapes) {
  if (!PyDict_CheckExact(inputs) || !PyList_CheckExact(usual) || constants.nowhere == nullptr) Py_RETURN_NONE;
  const Py_ssize_t count = PyList_Size(usual);
  if (PyDict_Size(inputs) != count) Py_RETURN_NONE;
  Ref arrays(PyList_New(count)), key(PyTuple_New(count));
  if (!arrays || !key) return nullptr;
  bool has_views = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const row = PyList_GetItem(usual, i);
    PyObject* const name = row == nullptr ? nullptr : PyTuple_GetItem(row, 0);
    PyObject* const wanted = row == nullptr ? nullptr : PyTuple_GetItem(row, 1);
    if (name == nullptr || wanted == nullptr) return nullptr;
    const Ref array = Ref::to(PyDict_GetItemWithError(inputs, name));
    if (!array && PyErr_Occurred()) return nullptr;
    if (!array || reinterpret_cast<PyObject*>(Py_TYPE(array.get())) != constants.ndarray) Py_RETURN_NONE;
    const Ref dtype(PyObject_GetAttr(array.get(), constants.dtype));
    const Ref base(PyObject_GetAttr(array.get(), constants.base));
    Ref shape(PyObject_GetAttr(array.get(), constants.shape));
    if (!dtype || !base || !shape) return nullptr;
    if (!dtype.is(wanted)) Py_RETURN_NONE;
    has_views = has_views || !base.is_none();
    if (PyTuple_SetItem(key.get(), i, shape.release()) != 0) return nullptr;
    if (PyList_SetItem(arrays.get(), i, Ref::to(array.get()).release()) != 0) return nullptr;
  }
  const Ref found = Ref::to(PyDict_GetItemWithError(shapes, key.get()));
  if (!found && PyErr_Occurred()) return nullptr;
  if (!found || !known.shapes.kind.is(found.get()) || !known.shapes.is_shared.is_true(found.get())) Py_RETURN_NONE;
  return request_of(std::move(arrays), found.get(), has_views).release();
}

PyObject* make_prepared(PyObject* tensors, PyObject* shapes, PyObject* data, int64_t offset, PyObject* sent, bool has_views) {
  const Py_ssize_t count = PyList_CheckExact(tensors) && PyList_CheckExact(sent) ? PyList_Size(tensors) : -1;
  if (count < 0 || !known.shapes.kind.is(shapes)) Py_RETURN_NONE;
  Ref arrays(PyList_New(count));
  if (!arrays) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    // Shape, dtype, the tensor's number in the message, and its place in memory of the client, which it has not.
    PyObject* const row = PyList_GetItem(tensors, i);
    int64_t number = 0, begin = 0;
    if (PyTuple_Size(row) != 4 || !as_number(PyTuple_GetItem(row, 2), &number)) return no_row();
    PyObject* const place = PyList_GetItem(sent, static_cast<Py_ssize_t>(number));
    if (place == nullptr || PyTuple_Size(place) != 2 || !as_number(PyTuple_GetItem(place, 0), &begin)) return no_row();
    const Ref at(PyLong_FromLongLong(offset + begin));
    const Ref arguments(at ? PyTuple_Pack(4, PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1), data, at.get()) : nullptr);
    // numpy checks that the tensor lies within the message.
    Ref array(arguments ? PyObject_Call(constants.ndarray, arguments.get(), nullptr) : nullptr);
    if (!array || PyList_SetItem(arrays.get(), i, array.release()) != 0) return nullptr;
  }
  Ref request = request_of(std::move(arrays), shapes, has_views);
  if (!request || !known.request.wants_wire.set_to(request.get(), Py_True)) return nullptr;
  ++counts.prepared;
  return request.release();
}

}  // namespace moonpool::quick
