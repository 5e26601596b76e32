// The objects of Python's with which the compiled forms of a stub work: tensors, responses, and the memory of the
// runtime's end.
//
// Theory of operation. `_stub_port.pyx` answers batches, `_stub_port_calls.cpp` asks other models. What comes from the
// model may have any type, and code of the model runs when an object of its own class is compared, hashed or destroyed.
// So only objects of the exact classes are looked into, and each one that is used after another call is kept by a
// reference. A method that may be called from several threads keeps no state between two calls into Python. The arena
// is used by the thread that holds `Regions._turn`.
#pragma once

#include "_stub_port_fields.h"  // first, as Python wants it

#include <array>
#include <vector>

#include "port.h"
#include "wire.h"

namespace moonpool::python {

inline Ref number(uint64_t value) { return Ref(PyLong_FromUnsignedLongLong(value)); }

// Returns the number that a slot holds, or -1, perhaps with an exception, if it holds no small one.
inline Py_ssize_t number_in(PyObject* object) {
  return object != nullptr && PyLong_CheckExact(object) ? PyLong_AsSsize_t(object) : -1;
}

// The objects that an instance of a class of ours works with, each by its name in a dictionary.
template <class Part, size_t count>
class Parts {
 public:
  explicit constexpr Parts(const std::array<const char*, count>& names) : names_(names) {}
  // Takes the parts. Sets an exception and returns false if one is missing.
  bool take(PyObject* parts) {
    for (size_t i = 0; i < count; ++i) {
      parts_[i] = Ref::to(PyDict_GetItemString(parts, names_[i]));
      if (!parts_[i]) {
        PyErr_Format(PyExc_TypeError, "there is no %s", names_[i]);
        return false;
      }
    }
    return true;
  }
  PyObject* operator[](Part which) const { return parts_[static_cast<size_t>(which)].get(); }
  int traverse(visitproc visit, void* arg) const {
    for (const Ref& part : parts_) Py_VISIT(part.get());
    return 0;
  }

 private:
  const std::array<const char*, count>& names_;
  std::array<Ref, count> parts_;
};

#define MOONPOOL_MEMBER(name) name,
#define MOONPOOL_TEXT(name) #name,

// The slots that are used.
struct Leases {
  Kind kind;
  Field give_back{"give_back"}, token{"token"}, region{"region"}, offset{"offset"};
};
struct Tensors {
  Kind kind;
  Field name{"_name"}, datatype{"_datatype"}, shape{"_shape"}, array{"_array"}, wire{"_wire"}, strings{"_strings"};
};
struct Responses {
  Kind kind;
  Field outputs{"_outputs"}, error{"_error"}, parameters{"_parameters"};
};
struct Regions {
  Kind kind;
  Field id{"id"}, buffer{"buffer"}, size_bytes{"size_bytes"};
};
struct Blocks {
  Kind kind;
  Field region{"region"}, offset{"offset"}, size_bytes{"size_bytes"}, holds{"holds"};
};
struct ExtentsKind {
  Kind kind;
  Field live{"live"};
};
struct Arenas {
  Kind kind;
  Field extents{"_extents"};
};

// Adds the type of `_stub_port_calls.cpp` to the module. Returns -1 with an error set, else 0.
int add_asker(PyObject* module);

class Objects {
 public:
  int traverse(visitproc visit, void* arg) const { return shared_.traverse(visit, arg); }

 protected:
#define MOONPOOL_SHARED(PART)                                                                                       \
  PART(regions) PART(request_regions) PART(add_returned) PART(returned) PART(take_returned) PART(allocate)          \
  PART(acquire) PART(release) PART(arena) PART(lease) PART(array) PART(byte) PART(tensor) PART(region) PART(block) \
  PART(extents) PART(response) PART(no_device) PART(spares)
  enum class Shared : size_t { MOONPOOL_SHARED(MOONPOOL_MEMBER) kCount };
  static constexpr std::array<const char*, static_cast<size_t>(Shared::kCount)> kShared = {MOONPOOL_SHARED(MOONPOOL_TEXT)};

