// The objects of Python's that a stub's port makes and looks into: requests, and tensors of both directions.
//
// `_stub_port.pyx` has the steps. Everything here needs the interpreter's lock. But for `block`, it calls no code of
// Python's or the model's.
#pragma once

#include "_stub_port_objects.h"  // first, as Python wants it

namespace moonpool::python {

// The slots that are used.
struct Requests {
  Kind kind;
  Field inputs{"_inputs"}, names{"_requested_output_names"}, origin{"_origin"}, preferred_memory{"_preferred_memory"},
      release_flags{"_release_flags"}, reply{"_reply"}, row{"_row"};
};
struct Batches {
  Kind kind;
  Field places{"places"}, has_copies{"has_copies"}, targets{"targets"}, kept{"kept"}, lent{"lent"};
};
struct Answers {
  Kind kind;
  Field blocks{"blocks"}, layouts{"layouts"}, remarks{"remarks"}, states{"states"};
};
struct Conversations {
  Kind kind;
  Field turn{"turn"};
};

class BatchObjects : public Objects {
 public:
  // Learns the slots of the classes of these objects. Sets an exception and returns false if something is missing.
  bool know(PyObject* parts, PyObject* request, PyObject* batch, PyObject* answer, PyObject* conversation) {
    const auto type = [](PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); };
    sample_ = Ref::to(request);
    return know_objects(parts) &&
           know_type(request_.kind, type(request),
                      {&request_.inputs, &request_.names, &request_.origin, &request_.preferred_memory,
                       &request_.release_flags, &request_.reply, &request_.row}) &&
           know_type(batch_.kind, type(batch),
                      {&batch_.places, &batch_.has_copies, &batch_.targets, &batch_.kept, &batch_.lent}) &&
           know_type(answer_.kind, type(answer),
                      {&answer_.blocks, &answer_.layouts, &answer_.remarks, &answer_.states}) &&
           know_type(conversation_.kind, type(conversation), {&conversation_.turn});
  }

  using Objects::block_, Objects::give_back, Objects::lease_, Objects::region_, Objects::response_, Objects::tensor_;
  Requests request_;
  Batches batch_;
  Answers answer_;
  Conversations conversation_;

  // An input of a request. Strings and BF16 have their bytes in `array`.
  PyObject* tensor(PyObject* name, PyObject* datatype, PyObject* shape, PyObject* array, bool is_raw) const {
    Ref made = tensor_.kind.make();
    if (!made) return nullptr;
    tensor_.name.set_to(made.get(), name);
    tensor_.datatype.set_to(made.get(), datatype);
    tensor_.shape.set_to(made.get(), shape);
    tensor_.array.set_to(made.get(), is_raw ? Py_None : array);
    tensor_.wire.set_to(made.get(), is_raw ? array : Py_None);
    if (is_raw) tensor_.strings.set_to(made.get(), Py_None);
    return made.release();
  }

  // A request of this batch; `row` is null for one without details.
  PyObject* request(PyObject* inputs, PyObject* origin, PyObject* row) const {
    Ref made = request_.kind.copy(sample_.get());
    if (!made) return nullptr;
    request_.inputs.set_to(made.get(), inputs);
    request_.origin.set_to(made.get(), origin);
    if (row != nullptr) request_.row.set_to(made.get(), row);
    return made.release();
  }

  // Returns a block for so many bytes. This is the one function here that may call code of Python's.
  PyObject* block(PyObject* size) const { return allocate(size).release(); }

 private:
  Ref sample_;
};

}  // namespace moonpool::python
