#include "_quick_kinds.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "channel.h"
#include "wire.h"

// The usual batch of a link: copied inputs and no details on the way down, nothing but outputs in response regions on the way up.
//
// Theory of operation. The holder of the instance drives the link, as in Python (runtime/stubs/link.py), so nobody else changes
// what belongs to the driver. `BorrowedBlocks` and `Replies` have locks for the threads that meet the driver there. Where a form
// changes a few attributes in a row and drops no object that could run code, no other thread can run in between, since the form
// keeps the interpreter's lock, and `NoCollection` where it makes objects, too. So it only looks if somebody else holds the other lock, and
// then leaves it to Python's method, which waits for it.
//
// A caller who alone waits for a stub on another core looks for the answer for a moment before it sleeps, as the kernel takes longer to
// wake it than a quick model to answer. It looks again if that helped, and else only after some requests: where the model takes longer, or
// somebody else needs the core, a look is lost time. Who has others behind it, or the stub on its own core, sleeps at once.
//
// Everything in a packet is a stranger's. The codec checks the packet against the tables. What it then says is compared with
// the runtime's own records before anything is made of it. The kernel has copied the packet, and layouts are known by bytes that
// Python's form has read and checked, so nothing that is checked can change afterwards. The bytes of tensors are never looked at.
namespace moonpool::quick {
namespace {

constexpr size_t kMaxPacketBytes = 32 * 1024;
// As in `Channel`: a longer packet is recognized by one byte more.
constexpr size_t kRoom = kMaxPacketBytes + 1;
// A copy from this size on takes so long that others should have the interpreter meanwhile.
constexpr int64_t kLongCopyBytes = 256 * 1024;
// After a look that did not find the answer, so many requests go without one: looking costs processor time, and tells only by trying
// if it would help now.
constexpr int64_t kRests = 63;
// More blocks than the outputs of usual models need.
constexpr size_t kMostBlocks = 16;

// Returns true if a message of this kind may come now: from us (0) or from the peer (1).
bool is_turn(PyObject* conversation, Py_ssize_t side, wire::Kind kind) {
  const Ref turn = known.conversation.turn.get(conversation);
  PyObject* const kinds = turn ? PyTuple_GetItem(turn.get(), side) : nullptr;
  const Ref number(PyLong_FromLong(static_cast<long>(kind)));
  const int is_in = kinds == nullptr || !number ? -1 : PySet_Contains(kinds, number.get());
  if (is_in < 0) PyErr_Clear();
  return is_in == 1;
}

bool pass_turn(PyObject* conversation, wire::Kind kind) {
  const Ref after = known.conversation.after.get(conversation);
  const Ref number(PyLong_FromLong(static_cast<long>(kind)));
  if (!after || !number) return false;
  PyObject* const turn = PyDict_GetItemWithError(after.get(), number.get());
  return (turn != nullptr || fail("a conversation has no turn after message %d", static_cast<int>(kind))) &&
         known.conversation.turn.set_to(conversation, turn);
}

// As `SHARED_BYTES` of memory.py: a smaller array in memory of another stub is copied.
constexpr int64_t kSharedBytes = 64 * 1024;

// Returns true if a lease is on a block of an answer. Those on memory that callers or clients write themselves are lent, whatever their size.
bool is_of_answer(PyObject* lease) {
  PyObject* const token = known.lease.token.peek(lease);
  const Ref region = known.lease.region.get(lease);
  return token != nullptr && PyTuple_CheckExact(token) && known.region.kind.is(region.get());
}

// Returns true if `BorrowedBlocks.lend` would not lend an array: it lies in memory of its own, or is a small output of another model.
bool is_to_copy(PyObject* array) {
  Ref base(PyObject_GetAttr(array, constants.base));
  while (base && !base.is_none()) {
    const int is_array = PyObject_IsInstance(base.get(), constants.ndarray);
    if (is_array < 0) break;
    if (is_array == 0) return true;
    if (known.lease.kind.is(base.get())) {
      int64_t size = 0;
      const Ref bytes(PyObject_GetAttr(array, constants.nbytes));
      if (as_number(bytes.get(), &size) && size < kSharedBytes && is_of_answer(base.get())) return true;
      PyErr_Clear();
      return false;
    }
    base = Ref(PyObject_GetAttr(base.get(), constants.base));
  }
  if (!base) PyErr_Clear();
  return base.is_none();
}

bool is_copied(PyObject* request) {
  const Requests& of = known.request;
  if (!of.kind.is(request) || !of.details.is_none(request)) return false;
  if (!of.has_views.is_true(request)) return true;
  if (!of.targets.get(request).is(constants.nowhere)) return false;
  const Ref arrays = of.arrays.get(request);
  const Py_ssize_t count = arrays && PyList_CheckExact(arrays.get()) ? PyList_Size(arrays.get()) : -1;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const array = PyList_GetItem(arrays.get(), i);
    if (reinterpret_cast<PyObject*>(Py_TYPE(array)) != constants.ndarray || !is_to_copy(array)) return false;
  }
  return count >= 0;
}

// Returns the layout of a batch that came before, borrowed from the link; null for any other.
PyObject* layout_of(PyObject* link, PyObject* requests, Py_ssize_t count) {
  const Ref key(PyTuple_New(count));
  const Ref layouts = known.link.layouts.get(link);
  if (!key || !layouts || !PyDict_Check(layouts.get())) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Ref shapes = known.request.shapes.get(PyList_GetItem(requests, i));
    if (!shapes || PyTuple_SetItem(key.get(), i, shapes.release()) != 0) return nullptr;
  }
  return PyDict_GetItemWithError(layouts.get(), key.get());
}

