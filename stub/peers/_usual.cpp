// The usual way of a batch through the stub, as `usual.py` describes it, in C++.
//
// Theory of operation. A Way does the steps of `UsualWay` on the same objects of Python's: it reads and fills their slots, and leaves them
// as Python would. Each step first looks at all that it needs. If anything is not as it mostly is, the step has changed
// nothing yet, and the layers or `UsualWay` do it. So this file refuses nothing, waits for no memory, and has no errors of
// its own.
//
// The codec checks what comes from the runtime, with the table of which Python's check is made, before anything is used.
// A block must lie within its region, and numpy checks that a view lies within the block. What comes from the model may
// have any type, and code of the model runs when an object of its own class is compared, hashed or destroyed. So only
// objects of the exact classes are looked into, and each one that is used after another call is kept by a reference.
//
// Threads. Only the stub's main thread calls these methods. They hold the interpreter's lock except while they send,
// receive, or have much copied. Meanwhile the control thread appends to the queues of blocks, and other threads of the model
// allocate in the arena under `Regions._turn`.
//
// Looking. If the runtime sent its packet from another core, the next one may come sooner than the kernel wakes this
// thread. So `receive` looks for the packet for a while before it blocks, but only if the last one came within that time
// and the time of two wake-ups, which looking saves; and never on the sender's core, where the sender could not run meanwhile. A signal that came during that time is handled
// before the thread blocks.
#include "_usual_objects.h"  // first, as Python wants it

#include <errno.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel.h"
#include "wire.h"

namespace moonpool::python {
namespace {

// A wait takes so much more than the peer's work if both sides sleep: the time of two wake-ups.
constexpr int64_t kWakeUpsNs = 100'000;
// As many plans of layouts as Python remembers.
constexpr size_t kMostLayouts = 256;
// A larger output is copied as Python does it.
constexpr int64_t kSmall = 16 << 10;

// The objects that a Way works with, beside those that all have. `CompiledWay` gives each by its name.
#define MOONPOOL_PARTS(PART)                                                                                     \
  PART(peer) PART(batch) PART(give_back) PART(batch_returned) PART(clear_batch_returned) PART(layouts)           \
  PART(answer) PART(plans) PART(answer_layouts) PART(answer_layout) PART(port) PART(request) PART(make_tensor)   \
  PART(plan) PART(fileno) PART(channel_receive) PART(channel_checked) PART(channel_send) PART(refuse) PART(give) PART(finish)
enum class Part : size_t { MOONPOOL_PARTS(MOONPOOL_MEMBER) kCount };
constexpr std::array<const char*, static_cast<size_t>(Part::kCount)> kParts = {MOONPOOL_PARTS(MOONPOOL_TEXT)};

// Attributes of objects without slots.
enum class Name : size_t { kExecuting, kCancelled, kCancelEarly, kWrite, kCount };
constexpr std::array<const char*, static_cast<size_t>(Name::kCount)> kNames = {"executing", "cancelled", "cancel_early", "write"};

// The classes of those objects, and the slots that are used.
struct Requests {
  Kind kind;
  Field inputs{"_inputs"}, origin{"_origin"}, release_flags{"_release_flags"}, reply{"_reply"};
};
struct Plans {
  Kind kind;
  Field size_bytes{"size_bytes"}, offsets{"offsets"};
};
struct Batches {
  Kind kind;
  Field places{"places"}, has_copies{"has_copies"}, targets{"targets"}, kept{"kept"};
};
struct Answers {
  Kind kind;
  Field blocks{"blocks"}, plans{"plans"}, remarks{"remarks"}, states{"states"};
};

// An input as every batch of its layout has it: all but the array.
struct Input {
  Ref tensor, shape, dtype, offset;
};
// The inputs of each request.
using Layout = std::vector<std::vector<Input>>;

// What one response needs: its plan, and the bytes of its outputs.
struct Placed {
  Ref plan;
  std::vector<Bytes> arrays;
};

// Empties a list in place.
bool clear(PyObject* list) { return PyList_SetSlice(list, 0, PyList_Size(list), nullptr) == 0; }

class Way : public Objects {
 public:
  // Takes the parts and learns the slots of their classes. Sets an exception and returns false if something is missing.
  bool learn(PyObject* parts, bool is_decoupled, int64_t look_ns) {
    is_decoupled_ = is_decoupled;
    look_ns_ = look_ns;
    if (!parts_.take(parts) || !learn_objects(parts)) return false;
    for (size_t i = 0; i < kNames.size(); ++i) {
      names_[i] = Ref(PyUnicode_InternFromString(kNames[i]));
      if (!names_[i]) return false;
    }
    zero_ = Ref(PyLong_FromLong(0));
    return zero_ && learn_slots();
  }