  // Takes the parts and learns the slots of their classes. Sets an exception and returns false if something is missing.
  bool know_objects(PyObject* parts) {
    if (!shared_.take(parts)) return false;
    devices_ = Ref(PyUnicode_InternFromString("devices"));
    at_once_ = Ref(PyTuple_Pack(1, Py_False));
    zero_ = Ref(PyLong_FromLong(0));
    one_ = Ref(PyLong_FromLong(1));
    PyObject* arena = reinterpret_cast<PyObject*>(Py_TYPE(part(Shared::arena)));
    return devices_ && at_once_ && zero_ && one_ &&
           lease_.kind.know_slots(part(Shared::lease),
                                  {&lease_.give_back, &lease_.token, &lease_.region, &lease_.offset}) &&
           know_type(tensor_.kind, part(Shared::tensor),
                 {&tensor_.name, &tensor_.datatype, &tensor_.shape, &tensor_.array, &tensor_.wire, &tensor_.strings}) &&
           know_type(response_.kind, part(Shared::response),
                     {&response_.outputs, &response_.error, &response_.parameters}) &&
           know_type(region_.kind, part(Shared::region), {&region_.id, &region_.buffer, &region_.size_bytes}) &&
           know_type(block_.kind, part(Shared::block),
                     {&block_.region, &block_.offset, &block_.size_bytes, &block_.holds}) &&
           know_type(extents_.kind, part(Shared::extents), {&extents_.live}) &&
           know_type(arena_.kind, arena, {&arena_.extents});
  }

  static bool know_type(Kind& kind, PyObject* type, std::initializer_list<Field*> slots) {
    const Ref sample(PyType_GenericNew(reinterpret_cast<PyTypeObject*>(type), nullptr, nullptr));
    return sample && kind.know_slots(sample.get(), slots);
  }

  PyObject* part(Shared which) const { return shared_[which]; }

  // Returns true while no memory of a device was used. Returns false, perhaps with an exception, if it was.
  bool has_no_devices() const {
    const Ref devices(PyObject_GetAttr(part(Shared::regions), devices_.get()));
    return devices.is_none();
  }

  bool add_returned(const wire::Place& place) const {
    const Ref region = number(place.region), offset = number(place.offset);
    if (!region || !offset) return false;
    const Ref pair(PyTuple_Pack(2, region.get(), offset.get()));
    return pair && Ref(PyObject_CallFunctionObjArgs(part(Shared::add_returned), pair.get(), nullptr));
  }

  // Does what `Region.lease` does. numpy checks that the block lies within the buffer.
  Ref lease_on(const Ref& region, const Ref& buffer, const Ref& offset, uint64_t size, const Ref& place, PyObject* give_back) const {
    const Ref size_bytes = number(size);
    const Ref shape(size_bytes ? PyTuple_Pack(1, size_bytes.get()) : nullptr);
    if (!shape) return Ref();
    Ref lease(PyObject_CallFunctionObjArgs(lease_.kind.type(), shape.get(), part(Shared::byte), buffer.get(), offset.get(), nullptr));
    if (lease) {
      lease_.token.set_to(lease.get(), place.get());
      lease_.region.set_to(lease.get(), region.get());
      lease_.offset.set_to(lease.get(), offset.get());
      lease_.give_back.set_to(lease.get(), give_back);
    }
    return lease;
  }

  // Does what `Regions.allocate` does. Mostly that is to take a block of an earlier answer that came back, which is
  // done here if no other thread has the arena at this moment. Else a signal handler may run and raise, and has the
  // error then; the block is given back. Returns nothing with an exception.
  Ref allocate(PyObject* size) const {
    const Ref is_ours(PyObject_Call(part(Shared::acquire), at_once_.get(), nullptr));
    if (!is_ours) return Ref();
    if (is_ours.get() == Py_True) {
      Ref block = spare(number_in(size));
      // The lock is given back in any case; no exception of ours is set beside that.
      if (PyErr_Occurred() != nullptr) PyErr_Clear();
      const Ref released(PyObject_CallNoArgs(part(Shared::release)));
      if (!released || block) return released ? std::move(block) : Ref();
    }
    const Ref taken(PyList_New(0));
    Ref block(taken ? PyObject_CallFunctionObjArgs(part(Shared::allocate), size, part(Shared::no_device), taken.get(), nullptr) : nullptr);
    if (!block && taken && PyList_Size(taken.get()) > 0) {
      const KeptError kept;
      give_back(PyList_GetItem(taken.get(), 0));
    }
    return block;
  }