// One batch on its way down. Until it was sent, `undo` makes it as if nothing had happened.
class Down {
 public:
  Down(PyObject* link, PyObject* requests) : link_(link), requests_(requests) {}

  Done send() {
    if (!is_usual()) return Done::kNo;
    if (!take_block()) return fail();
    if (!attempt([this] { return copy() && released_.take(link_) && note() && transmit(); })) {
      const bool is_undone = undo();
      return is_undone ? fail() : Done::kError;
    }
    ++counts.execute;
    return pass_turn(conversation_.get(), wire::Kind::EXECUTE) ? Done::kYes : Done::kError;
  }

 private:
  // Errors that Python's form would meet as well are left to it. What a signal handler raised goes on.
  static Done fail() {
    if (!PyErr_Occurred()) return Done::kNo;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return Done::kError;
    PyErr_Clear();
    return Done::kNo;
  }

  bool is_usual() {
    const Links& of = known.link;
    if (!of.kind.is(link_) || !PyList_CheckExact(requests_) || !of.is_quick.is_true(link_)) return false;
    if (size_of(of.given_back.get(link_)) != 0 || !of.lanes.is_none(link_) || of.is_on_gpu.is_true(link_)) return false;
    const Py_ssize_t count = PyList_Size(requests_);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!is_copied(PyList_GetItem(requests_, i))) return false;
    }
    conversation_ = of.conversation.get(link_);
    blocks_ = of.borrowed_blocks.get(link_);
    if (!known.conversation.kind.is(conversation_.get()) || !known.borrowed_blocks.kind.is(blocks_.get())) return false;
    channel_ = known.conversation.channel.get(conversation_.get());
    if (!known.channel.kind.is(channel_.get()) || !is_turn(conversation_.get(), 0, wire::Kind::EXECUTE)) return false;
    layout_ = Ref::to(layout_of(link_, requests_, count));
    if (!layout_ || PyTuple_Size(layout_.get()) != 3) return false;
    return as_number(PyTuple_GetItem(layout_.get(), 1), &size_bytes_) && size_bytes_ > 0;
  }

  // Borrows the block of the last batch, if it has the size, or has Python allocate one.
  bool take_block() {
    const BorrowedBlocksKind& of = known.borrowed_blocks;
    const Ref rest = of.rest.get(blocks_.get()), lent = of.lent.get(blocks_.get());
    const bool is_free = !is_locked(of.lock.get(blocks_.get())) && size_of(of.returned.get(blocks_.get())) == 0;
    if (is_free && rest && PyList_CheckExact(rest.get()) && size_of(lent) == 0) {
      PyObject* const row = PyList_GetItem(rest.get(), 0);
      PyObject* const block = row == nullptr ? nullptr : PyTuple_GetItem(row, 1);
      int64_t size = 0;
      if (known.block.kind.is(block) && as_number(known.block.size_bytes.get(block).get(), &size) &&
          size == ((size_bytes_ + 63) & -64)) {
        block_ = Ref::to(block);
        return of.lent.set_to(blocks_.get(), rest.get()) && of.rest.set_to(blocks_.get(), Py_None);
      }
    }
    PyErr_Clear();
    const Ref size(PyLong_FromLongLong(size_bytes_));
    if (size) block_ = call(blocks_.get(), constants.allocate, size.get());
    return static_cast<bool>(block_);
  }

  bool copy() {
    const Ref region = known.block.region.get(block_.get());
    if (!known.block.kind.is(block_.get()) || !known.region.kind.is(region.get())) return false;
    const Ref memory = known.region.buffer.get(region.get());
    if (!memory || memory.is_none()) return false;
    const Bytes buffer(memory.get(), PyBUF_WRITABLE);
    if (!buffer) return false;
    int64_t size = 0, id = 0, offset = 0;
    if (!as_number(known.block.offset.get(block_.get()).get(), &offset) ||
        !as_number(known.block.size_bytes.get(block_.get()).get(), &size) ||
        !as_number(known.region.id.get(region.get()).get(), &id)) {
      return false;
    }
    if (offset < 0 || size < size_bytes_ || offset > buffer.size() - size) return false;
    place_ = {static_cast<uint64_t>(id), static_cast<uint64_t>(offset)};
    PyObject* const copies = PyTuple_GetItem(layout_.get(), 2);
    const Py_ssize_t count = copies != nullptr && PyList_CheckExact(copies) ? PyList_Size(copies) : -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!copy_one(PyList_GetItem(copies, i), buffer.data() + offset)) return false;
    }
    return count >= 0;
  }

  // Copies one input: `row` has the request, the number of the input, its beginning and its end in the block.
  bool copy_one(PyObject* row, char* block) const {
    int64_t numbers[4];
    for (Py_ssize_t i = 0; i < 4; ++i) {
      if (!as_number(PyTuple_GetItem(row, i), &numbers[i])) return false;
    }
    const auto [index, number, begin, end] = numbers;
    PyObject* const request = PyList_GetItem(requests_, static_cast<Py_ssize_t>(index));
    if (request == nullptr || begin < 0 || end < begin || end > size_bytes_) return false;
    const Ref arrays = known.request.arrays.get(request);
    PyObject* const array = arrays ? PyList_GetItem(arrays.get(), static_cast<Py_ssize_t>(number)) : nullptr;
    if (array == nullptr) return false;
    // An array that is not contiguous has no such bytes.
    const Bytes from(array, PyBUF_SIMPLE);
    if (!from || from.size() != end - begin) return false;
    if (from.size() < kLongCopyBytes) {
      std::memcpy(block + begin, from.data(), static_cast<size_t>(from.size()));
    } else {
      Py_BEGIN_ALLOW_THREADS;
      std::memcpy(block + begin, from.data(), static_cast<size_t>(from.size()));
      Py_END_ALLOW_THREADS;
    }
    return true;
  }

  // Notes the batch before it is sent: its responses may come on another channel at once.
  bool note() {
    const Links& of = known.link;
    int64_t before = 0;
    if (!as_number(of.batch.get(link_).get(), &before)) return false;
    batch_ = static_cast<uint64_t>(before + 1);
    Writer head;
    head.array(1 + wire::field_count(wire::Kind::ANSWER));
    head.uint(static_cast<uint64_t>(wire::Kind::ANSWER));
    head.uint(batch_);
    Ref number(PyLong_FromUnsignedLongLong(batch_));
    const std::string_view bytes = head.bytes();
    const Ref replies = of.replies.get(link_);
    if (!number || !known.replies.kind.is(replies.get())) return false;
    return of.begun.set(link_, PyTuple_Pack(2, number.get(), Py_None)) &&
           of.head.set(link_, PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()))) &&
           known.replies.executing.set(replies.get(), PyTuple_Pack(2, number.get(), requests_)) &&
           of.batch.set(link_, number.release());
  }

  // Hands the packet to the kernel, which never blocks here, so the interpreter's lock is kept.
  bool transmit() {
    PyObject* const packed = PyTuple_GetItem(layout_.get(), 0);
    char* layout = nullptr;
    Py_ssize_t layout_size = 0;
    if (packed == nullptr || PyBytes_AsStringAndSize(packed, &layout, &layout_size) != 0) return false;
    if (static_cast<size_t>(layout_size) > kMaxPacketBytes) return false;
    static Writer message;  // the interpreter's lock is held
    wire::encode<wire::Kind::EXECUTE>(
        message, batch_, current_core(), released_.places(), [&](Writer& writer) { write_block(writer); },
        Raw{std::string_view(layout, static_cast<size_t>(layout_size))}, std::nullopt, std::nullopt);
    const std::string_view bytes = message.bytes();
    const int fd = descriptor_of(channel_.get());
    if (fd < 0 || bytes.size() > kMaxPacketBytes) return false;
    return ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  void write_block(Writer& writer) const {
    writer.array(1);
    writer.array(3);
    writer.uint(place_.region);
    writer.uint(place_.offset);
    writer.uint(static_cast<uint64_t>(size_bytes_));
  }

  // Keeps the error that is set. Returns false if that could not be done, with an error of its own set.
  bool undo() {
    std::optional<Raised> raised;
    if (PyErr_Occurred() != nullptr) raised.emplace();
    bool is_done = released_.give_back(link_);
    const Ref none(PyTuple_New(0));
    is_done = none && call(blocks_.get(), constants.end_batch, none.get()) && is_done;
    if (is_done && raised) raised->set_again();
    return is_done;
  }

  PyObject* const link_;
  PyObject* const requests_;
  Ref conversation_, channel_, blocks_, layout_, block_;
  int64_t size_bytes_ = 0;
  uint64_t batch_ = 0;
  wire::Place place_{};
  Released released_;
};