  // Returns the next packet, as `Channel.receive` does.
  PyObject* receive() {
    const int64_t begin = look_ns_ > 0 ? monotonic_ns() : 0;
    ssize_t size = -1;
    if (was_quick_ && peer_core_ != wire::kNoCore && peer_core_ != current_core()) {
      const int fd = descriptor();
      Py_BEGIN_ALLOW_THREADS;
      do {
        size = recv(fd, packet_.data(), packet_.size(), MSG_DONTWAIT);
      } while (size < 0 && errno == EAGAIN && monotonic_ns() - begin < look_ns_);
      Py_END_ALLOW_THREADS;
      if (size < 0 && PyErr_CheckSignals() < 0) return nullptr;
    }
    peer_core_ = wire::kNoCore;
    while (size < 0) {
      int error;
      // Each time: a signal handler may have closed the channel.
      const int fd = descriptor();
      Py_BEGIN_ALLOW_THREADS;
      size = recv(fd, packet_.data(), packet_.size(), 0);
      error = errno;
      Py_END_ALLOW_THREADS;
      // The channel meets the same error, or after a reset the packets that the peer sent before its end.
      if (size < 0 && error != EINTR) return PyObject_CallNoArgs(part(Part::channel_receive));
      if (size < 0 && PyErr_CheckSignals() < 0) return nullptr;
    }
    was_quick_ = look_ns_ > 0 && monotonic_ns() - begin <= look_ns_ + kWakeUpsNs;
    Ref packet(PyBytes_FromStringAndSize(packet_.data(), size));
    if (!packet || (size > 0 && static_cast<uint64_t>(size) <= wire::kMaxPacketBytes)) return packet.release();
    return PyObject_CallFunctionObjArgs(part(Part::channel_checked), packet.get(), nullptr);
  }

  PyObject* open(PyObject* packet) {
    if (!PyBytes_CheckExact(packet)) Py_RETURN_NONE;
    const std::string_view bytes(PyBytes_AsString(packet), static_cast<size_t>(PyBytes_Size(packet)));
    const auto message = decode(wire::kWork, wire::Side::RUNTIME, bytes);
    if (!message || message.kind() != wire::Kind::EXECUTE) Py_RETURN_NONE;
    const wire::Execute said(message.fields);
    if (said.details || said.targets || said.blocks.size() != 1) Py_RETURN_NONE;
    const wire::Block block = *said.blocks.begin();
    const Layout* layout = nullptr;
    if (!find_layout(said.layout.bytes, &layout)) return nullptr;
    if (layout == nullptr || layout->empty()) Py_RETURN_NONE;
    const bool has_no_devices = Objects::has_no_devices();
    const Ref region_id = number(block.region), offset = number(block.offset), batch = number(said.batch);
    if (!region_id || !offset || !batch || PyErr_Occurred() != nullptr) return nullptr;
    const Ref region = Ref::to(PyDict_GetItemWithError(part(Shared::request_regions), region_id.get()));
    if (!region && PyErr_Occurred()) return nullptr;
    if (!has_no_devices || !region || !region_.kind.is(region.get())) Py_RETURN_NONE;
    const Ref buffer = Ref::to(region_.buffer.peek(region.get()));
    if (!buffer || buffer.get() == Py_None) Py_RETURN_NONE;
    const Py_ssize_t room = number_in(region_.size_bytes.peek(region.get()));
    if (room < 0 || block.offset + block.size > static_cast<uint64_t>(room)) Py_RETURN_NONE;
    // Up to here nothing has changed.
    for (const wire::Place& place : said.released) {
      if (!add_returned(place)) return nullptr;
    }
    const Ref place(PyTuple_Pack(2, region_id.get(), offset.get()));
    if (!place || !begin_batch(place, block.size)) return nullptr;
    const Ref lease = lease_on(region, buffer, offset, block.size, place, part(Part::give_back));
    Ref requests = lease ? requests_of(*layout, lease, batch) : Ref();
    if (!requests || !begin_executing(batch, requests)) return nullptr;
    peer_core_ = said.core;
    return requests.release();
  }