  // Gives back a block that was allocated for a message that is not sent. Returns false with an exception.
  bool give_back(PyObject* block) const {
    const Ref region = block_.region.get(block), offset = block_.offset.get(block), id = region ? region_.id.get(region.get()) : Ref();
    const Ref place(id && offset ? PyTuple_Pack(2, id.get(), offset.get()) : nullptr);
    return place && Ref(PyObject_CallFunctionObjArgs(part(Shared::add_returned), place.get(), nullptr));
  }

  // Puts the blocks aside that came back, and returns the last one of this size class. Returns nothing if Python has to
  // do it.
  Ref spare(Py_ssize_t size) const {
    PyObject* const all = arena_.extents.peek(part(Shared::arena));
    PyObject *first = nullptr, *extents = nullptr;
    Py_ssize_t at = 0;
    if (size < 0 || all == nullptr || !PyDict_CheckExact(all) || !PyDict_Next(all, &at, &first, &extents)) return Ref();
    PyObject* const live = extents_.kind.is(extents) ? extents_.live.peek(extents) : nullptr;
    if (live == nullptr || !PyDict_CheckExact(live)) return Ref();
    for (Py_ssize_t left = PyObject_Size(part(Shared::returned)); left > 0; --left) {
      const Ref place(PySequence_GetItem(part(Shared::returned), 0));
      if (!place || !PyTuple_CheckExact(place.get()) || PyTuple_Size(place.get()) != 2) return Ref();
      if (number_in(PyTuple_GetItem(place.get(), 0)) != number_in(first)) return Ref();
      const Ref block = Ref::to(PyDict_GetItemWithError(live, PyTuple_GetItem(place.get(), 1)));
      if (!block || !block_.kind.is(block.get()) || number_in(block_.holds.peek(block.get())) != 1) return Ref();
      const Ref aside = put_aside_with(block_.size_bytes.peek(block.get()));
      if (!aside || PyList_Append(aside.get(), block.get()) < 0) return Ref();
      block_.holds.set_to(block.get(), zero_.get());
      if (!take_first()) return Ref();
    }
    const Ref key = number(block_bytes(static_cast<uint64_t>(size)));
    PyObject* const aside = key ? PyDict_GetItemWithError(part(Shared::spares), key.get()) : nullptr;
    if (aside == nullptr || !PyList_CheckExact(aside) || PyList_Size(aside) < 1) return Ref();
    const Py_ssize_t last = PyList_Size(aside) - 1;
    Ref block = Ref::to(PyList_GetItem(aside, last));
    if (!block_.kind.is(block.get()) || PyList_SetSlice(aside, last, last + 1, nullptr) < 0) return Ref();
    block_.holds.set_to(block.get(), one_.get());
    return block;
  }

  // Returns the list of blocks of this size that were put aside.
  Ref put_aside_with(PyObject* size) const {
    if (size == nullptr) return Ref();
    const Ref key = Ref::to(size);
    Ref aside = Ref::to(PyDict_GetItemWithError(part(Shared::spares), key.get()));
    if (aside || PyErr_Occurred() != nullptr) return aside;
    aside = Ref(PyList_New(0));
    return aside && PyDict_SetItem(part(Shared::spares), key.get(), aside.get()) == 0 ? std::move(aside) : Ref();
  }

  // Takes the first place out of those that came back.
  bool take_first() const { return static_cast<bool>(Ref(PyObject_CallNoArgs(part(Shared::take_returned)))); }

  Leases lease_;
  Tensors tensor_;
  Responses response_;
  Regions region_;
  Blocks block_;
  ExtentsKind extents_;
  Arenas arena_;

 private:
  Parts<Shared, kShared.size()> shared_{kShared};
  Ref devices_, at_once_, zero_, one_;
};

}  // namespace moonpool::python