// Returns a view as the bytes of a tensor: a `WireTensor`, which is a tuple of datatype, shape and view.
Ref wire_of(PyObject* datatype, PyObject* shape, const Ref& view) {
  static const newfunc make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
  const Ref fields(PyTuple_Pack(3, datatype, shape, view.get())), arguments(fields ? PyTuple_Pack(1, fields.get()) : nullptr);
  if (!arguments || !known.wire_tensor.kind.is_known()) return Ref();
  return Ref(make(reinterpret_cast<PyTypeObject*>(known.wire_tensor.kind.type()), arguments.get(), nullptr));
}

// Views the outputs of a response by name. Each row has name, shape, dtype, block and offset of an array. Where that has the bytes of a
// tensor, datatype and shape of the tensor follow.
Ref views_of(PyObject* rows, const Ref* leases, size_t lease_count) {
  Ref outputs(PyDict_New());
  const Py_ssize_t count = outputs ? PyList_Size(rows) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const row = PyList_GetItem(rows, i);
    int64_t block = 0;
    const Py_ssize_t width = row == nullptr ? 0 : PyTuple_Size(row);
    const bool is_row = (width == 5 || width == 7) && as_number(PyTuple_GetItem(row, 3), &block);
    if (!is_row || block < 0 || static_cast<size_t>(block) >= lease_count) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "a layout names a block that it has no size for");
      return Ref();
    }
    const Ref arguments(
        PyTuple_Pack(4, PyTuple_GetItem(row, 1), PyTuple_GetItem(row, 2), leases[block].get(), PyTuple_GetItem(row, 4)));
    Ref array(arguments ? PyObject_Call(constants.ndarray, arguments.get(), nullptr) : nullptr);
    if (array && width == 7) array = wire_of(PyTuple_GetItem(row, 5), PyTuple_GetItem(row, 6), array);
    if (!array || PyDict_SetItem(outputs.get(), PyTuple_GetItem(row, 0), array.get()) != 0) return Ref();
  }
  return outputs;
}