  PyObject* take(PyObject* requests, PyObject* returned) {
    if (!PyList_CheckExact(returned) || !PyList_CheckExact(requests) || is_decoupled_) Py_RETURN_FALSE;
    const Py_ssize_t count = PyList_Size(requests);
    if (PyList_Size(returned) != count) Py_RETURN_FALSE;
    std::vector<Placed> placed(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Ref request = Ref::to(PyList_GetItem(requests, i)), response = Ref::to(PyList_GetItem(returned, i));
      if (!request || !response || !is_plain(request.get(), response.get()) ||
          !find_plan(response.get(), &placed[static_cast<size_t>(i)])) {
        // An array may refuse to show its bytes, for example. The layers will meet that, too.
        PyErr_Clear();
        Py_RETURN_FALSE;
      }
    }
    for (const Placed& each : placed) {
      if (!place(each) && !refuse()) return nullptr;
    }
    Py_RETURN_TRUE;
  }

  PyObject* give() {
    PyObject* answer = part(Part::answer);
    const bool has_no_devices = Objects::has_no_devices();
    if (PyErr_Occurred() != nullptr) return nullptr;
    const Py_ssize_t remarks = PyObject_Size(answer_.remarks.peek(answer));
    const Py_ssize_t states = PyObject_Size(answer_.states.peek(answer));
    if (remarks < 0 || states < 0) return nullptr;
    if (remarks > 0 || states > 0 || !has_no_devices) return PyObject_CallNoArgs(part(Part::give));
    const Ref batch = end_executing();
    if (!batch) return nullptr;
    // The objects of the batch are gone now, and its block is back, unless the model keeps one of them.
    const Py_ssize_t returned = PyObject_Size(part(Part::batch_returned));
    if (returned < 0) return nullptr;
    const Ref blocks = Ref::to(answer_.blocks.peek(answer)), plans = Ref::to(answer_.plans.peek(answer));
    if (returned != 1 || number_in(batch_.kept.peek(part(Part::batch))) != 0) return finish(batch);
    if (!write_answer(batch.get(), blocks.get(), plans.get())) return nullptr;
    if (message_.bytes().size() > wire::kMaxPacketBytes) return finish(batch);
    const Ref cleared(PyObject_CallNoArgs(part(Part::clear_batch_returned)));
    if (!cleared || !clear(blocks.get()) || !clear(plans.get())) return nullptr;
    return send();
  }

  int traverse(visitproc visit, void* arg) const {
    const int stop = Objects::traverse(visit, arg);
    return stop != 0 ? stop : parts_.traverse(visit, arg);
  }

 private:
  using Objects::part;
  PyObject* part(Part which) const { return parts_[which]; }
  // Returns the number of the channel's socket, -1 if it is closed.
  int descriptor() const {
    const Ref fd(PyObject_CallNoArgs(part(Part::fileno)));
    if (!fd) PyErr_Clear();
    return static_cast<int>(number_in(fd.get()));
  }
  PyObject* name(Name which) const { return names_[static_cast<size_t>(which)].get(); }

  bool learn_slots() {
    PyObject* request = reinterpret_cast<PyObject*>(Py_TYPE(part(Part::request)));
    PyObject* batch = reinterpret_cast<PyObject*>(Py_TYPE(part(Part::batch)));
    PyObject* answer = reinterpret_cast<PyObject*>(Py_TYPE(part(Part::answer)));
    return learn_type(request_.kind, request, {&request_.inputs, &request_.origin, &request_.release_flags, &request_.reply}) &&
           learn_type(plan_.kind, part(Part::plan), {&plan_.size_bytes, &plan_.offsets}) &&
           learn_type(batch_.kind, batch, {&batch_.places, &batch_.has_copies, &batch_.targets, &batch_.kept}) &&
           learn_type(answer_.kind, answer, {&answer_.blocks, &answer_.plans, &answer_.remarks, &answer_.states});
  }

  // Opening

