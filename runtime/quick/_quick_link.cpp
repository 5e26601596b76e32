#include "_quick_kinds.h"

#include <vector>

#include "port.h"
#include "wire.h"

// What the forms of calls take of a link, and its port, which does the usual batch (ipc/port.py).
namespace moonpool::quick {
namespace {

// `BorrowedBlocks.allocate` of a block that is kept, where the block that was released last has that size. Returns empty, and has
// done nothing, for any other.
Ref lend_spare(PyObject* blocks, int64_t size_bytes) {
  const NoCollection no_collection;
  const BorrowedBlocksKind& of = known.borrowed_blocks;
  if (!of.kind.is(blocks) || is_locked(of.lock.get(blocks))) return Ref();
  const Ref arena = of.arena.get(blocks), kept = of.kept.get(blocks);
  if (size_of(of.returned.get(blocks)) != 0 || !known.arena.kind.is(arena.get()) || !kept) return Ref();
  const Ref all = known.arena.extents.get(arena.get());
  PyObject *id = nullptr, *first = nullptr;
  Py_ssize_t at = 0;
  if (!all || !PyDict_Next(all.get(), &at, &id, &first) || !known.extents.kind.is(first)) return Ref();
  const Ref spares = known.extents.spares.get(first), live = known.extents.live.get(first);
  const Py_ssize_t count = spares && PyList_CheckExact(spares.get()) ? PyList_Size(spares.get()) : 0;
  if (count == 0 || !live) return Ref();
  Ref block = Ref::to(PyList_GetItem(spares.get(), count - 1));
  int64_t size = 0;
  if (!known.block.kind.is(block.get()) || !as_number(known.block.size_bytes.get(block.get()).get(), &size)) return Ref();
  if (size_bytes <= 0 || static_cast<uint64_t>(size) != block_bytes(static_cast<uint64_t>(size_bytes))) return Ref();
  const Ref offset = known.block.offset.get(block.get()), place(offset ? PyTuple_Pack(2, id, offset.get()) : nullptr);
  const Ref row(PyList_New(1));
  // The place of a block that was free is in no list.
  if (!place || !row || PyDict_Contains(kept.get(), place.get()) != 0) return Ref();
  if (PyList_SetItem(row.get(), 0, Ref::to(block.get()).release()) != 0 || PyDict_SetItem(kept.get(), place.get(), row.get()) != 0) {
    return Ref();
  }
  const bool is_lent = PyDict_SetItem(live.get(), offset.get(), block.get()) == 0 && add(known.extents.uses, first, 1) &&
                       known.block.holds.set(block.get(), PyLong_FromLong(1)) &&
                       PyList_SetSlice(spares.get(), count - 1, count, nullptr) == 0;
  return is_lent ? std::move(block) : Ref();
}

// `BorrowedBlocks.take_back` of one block that nobody else holds, and that has the size of those that were released before. Returns false,
// and has done nothing, for any other.
bool take_back_one(PyObject* blocks, PyObject* place) {
  const NoCollection no_collection;
  const BorrowedBlocksKind& of = known.borrowed_blocks;
  if (!of.kind.is(blocks) || is_locked(of.lock.get(blocks))) return false;
  const Ref arena = of.arena.get(blocks), kept = of.kept.get(blocks);
  const Ref borrowed = Ref::to(kept ? PyDict_GetItemWithError(kept.get(), place) : nullptr);
  if (!borrowed || !PyList_CheckExact(borrowed.get()) || PyList_Size(borrowed.get()) != 1 || !known.arena.kind.is(arena.get())) return false;
  const Ref block = Ref::to(PyList_GetItem(borrowed.get(), 0));
  int64_t holds = 0;
  if (!known.block.kind.is(block.get()) || !as_number(known.block.holds.get(block.get()).get(), &holds) || holds != 1) return false;
  const Ref region = known.block.region.get(block.get()), offset = known.block.offset.get(block.get());
  const Ref all = known.arena.extents.get(arena.get());
  const Ref id = known.region.kind.is(region.get()) ? known.region.id.get(region.get()) : Ref();
  PyObject* const extents = all && id ? PyDict_GetItemWithError(all.get(), id.get()) : nullptr;
  if (!known.extents.kind.is(extents)) return false;
  const Ref spares = known.extents.spares.get(extents), live = known.extents.live.get(extents);
  if (!spares || !PyList_CheckExact(spares.get()) || !live || PyDict_Contains(live.get(), offset.get()) != 1) return false;
  const Py_ssize_t count = PyList_Size(spares.get());
  if (count > 0) {
    int64_t size = 0, spare = 0;
    PyObject* const last = PyList_GetItem(spares.get(), count - 1);
    if (!known.block.kind.is(last) || !as_number(known.block.size_bytes.get(last).get(), &spare) ||
        !as_number(known.block.size_bytes.get(block.get()).get(), &size) || spare != size) {
      return false;
    }
  }
  return PyList_Append(spares.get(), block.get()) == 0 && PyDict_DelItem(live.get(), offset.get()) == 0 &&
         PyDict_DelItem(kept.get(), place) == 0 && known.block.holds.set(block.get(), PyLong_FromLong(0));
}

}  // namespace

Ref request_of(Ref arrays, PyObject* shapes, bool has_views) {
  const Requests& of = known.request;
  const Ref nothing(PyTuple_New(0));
  if (!of.kind.is_known() || !nothing) return Ref();
  // Its base, which is compiled, sets all attributes.
  auto* const type = reinterpret_cast<PyTypeObject*>(of.kind.type());
  Ref request(reinterpret_cast<newfunc>(PyType_GetSlot(type, Py_tp_new))(type, nothing.get(), nullptr));
  if (!request) return Ref();
  PyObject* const object = request.get();
  Ref batch_size(PyObject_GetAttr(shapes, constants.batch_size));
  Ref signature(PyObject_GetAttr(shapes, constants.signature));
  const bool is_set = of.arrays.set(object, arrays.release()) && of.shapes.set_to(object, shapes) &&
                      of.batch_size.set(object, batch_size.release()) && of.signature.set(object, signature.release()) &&
                      of.has_views.set_to(object, has_views ? Py_True : Py_False);
  return is_set ? std::move(request) : Ref();
}

bool is_locked(const Ref& lock) {
  const Ref answer = lock ? call(lock.get(), constants.locked) : Ref();
  if (!answer) PyErr_Clear();
  return !answer.is(Py_False);
}

int descriptor_of(PyObject* channel) {
  const Ref socket = known.channel.socket.get(channel);
  const Ref number = socket ? call(socket.get(), constants.fileno) : Ref();
  int64_t fd = -1;
  if (!number || !as_number(number.get(), &fd)) PyErr_Clear();
  return static_cast<int>(fd);
}

bool Released::take(PyObject* link) {
  const Ref released = known.link.released.get(link);
  Py_ssize_t left = size_of(released);
  // More would not fit into a packet.
  if (left < 0 || left > 1024) return false;
  // What is taken must not be lost for want of memory.
  taken_.reserve(static_cast<size_t>(left));
  places_.reserve(static_cast<size_t>(left));
  for (; left > 0; --left) {
    Ref place = call(released.get(), constants.popleft);
    if (!place) {  // another thread took the last one
      PyErr_Clear();
      break;
    }
    int64_t region = 0, offset = 0;
    const bool is_place = PyTuple_Size(place.get()) == 2 && as_number(PyTuple_GetItem(place.get(), 0), &region) &&
                          as_number(PyTuple_GetItem(place.get(), 1), &offset);
    taken_.push_back(std::move(place));
    if (!is_place) return false;
    places_.push_back({static_cast<uint64_t>(region), static_cast<uint64_t>(offset)});
  }
  return true;
}

bool Released::give_back(PyObject* link) const {
  const Ref released = known.link.released.get(link);
  bool is_done = static_cast<bool>(released);
  for (const Ref& place : taken_) {
    is_done = is_done && call(released.get(), constants.append, place.get());
  }
  return is_done;
}

Ref lend_block(PyObject* blocks, int64_t size_bytes) {
  Ref block = lend_spare(blocks, size_bytes);
  if (block || PyErr_Occurred()) return block;
  const Ref size(PyLong_FromLongLong(size_bytes)), arguments(size ? PyTuple_Pack(1, size.get()) : nullptr);
  const Ref method(PyObject_GetAttr(blocks, constants.allocate));
  return arguments && method ? Ref(PyObject_Call(method.get(), arguments.get(), constants.keeping)) : Ref();
}

bool take_back(PyObject* blocks, const std::vector<wire::Place>& places) {
  for (const wire::Place& each : places) {
    const Ref place(Py_BuildValue("(KK)", each.region, each.offset));
    if (!place) return false;
    if (take_back_one(blocks, place.get())) continue;
    if (PyErr_Occurred()) return false;
    const Ref one(PyTuple_Pack(1, place.get()));
    if (!one || !call(blocks, constants.take_back, one.get())) return false;
  }
  return true;
}

Ref lease_on(PyObject* link, PyObject* region, PyObject* memory, PyObject* id, PyObject* offset, PyObject* size) {
  const Leases& of = known.lease;
  const Ref shape(PyTuple_Pack(1, size)), place(PyTuple_Pack(2, id, offset));
  const Ref arguments(shape ? PyTuple_Pack(4, shape.get(), constants.byte, memory, offset) : nullptr);
  if (!arguments || !place) return Ref();
  Ref lease = of.kind.call(arguments.get());
  if (!lease || !of.token.set_to(lease.get(), place.get()) || !of.region.set_to(lease.get(), region) ||
      !of.offset.set_to(lease.get(), offset) ||
      // The last one: with it the lease holds the block.
      !of.give_back.set(lease.get(), known.link.release.get(link).release())) {
    return Ref();
  }
  return lease;
}

namespace {

Ref port_of(PyObject* link) { return known.link.kind.is(link) ? known.link.port.get(link) : Ref(); }

// True, False or an error of a method of the port.
Done done_of(const Ref& answer) {
  if (!answer) return Done::kError;
  return answer.is_true() ? Done::kYes : Done::kNo;
}

}  // namespace

bool is_compiled(PyObject* link) {
  const Ref port = port_of(link), is_plain(port ? PyObject_GetAttr(port.get(), constants.is_plain) : nullptr);
  if (!is_plain) PyErr_Clear();
  return is_plain.is_true();
}

Done execute(PyObject* link, PyObject* requests) {
  const Ref port = port_of(link), given_back = port ? known.link.given_back.get(link) : Ref();
  if (size_of(given_back) != 0) {
    PyErr_Clear();
    return Done::kNo;
  }
  const Done done = done_of(call(port.get(), constants.put, requests));
  if (done == Done::kYes) ++counts.execute;
  return done;
}

Done finish(PyObject* link, PyObject* requests, Ref* answers) {
  const Ref port = port_of(link);
  if (!port) {
    PyErr_Clear();
    return Done::kNo;
  }
  Ref taken = call(port.get(), constants.take, requests);
  if (!taken) return Done::kError;
  if (taken.is_none()) return Done::kNo;
  ++counts.answers;
  *answers = std::move(taken);
  return Done::kYes;
}

Done wait(PyObject* link) {
  const Ref port = port_of(link);
  return port ? done_of(call(port.get(), constants.wait)) : Done::kNo;
}

Done wait_alone(PyObject* link) {
  const Ref port = port_of(link);
  return port ? done_of(call(port.get(), constants.wait_alone)) : Done::kNo;
}

}  // namespace moonpool::quick