// Makes the response to a request.
Ref response_with(PyObject* request, Ref outputs) {
  const Ref details = known.request.details.get(request);
  Ref id = !details || details.is_none() ? Ref::to(constants.empty_text) : Ref(PyObject_GetAttrString(details.get(), "request_id"));
  Ref response = known.response.kind.make();
  const bool is_made = response && known.response.outputs.set(response.get(), outputs.release()) &&
                       known.response.parameters.set(response.get(), PyDict_New()) &&
                       known.response.request_id.set(response.get(), id.release());
  return is_made ? std::move(response) : Ref();
}

// The answer to one batch.
class Up {
 public:
  Up(PyObject* link, PyObject* requests) : link_(link), requests_(requests) {}

  // Makes the answers, or leaves the packet in the inbox.
  Done take(Ref* answers) {
    if (!attempt([this] { return is_usual() && receive(); })) return fail();
    Ref made;
    {
      // From the look at the requests that ended to the end of the batch, none of them gets a response apart.
      const NoCollection no_collection;
      if (!attempt([this] { return read() && open_blocks(); })) return keep_packet();
      // From here on nothing is left to Python: leases give back what they are on when they end.
      if (!is_from_socket_ && !call(inbox_.get(), constants.popleft)) return Done::kError;
      made = responses();
      if (!made || !pass_turn(conversation_.get(), wire::Kind::ANSWER)) return Done::kError;
      if (!known.replies.executing.set_to(replies_.get(), constants.no_batch)) return Done::kError;
    }
    if (!end() || !known.link.core.set(link_, PyLong_FromUnsignedLongLong(core_))) return Done::kError;
    ++counts.answers;
    *answers = std::move(made);
    return Done::kYes;
  }

 private:
  struct Opened {
    Ref region, memory, lease;
    wire::Block block;
  };

  static Done fail() {
    PyErr_Clear();
    return Done::kNo;
  }

  Done keep_packet() {
    PyErr_Clear();
    if (!is_from_socket_) return Done::kNo;
    const Ref packet(PyBytes_FromStringAndSize(packet_.data(), static_cast<Py_ssize_t>(packet_.size())));
    return packet && call(inbox_.get(), constants.append, packet.get()) ? Done::kNo : Done::kError;
  }

  bool is_usual() {
    const Links& of = known.link;
    if (!of.kind.is(link_) || !PyList_CheckExact(requests_) || !of.is_quick.is_true(link_)) return false;
    if (!of.lanes.is_none(link_)) return false;
    count_ = PyList_Size(requests_);
    for (Py_ssize_t i = 0; i < count_; ++i) {
      PyObject* const request = PyList_GetItem(requests_, i);
      if (!known.request.kind.is(request) || !known.request.allocator.is_none(request)) return false;
    }
    conversation_ = of.conversation.get(link_);
    reader_ = of.reader.get(link_);
    replies_ = of.replies.get(link_);
    blocks_ = of.borrowed_blocks.get(link_);
    if (!known.conversation.kind.is(conversation_.get()) || !known.reader.kind.is(reader_.get())) return false;
    if (!known.replies.kind.is(replies_.get()) || !known.borrowed_blocks.kind.is(blocks_.get())) return false;
    if (known.reader.has_devices.is_true(reader_.get())) return false;
    channel_ = known.conversation.channel.get(conversation_.get());
    return known.channel.kind.is(channel_.get()) && is_turn(conversation_.get(), 1, wire::Kind::ANSWER) &&
           as_number(of.batch.get(link_).get(), &batch_);
  }