  // Finds the plan of a layout that the layers have met. It is null if they have not, and empty if the layout is not usual.
  // Returns false with an exception.
  bool find_layout(std::string_view packed, const Layout** found) {
    if (last_layout_ != nullptr && packed == last_packed_) {
      *found = last_layout_;
      return true;
    }
    std::string key(packed);
    auto at = layouts_.find(key);
    if (at == layouts_.end()) {
      const Ref bytes(PyBytes_FromStringAndSize(packed.data(), static_cast<Py_ssize_t>(packed.size())));
      if (!bytes) return false;
      const Ref known = Ref::to(PyDict_GetItemWithError(part(Part::layouts), bytes.get()));
      if (!known) return PyErr_Occurred() == nullptr;
      Layout layout;
      if (!learn_layout(known.get(), &layout)) return false;
      last_layout_ = nullptr;
      if (layouts_.size() >= kMostLayouts) layouts_.clear();
      at = layouts_.emplace(std::move(key), std::move(layout)).first;
    }
    last_packed_ = at->first;
    *found = last_layout_ = &at->second;
    return true;
  }

  // Reads the rows of the layers: name, datatype, shape, block, offset, dtype and dimensions of each input.
  bool learn_layout(PyObject* requests, Layout* layout) {
    for (Py_ssize_t i = 0; i < PyList_Size(requests); ++i) {
      PyObject* rows = PyList_GetItem(requests, i);
      std::vector<Input>& inputs = layout->emplace_back();
      for (Py_ssize_t j = 0; j < PyList_Size(rows); ++j) {
        const Ref row(PySequence_Tuple(PyList_GetItem(rows, j)));
        if (!row) return false;
        const auto field = [&row](Py_ssize_t k) { return PyTuple_GetItem(row.get(), k); };
        // Strings and BF16 are viewed as bytes.
        if (number_in(field(1)) >= static_cast<Py_ssize_t>(wire::kBytes) || number_in(field(3)) != 0) {
          layout->clear();
          return true;
        }
        Ref tensor(PyObject_CallFunctionObjArgs(part(Part::make_tensor), field(0), field(1), field(2), Py_None, nullptr));
        if (!tensor) return false;
        inputs.push_back({std::move(tensor), Ref::to(field(2)), Ref::to(field(5)), Ref::to(field(4))});
      }
    }
    return PyErr_Occurred() == nullptr;
  }

  bool begin_batch(const Ref& place, uint64_t size) {
    PyObject* batch = part(Part::batch);
    Ref places(PyList_New(1));
    if (!places || PyList_SetItem(places.get(), 0, Ref::to(place.get()).release()) < 0) return false;
    batch_.places.set(batch, places.release());
    batch_.has_copies.set_to(batch, size > 0 ? Py_True : Py_False);
    const Py_ssize_t targets = PyObject_Size(batch_.targets.peek(batch));
    if (targets > 0) {
      Ref none(PyDict_New());
      if (!none) return false;
      batch_.targets.set(batch, none.release());
    }
    return targets >= 0;
  }

  Ref requests_of(const Layout& layout, const Ref& lease, const Ref& batch) {
    Ref requests(PyList_New(static_cast<Py_ssize_t>(layout.size())));
    if (!requests) return Ref();
    for (size_t i = 0; i < layout.size(); ++i) {
      Ref inputs(PyList_New(static_cast<Py_ssize_t>(layout[i].size())));
      if (!inputs) return Ref();
      for (size_t j = 0; j < layout[i].size(); ++j) {
        Ref tensor = tensor_of(layout[i][j], lease);
        if (!tensor || PyList_SetItem(inputs.get(), static_cast<Py_ssize_t>(j), tensor.release()) < 0) return Ref();
      }
      const Ref index = number(i);
      Ref origin(index ? PyTuple_Pack(3, part(Part::port), batch.get(), index.get()) : nullptr);
      Ref request = origin ? request_.kind.copy(part(Part::request)) : Ref();
      if (!request) return Ref();
      request_.inputs.set(request.get(), inputs.release());
      request_.origin.set(request.get(), origin.release());
      if (PyList_SetItem(requests.get(), static_cast<Py_ssize_t>(i), request.release()) < 0) return Ref();
    }
    return requests;
  }