  // Finds the packet in the inbox, or takes it from the socket, where it is already.
  bool receive() {
    inbox_ = known.channel.inbox.get(channel_.get());
    const Py_ssize_t waiting = size_of(inbox_);
    if (waiting < 0) return false;
    if (waiting > 0) {
      first_ = Ref(PySequence_GetItem(inbox_.get(), 0));
      char* bytes = nullptr;
      Py_ssize_t size = 0;
      if (!first_ || PyBytes_AsStringAndSize(first_.get(), &bytes, &size) != 0) return false;
      packet_ = {bytes, static_cast<size_t>(size)};
      return true;
    }
    const int fd = descriptor_of(channel_.get());
    if (fd < 0) return false;
    room_.reset(new char[kRoom]);
    const ssize_t size = ::recv(fd, room_.get(), kRoom, MSG_DONTWAIT);
    if (size < 0) return false;  // Python's form meets the same
    if (size == 0) {
      // The end of the peer, or an empty packet, which would not come a second time.
      const Ref empty(PyBytes_FromStringAndSize(nullptr, 0));
      if (empty) call(inbox_.get(), constants.append, empty.get());
      return false;
    }
    is_from_socket_ = true;
    packet_ = {room_.get(), static_cast<size_t>(size)};
    return true;
  }

  bool read() {
    if (packet_.empty() || packet_.size() > kMaxPacketBytes) return false;
    const auto decoded = decode(wire::kWork, wire::Side::STUB, packet_);
    if (!decoded || decoded.kind() != wire::Kind::ANSWER) return false;
    const wire::Answer answer(decoded.fields);
    if (answer.batch != static_cast<uint64_t>(batch_) || !answer.held.empty() || !answer.released.empty()) return false;
    if (answer.remarks || answer.states || answer.blocks.size() > kMostBlocks) return false;
    core_ = answer.core;
    const std::string_view packed = answer.layout.bytes;
    const Ref key(PyBytes_FromStringAndSize(packed.data(), static_cast<Py_ssize_t>(packed.size())));
    const Ref layouts = known.reader.layouts.get(reader_.get());
    if (!key || !layouts || !PyDict_Check(layouts.get())) return false;
    const Ref layout = Ref::to(PyDict_GetItemWithError(layouts.get(), key.get()));
    if (!layout || PyTuple_Size(layout.get()) != 4) return false;
    least_bytes_ = Ref::to(PyTuple_GetItem(layout.get(), 1));
    arrays_ = Ref::to(PyTuple_GetItem(layout.get(), 2));
    wires_ = Ref::to(PyTuple_GetItem(layout.get(), 3));
    if (!PyDict_CheckExact(least_bytes_.get()) || !PyList_CheckExact(arrays_.get()) || !PyList_CheckExact(wires_.get())) return false;
    if (PyList_Size(arrays_.get()) != count_ || PyList_Size(wires_.get()) != count_) return false;
    if (answer.blocks.size() > PyDict_Size(least_bytes_.get())) return false;
    for (Py_ssize_t i = 0; i < count_; ++i) {
      if (!PyList_CheckExact(rows_of(i))) return false;
    }
    for (const wire::Block& block : answer.blocks) opened_[opened_count_++].block = block;
    return true;
  }