  Ref tensor_of(const Input& input, const Ref& lease) {
    Ref array(PyObject_CallFunctionObjArgs(part(Shared::array), input.shape.get(), input.dtype.get(), lease.get(),
                                           input.offset.get(), nullptr));
    Ref tensor = array ? tensor_.kind.copy(input.tensor.get()) : Ref();
    if (tensor) tensor_.array.set(tensor.get(), array.release());
    return tensor;
  }

  bool begin_executing(const Ref& batch, const Ref& requests) {
    PyObject* peer = part(Part::peer);
    const Ref executing(PyTuple_Pack(2, batch.get(), requests.get()));
    if (!executing || PyObject_SetAttr(peer, name(Name::kExecuting), executing.get()) < 0) return false;
    // In this order: a cancellation that comes now either finds the requests, or is seen here.
    const Ref cancelled(PyObject_GetAttr(peer, name(Name::kCancelled)));
    const Py_ssize_t count = cancelled ? PyObject_Size(cancelled.get()) : -1;
    if (count <= 0) return count == 0;
    return static_cast<bool>(
        Ref(PyObject_CallMethodObjArgs(peer, name(Name::kCancelEarly), batch.get(), requests.get(), nullptr)));
  }

  // Taking

  bool is_plain(PyObject* request, PyObject* response) const {
    return request_.kind.is(request) && response_.kind.is(response) && request_.release_flags.peek(request) == zero_.get() &&
           request_.reply.peek(request) == Py_None && response_.error.peek(response) == Py_None &&
           response_.parameters.peek(response) == Py_None;
  }

  // Finds the plan by which the outputs of a response are placed, and their bytes. Returns false, perhaps with an
  // exception, if there is no such plan yet, or if an output is not an ordinary array of its own.
  bool find_plan(PyObject* response, Placed* placed) {
    const Ref outputs = Ref::to(response_.outputs.peek(response));
    if (!outputs || !PyList_CheckExact(outputs.get())) return false;
    const Py_ssize_t count = PyList_Size(outputs.get());
    const Ref key(PyTuple_New(4 * count));
    if (!key) return false;
    placed->arrays.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!describe(PyList_GetItem(outputs.get(), i), key.get(), 4 * i, &placed->arrays)) return false;
    }
    placed->plan = Ref::to(PyDict_GetItemWithError(part(Part::plans), key.get()));
    return placed->plan && plan_.kind.is(placed->plan.get());
  }

  // Copies the outputs of a response into a block. Returns false with an exception.
  bool place(const Placed& placed) {
    PyObject* answer = part(Part::answer);
    const Ref plans = answer_.plans.get(answer), blocks = answer_.blocks.get(answer), size = plan_.size_bytes.get(placed.plan.get());
    if (!plans || !blocks || !size) return false;
    if (placed.arrays.empty()) return PyList_Append(plans.get(), placed.plan.get()) == 0;
    const Ref block = allocate(size.get());
    const Ref row = block ? fill(block.get(), placed, size.get()) : Ref();
    // No signal handler runs between these two.
    if (row && PyList_Append(blocks.get(), row.get()) == 0) return PyList_Append(plans.get(), placed.plan.get()) == 0;
    const KeptError kept;
    if (block) give_back(block.get());
    return false;
  }

  // Does what `fill` of placement.py does. Returns region, offset and size of the block, nothing with an exception.
  Ref fill(PyObject* block, const Placed& placed, PyObject* size) {
    const Ref region = block_.kind.is(block) ? Ref::to(block_.region.peek(block)) : Ref();
    if (!region || !region_.kind.is(region.get())) return wrong("a block is not in shared memory");
    const Ref start = block_.offset.get(block), id = region_.id.get(region.get());
    Ref row(PyList_New(3));
    if (!row || !start || !id) return Ref();
    PyObject* fields[] = {id.get(), start.get(), size};
    for (Py_ssize_t i = 0; i < 3; ++i) {
      if (PyList_SetItem(row.get(), i, Ref::to(fields[i]).release()) < 0) return Ref();
    }
    const Ref buffer = region_.buffer.get(region.get()), offsets = plan_.offsets.get(placed.plan.get());
    if (!buffer || !offsets) return Ref();
    const Bytes memory(buffer.get(), PyBUF_WRITABLE);
    if (!memory) return Ref();
    const Py_ssize_t begin = number_in(start.get()), room = memory.size();
    for (size_t i = 0; i < placed.arrays.size(); ++i) {
      const Bytes& array = placed.arrays[i];
      const Py_ssize_t offset = number_in(PyList_GetItem(offsets.get(), static_cast<Py_ssize_t>(i)));
      const Py_ssize_t bytes = array.size();
      // The tables are this process's own, which the model may have changed.
      if (begin < 0 || begin > room || offset < 0 || offset > room - begin || bytes > room - begin - offset) {
        return wrong("a block is not within its region");
      }
      if (array.size() > kSmall) {
        // The region knows how to copy much, without the interpreter's lock.
        const Ref at(PyLong_FromSsize_t(begin + offset));
        if (!at || !Ref(PyObject_CallMethodObjArgs(region.get(), name(Name::kWrite), at.get(), array.object(), nullptr))) return Ref();
      } else if (array.size() > 0) {
        std::memcpy(memory.data() + begin + offset, array.data(), static_cast<size_t>(array.size()));
      }
    }
    return row;
  }