  // Finds the regions of the blocks, and checks that each block lies in its region and holds what the layout says.
  bool open_blocks() {
    const Ref regions = known.link.response_regions.get(link_);
    if (!regions || !PyDict_Check(regions.get())) return false;
    for (size_t i = 0; i < opened_count_; ++i) {
      Opened& each = opened_[i];
      const Ref id(PyLong_FromUnsignedLongLong(each.block.region));
      each.region = Ref::to(id ? PyDict_GetItemWithError(regions.get(), id.get()) : nullptr);
      int64_t size = 0;
      if (!known.region.kind.is(each.region.get())) return false;
      if (!as_number(known.region.size_bytes.get(each.region.get()).get(), &size) || size < 0) return false;
      // Neither number has more than 63 bits.
      if (each.block.offset + each.block.size > static_cast<uint64_t>(size)) return false;
      each.memory = known.region.buffer.get(each.region.get());
      if (!each.memory || each.memory.is_none()) return false;
    }
    PyObject *block = nullptr, *least = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(least_bytes_.get(), &at, &block, &least);) {
      int64_t index = 0, size = 0;
      if (!as_number(block, &index) || !as_number(least, &size)) return false;
      if (index < 0 || static_cast<size_t>(index) >= opened_count_) return false;
      if (static_cast<uint64_t>(size) > opened_[index].block.size) return false;
    }
    // A thread that holds the lock may be about to note that a request ended.
    const Ref ended = known.replies.ended.get(replies_.get());
    return ended && PySet_Size(ended.get()) == 0 && !is_locked(known.replies.lock.get(replies_.get()));
  }

  // Makes the responses to all requests, empty with an error set.
  Ref responses() {
    Ref made(PyList_New(count_));
    if (!made || !make_leases()) return Ref();
    for (Py_ssize_t i = 0; i < count_; ++i) {
      Ref response = response_to(i);
      if (!response || PyList_SetItem(made.get(), i, response.release()) != 0) return Ref();
    }
    return made;
  }

  bool make_leases() {
    for (size_t i = 0; i < opened_count_; ++i) {
      Opened& each = opened_[i];
      const Ref size(PyLong_FromUnsignedLongLong(each.block.size)), offset(PyLong_FromUnsignedLongLong(each.block.offset));
      const Ref id(PyLong_FromUnsignedLongLong(each.block.region));
      if (!size || !offset || !id) return false;
      each.lease = lease_on(link_, each.region.get(), each.memory.get(), id.get(), offset.get(), size.get());
      if (!each.lease) return false;
    }
    return true;
  }

  // Returns the outputs of a response in the form that the request wants, borrowed; None for strings as an array, which Python decodes.
  PyObject* rows_of(Py_ssize_t index) const {
    const bool wants_wire = known.request.wants_wire.is_true(PyList_GetItem(requests_, index));
    return PyList_GetItem((wants_wire ? wires_ : arrays_).get(), index);
  }

  Ref response_to(Py_ssize_t index) const {
    Ref leases[kMostBlocks];
    for (size_t i = 0; i < opened_count_; ++i) leases[i] = Ref::to(opened_[i].lease.get());
    Ref outputs = views_of(rows_of(index), leases, opened_count_);
    return outputs ? response_with(PyList_GetItem(requests_, index), std::move(outputs)) : Ref();
  }

  // Puts the block of the batch aside, or frees it.
  bool end() {
    const BorrowedBlocksKind& of = known.borrowed_blocks;
    Ref nothing(PyList_New(0));
    const Ref lent = of.lent.get(blocks_.get());
    if (nothing && lent && PyList_Size(lent.get()) == 1 && !is_locked(of.lock.get(blocks_.get())) &&
        size_of(of.targets.get(blocks_.get())) == 0) {
      PyObject* const row = PyList_GetItem(lent.get(), 0);
      PyObject* const block = row == nullptr ? nullptr : PyTuple_GetItem(row, 1);
      int64_t holds = 0;
      if (known.block.kind.is(block) && as_number(known.block.holds.get(block).get(), &holds) && holds == 1 &&
          known.block.region.get(block).is(of.first.get(blocks_.get()).get())) {
        return of.rest.set_to(blocks_.get(), lent.get()) && of.lent.set(blocks_.get(), nothing.release());
      }
    }
    if (PyErr_Occurred()) return false;
    const Ref none(PyTuple_New(0));
    return none && call(blocks_.get(), constants.end_batch, none.get());
  }

  PyObject* const link_;
  PyObject* const requests_;
  Ref conversation_, channel_, reader_, replies_, blocks_, inbox_, first_, least_bytes_, arrays_, wires_;
  Py_ssize_t count_ = 0;
  int64_t batch_ = 0;
  uint64_t core_ = wire::kNoCore;
  bool is_from_socket_ = false;
  std::unique_ptr<char[]> room_;
  std::string_view packet_;
  Opened opened_[kMostBlocks];
  size_t opened_count_ = 0;
};

// A response that comes apart from the answer: `Link.response`, of one block of outputs in a layout that came before.
class Apart {
 public:
  Apart(PyObject* link, PyObject* row) : link_(link), row_(row) {}

  // Returns request, response and flags, or NotImplemented, having done nothing.
  PyObject* take() {
    if (!is_usual()) {
      PyErr_Clear();
      Py_RETURN_NOTIMPLEMENTED;
    }
    const Ref replies = known.link.replies.get(link_), find(replies ? PyObject_GetAttr(replies.get(), constants.find) : nullptr);
    const Ref place(PyTuple_Pack(2, PyList_GetItem(row_, 0), PyList_GetItem(row_, 1)));
    const Ref request(find && place ? PyObject_Call(find.get(), place.get(), flags_ == 0 ? constants.not_last : constants.last) : nullptr);
    if (!request) return nullptr;
    const Ref lease = lease_on(link_, region_.get(), memory_.get(), PyList_GetItem(block_.get(), 0), PyList_GetItem(block_.get(), 1),
                               PyList_GetItem(block_.get(), 2));
    Ref response = lease ? response_to(request.get(), lease) : Ref();
    if (!response) return nullptr;
    ++counts.response;
    return PyTuple_Pack(3, request.get(), response.get(), PyList_GetItem(row_, 2));
  }