  static Ref wrong(const char* what) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_ValueError, what);
    return Ref();
  }

  // Answers a request with the exception that is set. Returns false if no response may carry that exception.
  bool refuse() {
    fail("a response was not placed and no error set");
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    const Raised raised;
    return static_cast<bool>(Ref(PyObject_CallFunctionObjArgs(part(Part::refuse), raised.value(), nullptr)));
  }

  // Giving

  // Drops the requests of the batch, and returns its number; nothing with an exception.
  Ref end_executing() {
    PyObject* peer = part(Part::peer);
    Ref executing(PyObject_GetAttr(peer, name(Name::kExecuting)));
    const Ref none(PyList_New(0));
    if (!executing || !none) return Ref();
    Ref batch = Ref::to(PyTuple_GetItem(executing.get(), 0));
    const Ref ended(batch ? PyTuple_Pack(2, batch.get(), none.get()) : nullptr);
    if (!ended || PyObject_SetAttr(peer, name(Name::kExecuting), ended.get()) < 0) return Ref();
    return batch;
  }

  // Leaves the rest of an answer to `UsualWay`.
  PyObject* finish(const Ref& batch) { return PyObject_CallFunctionObjArgs(part(Part::finish), batch.get(), nullptr); }

  // Writes ANSWER of a batch of which the model keeps nothing. Returns false with an exception.
  bool write_answer(PyObject* batch, PyObject* blocks, PyObject* plans) {
    const Ref key(PyList_AsTuple(plans));
    if (!key) return false;
    Ref layout = Ref::to(PyDict_GetItemWithError(part(Part::answer_layouts), key.get()));
    if (!layout && PyErr_Occurred() == nullptr) {
      layout = Ref(PyObject_CallFunctionObjArgs(part(Part::answer_layout), key.get(), nullptr));
    }
    if (!layout) return false;
    blocks_.clear();
    for (Py_ssize_t i = 0; i < PyList_Size(blocks); ++i) {
      PyObject* row = PyList_GetItem(blocks, i);
      const auto field = [row](Py_ssize_t k) { return static_cast<uint64_t>(number_in(PyList_GetItem(row, k))); };
      blocks_.push_back({field(0), field(1), field(2)});
    }
    const std::string_view packed(PyBytes_AsString(layout.get()), static_cast<size_t>(PyBytes_Size(layout.get())));
    const auto nothing = [](Writer& writer) { writer.array(0); };
    wire::encode<wire::Kind::ANSWER>(message_, static_cast<uint64_t>(number_in(batch)), current_core(), nothing, nothing,
                                     blocks_, Raw{packed}, std::nullopt, std::nullopt);
    return PyErr_Occurred() == nullptr;
  }

  // Sends the message as `Channel.send_waiting` does.
  PyObject* send() {
    for (;;) {
      ssize_t sent;
      int error;
      const std::string_view bytes = message_.bytes();
      const int fd = descriptor();
      Py_BEGIN_ALLOW_THREADS;
      sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      error = errno;
      Py_END_ALLOW_THREADS;
      if (sent >= 0) Py_RETURN_NONE;
      if (error != EINTR) break;
      if (PyErr_CheckSignals() < 0) return nullptr;
    }
    // Nothing was sent. The channel meets the same error, and knows its name.
    const std::string_view bytes = message_.bytes();
    const Ref packet(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
    return packet ? PyObject_CallFunctionObjArgs(part(Part::channel_send), packet.get(), nullptr) : nullptr;
  }

  bool is_decoupled_ = false;
  // How long `receive` may look for a packet; 0 if it must not.
  int64_t look_ns_ = 0;
  // True if the last packet came within that time, but for wake-ups.
  bool was_quick_ = false;
  // The core that the last usual EXECUTE came from.
  uint64_t peer_core_ = wire::kNoCore;
  Parts<Part, kParts.size()> parts_{kParts};
  std::array<Ref, kNames.size()> names_;
  Ref zero_;
  Requests request_;
  Plans plan_;
  Batches batch_;
  Answers answer_;
  std::unordered_map<std::string, Layout> layouts_;
  // The layout of the last batch, within `layouts_`.
  std::string_view last_packed_;
  const Layout* last_layout_ = nullptr;
  std::array<char, wire::kMaxPacketBytes + 1> packet_;
  std::vector<wire::Block> blocks_;
  Writer message_;
};

// The object that Python sees

struct WayObject {
  PyObject_HEAD Way* way;
};

Way& way_of(PyObject* self) { return *reinterpret_cast<WayObject*>(self)->way; }

PyObject* way_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* parts;
  int is_decoupled, look_us;
  if (!PyArg_ParseTuple(args, "O!pi", &PyDict_Type, &parts, &is_decoupled, &look_us)) return nullptr;
  return guarded([&]() -> PyObject* {
    Ref self(PyType_GenericNew(type, nullptr, nullptr));
    if (!self) return nullptr;
    auto way = std::make_unique<Way>();
    if (!way->learn(parts, is_decoupled != 0, int64_t{look_us} * 1000)) return nullptr;
    reinterpret_cast<WayObject*>(self.get())->way = way.release();
    return self.release();
  });
}

void way_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<WayObject*>(self)->way;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

int way_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Way* way = reinterpret_cast<WayObject*>(self)->way;
  return way == nullptr ? 0 : way->traverse(visit, arg);
}

PyObject* way_receive(PyObject* self, PyObject*) {
  return guarded([&] { return way_of(self).receive(); });
}

PyObject* way_open(PyObject* self, PyObject* packet) {
  return guarded([&] { return way_of(self).open(packet); });
}

PyObject* way_take(PyObject* self, PyObject* args) {
  PyObject *requests, *returned;
  if (!PyArg_UnpackTuple(args, "take", 2, 2, &requests, &returned)) return nullptr;
  return guarded([&] { return way_of(self).take(requests, returned); });
}

PyObject* way_give(PyObject* self, PyObject*) {
  return guarded([&] { return way_of(self).give(); });
}

PyMethodDef way_methods[] = {
    {"receive", way_receive, METH_NOARGS, "Return the next packet, as `Channel.receive` does."},
    {"open", way_open, METH_O, "Return the requests of a usual EXECUTE, as `UsualWay.open` does."},
    {"take", way_take, METH_VARARGS, "Place the responses of the model, as `UsualWay.take` does."},
    {"give", way_give, METH_NOARGS, "Answer the batch, as `UsualWay.give` does."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot way_slots[] = {{Py_tp_new, reinterpret_cast<void*>(way_new)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(way_dealloc)},
                           {Py_tp_traverse, reinterpret_cast<void*>(way_traverse)},
                           {Py_tp_methods, way_methods},
                           {0, nullptr}};

PyType_Spec way_spec = {"moonpool.stub.peers._usual.Way", sizeof(WayObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                        way_slots};

int prepare(PyObject* module) {
  const Ref type(PyType_FromModuleAndSpec(module, &way_spec, nullptr));
  if (!type || PyModule_AddObjectRef(module, "Way", type.get()) < 0 || add_asker(module) < 0) return -1;
  return add_sources(module);
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(prepare)}, {0, nullptr}};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_usual", "The usual way of a batch through the stub, compiled.", 0, nullptr, module_slots,
    nullptr,               nullptr,  nullptr};

}  // namespace
}  // namespace moonpool::python

PyMODINIT_FUNC PyInit__usual() { return PyModuleDef_Init(&moonpool::python::module_definition); }