 private:
  bool is_usual() {
    const Links& of = known.link;
    if (!of.kind.is(link_) || !of.is_quick.is_true(link_) || !of.lanes.is_none(link_)) return false;
    if (!PyList_CheckExact(row_) || PyList_Size(row_) != 6 || PyList_GetItem(row_, 5) != Py_None) return false;
    PyObject *const blocks = PyList_GetItem(row_, 3), *const packed = PyList_GetItem(row_, 4);
    if (!PyList_CheckExact(blocks) || PyList_Size(blocks) != 1 || !PyBytes_CheckExact(packed)) return false;
    block_ = Ref::to(PyList_GetItem(blocks, 0));
    reader_ = of.reader.get(link_);
    if (!PyList_CheckExact(block_.get()) || PyList_Size(block_.get()) != 3 || !known.reader.kind.is(reader_.get())) return false;
    if (known.reader.has_devices.is_true(reader_.get()) || !as_number(PyList_GetItem(row_, 2), &flags_)) return false;
    return is_known(packed) && is_within();
  }

  // Finds the layout of one response in one block.
  bool is_known(PyObject* packed) {
    const Ref layouts = known.reader.layouts.get(reader_.get());
    layout_ = Ref::to(layouts && PyDict_Check(layouts.get()) ? PyDict_GetItemWithError(layouts.get(), packed) : nullptr);
    if (!layout_ || PyTuple_Size(layout_.get()) != 4) return false;
    PyObject *const least = PyTuple_GetItem(layout_.get(), 1), *const arrays = PyTuple_GetItem(layout_.get(), 2);
    PyObject* const wires = PyTuple_GetItem(layout_.get(), 3);
    if (!PyDict_CheckExact(least) || PyDict_Size(least) != 1 || !PyList_CheckExact(arrays) || PyList_Size(arrays) != 1) return false;
    if (!PyList_CheckExact(wires) || PyList_Size(wires) != 1) return false;
    arrays_ = Ref::to(PyList_GetItem(arrays, 0));
    wires_ = Ref::to(PyList_GetItem(wires, 0));
    return PyList_CheckExact(wires_.get()) && as_number(PyDict_GetItemWithError(least, constants.zero), &least_bytes_);
  }

  // Checks that the block lies in its region and holds what the layout says.
  bool is_within() {
    const Ref regions = known.link.response_regions.get(link_);
    int64_t offset = 0, size = 0, room = 0;
    if (!regions || !PyDict_Check(regions.get())) return false;
    region_ = Ref::to(PyDict_GetItemWithError(regions.get(), PyList_GetItem(block_.get(), 0)));
    if (!known.region.kind.is(region_.get()) || !as_number(known.region.size_bytes.get(region_.get()).get(), &room)) return false;
    if (!as_number(PyList_GetItem(block_.get(), 1), &offset) || !as_number(PyList_GetItem(block_.get(), 2), &size)) return false;
    memory_ = known.region.buffer.get(region_.get());
    return offset >= 0 && size >= least_bytes_ && size >= 0 && offset <= room - size && memory_ && !memory_.is_none();
  }

  Ref response_to(PyObject* request, const Ref& lease) const {
    const Requests& of = known.request;
    // The class comes first: an object of another one may have no such field.
    const bool is_known = of.kind.is(request);
    const Ref& rows = is_known && of.wants_wire.is_true(request) ? wires_ : arrays_;
    if (is_known && of.allocator.is_none(request) && PyList_CheckExact(rows.get())) {
      Ref outputs = views_of(rows.get(), &lease, 1);
      return outputs ? response_with(request, std::move(outputs)) : Ref();
    }
    // Somebody else decides where the outputs go, or they are strings. The request was found, so this goes on from there.
    const Ref requests(PyTuple_Pack(1, request)), leases(PyTuple_Pack(1, lease.get()));
    const Ref answers(requests && leases ? PyObject_CallMethodObjArgs(reader_.get(), constants.answers, requests.get(), layout_.get(),
                                                                      leases.get(), nullptr)
                                         : nullptr);
    return answers ? Ref(PySequence_GetItem(answers.get(), 0)) : Ref();
  }

  PyObject* const link_;
  PyObject* const row_;
  Ref reader_, block_, layout_, arrays_, wires_, region_, memory_;
  int64_t flags_ = 0, least_bytes_ = 0;
};

// Returns true if `recv` would not block. It takes nothing: without the interpreter's lock, the number may become another stub's meanwhile.
bool has_packet(int fd) { return ::recv(fd, nullptr, 0, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR); }

// Waits for a packet and puts it into the inbox, if none is there. Looks for it before it sleeps, for as long as `look_ns`, and says if
// that was enough. Without `sleeps` it only looks.
Done wait_for(PyObject* channel, int64_t look_ns, bool* is_there, bool sleeps = true) {
  if (!known.channel.kind.is(channel)) return Done::kNo;
  const Ref inbox = known.channel.inbox.get(channel);
  if (size_of(inbox) != 0) return inbox ? Done::kYes : Done::kError;
  const std::unique_ptr<char[]> room(new (std::nothrow) char[kRoom]);
  if (!room) return Done::kNo;
  for (;;) {
    // A signal that has come already would not interrupt the call below.
    if (look_ns == 0 && PyErr_CheckSignals() != 0) return Done::kError;
    // Each time: another thread may have closed the channel meanwhile, and its number may be another stub's.
    const int fd = descriptor_of(channel);
    if (fd < 0) return Done::kNo;
    ssize_t size = -1;
    int error = EINTR;
    const int64_t end_ns = monotonic_ns() + look_ns;
    Py_BEGIN_ALLOW_THREADS;
    if (look_ns == 0) {
      size = ::recv(fd, room.get(), kRoom, 0);
      error = errno;
    } else {
      while (!has_packet(fd) && monotonic_ns() < end_ns) {
      }
    }
    Py_END_ALLOW_THREADS;
    if (look_ns != 0) {
      size = ::recv(descriptor_of(channel), room.get(), kRoom, MSG_DONTWAIT);
      error = size < 0 && errno == EAGAIN ? EINTR : errno;
    }
    if (size >= 0) {
      *is_there = look_ns != 0;
      // No signal handler runs before the packet is in the inbox.
      const Ref packet(PyBytes_FromStringAndSize(room.get(), static_cast<Py_ssize_t>(size)));
      ++counts.wait;
      return packet && call(inbox.get(), constants.append, packet.get()) ? Done::kYes : Done::kError;
    }
    if (error != EINTR) return Done::kNo;  // Python's form meets the same, or what comes after it
    if (!sleeps) return Done::kYes;
    look_ns = 0;
  }
}

// `BorrowedBlocks.allocate` of a block that is kept, where the block that was released last has that size. Returns empty, and has
// done nothing, for any other.
Ref lend_spare(PyObject* blocks, int64_t size_bytes) {
  const NoCollection no_collection;
  const BorrowedBlocksKind& of = known.borrowed_blocks;
  if (!of.kind.is(blocks) || is_locked(of.lock.get(blocks)) || !of.rest.is_none(blocks)) return Ref();
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
  if (size_bytes <= 0 || size != ((size_bytes + 63) & -64)) return Ref();
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

Done execute(PyObject* link, PyObject* requests) { return Down(link, requests).send(); }

Done finish(PyObject* link, PyObject* requests, Ref* answers) { return Up(link, requests).take(answers); }

PyObject* response(PyObject* link, PyObject* row) { return Apart(link, row).take(); }

Done wait(PyObject* channel) {
  bool is_there = false;
  return wait_for(channel, 0, &is_there);
}

namespace {

// `wait_alone`, and with `sleeps` unset `look`.
Done wait_or_look(PyObject* link, bool sleeps, bool* is_there) {
  const Links& of = known.link;
  const Ref conversation = of.kind.is(link) ? of.conversation.get(link) : Ref();
  if (!known.conversation.kind.is(conversation.get())) return Done::kNo;
  const Ref channel = known.conversation.channel.get(conversation.get());
  int64_t look_ns = 0, its_core = 0, rests = 0;
  if (!as_number(of.look_ns.get(link).get(), &look_ns) || !as_number(of.core.get(link).get(), &its_core) ||
      !as_number(of.rests.get(link).get(), &rests)) {
    PyErr_Clear();
    return Done::kNo;
  }
  const uint64_t here = current_core();
  if (look_ns <= 0 || its_core == wire::kNoCore || here == wire::kNoCore || static_cast<uint64_t>(its_core) == here) {
    return sleeps ? wait_for(channel.get(), 0, is_there) : Done::kYes;
  }
  Done done = Done::kYes;
  if (sleeps || rests == 0) done = wait_for(channel.get(), rests > 0 ? 0 : look_ns, is_there, sleeps);
  if (done == Done::kYes) rests = rests > 0 ? rests - 1 : *is_there ? 0 : kRests;
  return of.rests.set(link, PyLong_FromLongLong(rests)) ? done : Done::kError;
}

}  // namespace

Done wait_alone(PyObject* link) {
  bool is_there = false;
  return wait_or_look(link, true, &is_there);
}

Done look(PyObject* link) {
  bool is_there = false;
  const Done done = wait_or_look(link, false, &is_there);
  return done == Done::kYes && !is_there ? Done::kNo : done;
}

}  // namespace moonpool::quick
