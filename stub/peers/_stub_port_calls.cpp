// The usual call of another model, as `StubHost.infer` does it, in C++.
//
// Theory of operation. A thread that asks is the leader from before it sends INFER until it has read REPLY (`calls.py`), so nobody
// else can receive its reply, and no object of Python's has to stand for the call. Where anything is not as it mostly is, before INFER is sent,
// nothing has changed, and Python does all of it. Afterwards the call is left to Python: a `Call` for it is open and in the list `left`, and
// Python waits for its answer, or abandons it after an exception. A packet that is not the reply goes to the channel's inbox first, so Python
// finds it there.
//
// A signal handler of the model's may raise on the main thread: where the form waits, and in `Regions.allocate`, which is Python's. All else that
// is called here is of C. So no handler runs between a step and the next one, and what a handler raised leaves the form as it is.
//
// If another thread leads, because it waits too, or for coroutines, Python does all of it, too.
//
// INFER has the bytes that Python would send: one block with all inputs, placed by arithmetic, whatever they are.
// REPLY is checked by the table of which Python's check is made. The runtime is trusted with this memory anyway, but a
// block must lie within its region, and an output within its block. Nothing is kept from one call to the next. What
// comes from the model may have any type, and is looked at as `_stub_port_objects.h` says.
//
// Any thread may call `infer`. Only locals hold what belongs to a call, but for the packet, which the leader alone has.
#include "_stub_port_objects.h"  // first, as Python wants it

#include <errno.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "codec.h"
#include "numpy_table.h"
#include "place.h"

namespace moonpool::python {
namespace {

// A larger input is copied as Python does it.
constexpr Py_ssize_t kSmall = 16 << 10;
// So are more of them.
constexpr uint64_t kMostCopied = 256 << 10;
// More places are reported in several messages.
constexpr Py_ssize_t kMostReleased = 1024;

#define MOONPOOL_ASKS(PART) \
  PART(host) PART(numbers) PART(leads) PART(lead) PART(stop_leading) PART(followers) PART(call) PART(new_inbox) \
  PART(open_calls) PART(queued) PART(queue) PART(fileno) PART(store) PART(inbox) PART(end_process) PART(dtypes) \
  PART(released) PART(take_released) PART(give_back) PART(request) PART(out_of_memory) PART(is_owned)
enum class Part : size_t { MOONPOOL_ASKS(MOONPOOL_MEMBER) kCount };
constexpr std::array<const char*, static_cast<size_t>(Part::kCount)> kParts = {MOONPOOL_ASKS(MOONPOOL_TEXT)};

struct Requests {
  Kind kind;
  Field inputs{"_inputs"}, origin{"_origin"}, details{"_row"}, trace{"_trace"}, preferred_memory{"_preferred_memory"},
      names{"_requested_output_names"}, model{"_model_name"}, version{"_model_version"};
};
struct Calls {
  Kind kind;
  Field bell{"bell"}, inbox{"inbox"}, keeps{"keeps"}, number{"number"};
};

// What became of a step: done, to be left to Python, which has nothing to undo, or an exception is set.
enum class Step { kDone, kUnusual, kRaised };

// An input that is copied.
struct Input {
  Bytes bytes;
  uint64_t offset;
};

// What is to be sent, and what has to be undone if it is not.
struct Sending {
  Ref block, number;
  std::vector<Input> inputs;
  // Of the block.
  uint64_t size = 0;
  std::vector<Ref> released;
  // The fields of INFER before the places, and those behind the blocks.
  Writer head, tail;
  std::string packet;
};

// A REPLY with nothing but outputs.
struct Reply {
  // Reads a packet of the runtime. Returns false for any other message, and for one that breaks the protocol.
  bool read(std::string_view packet) {
    const auto decoded = decode(wire::kCalls, wire::Side::RUNTIME, packet);
    if (!decoded || decoded.kind() != wire::Kind::REPLY) return false;
    Reader reader = decoded.fields;
    read_all(reader, call, is_last, released, blocks, outputs);
    return reader.nil() && reader.nil() && !reader.failed();
  }

  uint64_t call = 0;
  bool is_last = false;
  List<wire::Place> released;
  List<wire::Block> blocks;
  List<wire::NamedTensor> outputs;
};

// Returns the text of a string, which it keeps as long as it lives itself. Returns false, perhaps with an exception,
// for any other object.
bool text_of(PyObject* object, std::string_view* text) {
  Py_ssize_t size = 0;
  const bool is_text = object != nullptr && PyUnicode_CheckExact(object);
  const char* const bytes = is_text ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
  if (bytes != nullptr) *text = {bytes, static_cast<size_t>(size)};
  return bytes != nullptr;
}

class Asker : public Objects {
 public:
  bool know(PyObject* parts) {
    if (!parts_.take(parts) || !know_objects(parts)) return false;
    serves_ = Ref(PyUnicode_InternFromString("serves"));
    sample_ = Ref::to(part(Part::request));
    release_ = Ref(PyUnicode_InternFromString("release"));
    PyObject* const request = reinterpret_cast<PyObject*>(Py_TYPE(sample_.get()));
    PyObject* const call = reinterpret_cast<PyObject*>(Py_TYPE(part(Part::call)));
    return serves_ && release_ && take_dtypes() &&
           know_type(call_.kind, call, {&call_.bell, &call_.inbox, &call_.keeps, &call_.number}) &&
           know_type(request_.kind, request,
                          {&request_.inputs, &request_.origin, &request_.details, &request_.trace, &request_.preferred_memory,
                           &request_.names, &request_.model, &request_.version});
  }

  int traverse(visitproc visit, void* arg) const {
    const int stop = Objects::traverse(visit, arg);
    return stop != 0 ? stop : parts_.traverse(visit, arg);
  }

  // Returns the response, or NotImplemented if Python has to do it. If `left` has a call afterwards, Python has to wait for its answer, or
  // to abandon it if there is an exception.
  PyObject* infer(PyObject* request, PyObject* left) const {
    if (!is_usual(request)) return declined();
    // A destructor that interrupts this very thread where it leads or allocates. Python refuses that.
    const Ref leads_already(PyObject_CallNoArgs(part(Part::leads)));
    const Ref allocates_already(PyObject_CallNoArgs(part(Part::is_owned)));
    if (!leads_already.is(Py_False) || !allocates_already.is(Py_False)) return declined();
    const Leading leading(*this);
    if (!leading.leads()) return declined();
    Sending sending;
    const Step step = prepared(request, &sending);
    if (step != Step::kDone) {
      undo(sending);
      return step == Step::kRaised ? nullptr : declined();
    }
    if (!send(sending.packet)) return queue(sending, request, left);
    return receive(sending, request, left);
  }

 private:
  // `_leading`, from the attempt to take it to the end of its block.
  class Leading {
   public:
    explicit Leading(const Asker& asker)
        : asker_(asker), leads_(Ref(PyObject_CallFunctionObjArgs(asker.part(Part::lead), Py_False, nullptr)).is_true()) {}
    Leading(const Leading&) = delete;
    Leading& operator=(const Leading&) = delete;
    ~Leading() {
      if (leads_) asker_.stop_leading();
    }
    bool leads() const { return leads_; }

   private:
    const Asker& asker_;
    const bool leads_;
  };

  using Objects::part;
  PyObject* part(Part which) const { return parts_[which]; }

  // Drops an error of C, which Python's form may meet as well. What a signal handler raised never comes here.
  static PyObject* declined() {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }

  bool is_usual(PyObject* request) const {
    if (!request_.kind.is(request) || request_.origin.peek(request) != Py_None) return false;
    if (request_.preferred_memory.peek(request) != Py_None) return false;
    // A sample that Python made has the objects that stand for nothing.
    if (request_.details.peek(request) != request_.details.peek(sample_.get())) return false;
    if (request_.trace.peek(request) != request_.trace.peek(sample_.get())) return false;
    const Ref serves(PyObject_GetAttr(part(Part::host), serves_.get()));
    return serves.is_true() && has_no_devices();
  }

  // Places the inputs and writes INFER. If it is not done, `undo` makes it as if nothing had happened.
  Step prepared(PyObject* request, Sending* sending) const {
    try {
      if (!lay_out(request, sending)) return Step::kUnusual;
      const Ref size = number(sending->size);
      sending->block = size ? allocate(size.get()) : Ref();
      // Python's form tells why there is no memory.
      if (!sending->block) return PyErr_ExceptionMatches(part(Part::out_of_memory)) ? Step::kUnusual : Step::kRaised;
      return write(sending) ? Step::kDone : Step::kUnusual;
    } catch (const std::bad_alloc&) {
      return Step::kUnusual;
    }
  }

  // Copies the inputs, and writes INFER. Returns false, perhaps with an exception.
  bool write(Sending* sending) const {
    wire::Block block;
    if (!fill(*sending, &block) || !take_released(sending)) return false;
    sending->number = Ref(PyIter_Next(part(Part::numbers)));
    const Py_ssize_t call = number_in(sending->number.get());
    if (call < 0) return false;
    Writer message;
    message.array(1 + wire::field_count(wire::Kind::INFER));
    message.uint(static_cast<uint64_t>(wire::Kind::INFER));
    message.uint(static_cast<uint64_t>(call));
    message.values(sending->head.bytes());
    message.array(sending->released.size());
    for (const Ref& place : sending->released) {
      const Py_ssize_t region = number_in(PyTuple_GetItem(place.get(), 0)), offset = number_in(PyTuple_GetItem(place.get(), 1));
      if (region < 0 || offset < 0) return false;
      wire::Place{static_cast<uint64_t>(region), static_cast<uint64_t>(offset)}.write(message);
    }
    message.array(1);
    block.write(message);
    message.values(sending->tail.bytes());
    sending->packet = message.bytes();
    return sending->packet.size() <= wire::kMaxPacketBytes;
  }

  // Says where each input lies in a block, and writes all of INFER but the numbers. Returns false, perhaps with an
  // exception, for a request that Python has to send.
  bool lay_out(PyObject* request, Sending* sending) const {
    const Ref inputs = Ref::to(request_.inputs.peek(request)), names = Ref::to(request_.names.peek(request));
    const Ref model = Ref::to(request_.model.peek(request)), version = Ref::to(request_.version.peek(request));
    std::string_view text;
    int64_t wanted = -1;
    if (!inputs || !PyList_CheckExact(inputs.get()) || !names || !PyList_CheckExact(names.get())) return false;
    if (!text_of(model.get(), &text) || !as_number(version.get(), &wanted) || wanted < -1) return false;
    write_all(sending->head, text, wanted, false, uint64_t{0});
    const Py_ssize_t count = PyList_Size(inputs.get());
    if (count == 0) return false;
    sending->inputs.reserve(static_cast<size_t>(count));
    sending->tail.array(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!lay_out_input(PyList_GetItem(inputs.get(), i), sending)) return false;
    }
    sending->tail.array(static_cast<size_t>(PyList_Size(names.get())));
    for (Py_ssize_t i = 0; i < PyList_Size(names.get()); ++i) {
      if (!text_of(PyList_GetItem(names.get(), i), &text)) return false;
      sending->tail.text(text);
    }
    sending->tail.nil();
    return sending->tail.bytes().size() <= wire::kMaxPacketBytes;
  }

  // Does so with one input. It is not usual if it is no small array.
  bool lay_out_input(PyObject* object, Sending* sending) const {
    const Ref tensor = Ref::to(object);
    if (!tensor || !tensor_.kind.is(tensor.get())) return false;
    const Ref array = Ref::to(tensor_.array.peek(tensor.get())), name = Ref::to(tensor_.name.peek(tensor.get()));
    const Ref shape = Ref::to(tensor_.shape.peek(tensor.get()));
    if (!array || reinterpret_cast<PyObject*>(Py_TYPE(array.get())) != part(Shared::array)) return false;
    const Input& input = sending->inputs.emplace_back(Input{Bytes(array.get(), PyBUF_SIMPLE), sending->size});
    std::string_view text;
    int64_t datatype, dims[wire::kMaxDims];
    if (!input.bytes || input.bytes.size() > kSmall || !text_of(name.get(), &text)) return false;
    if (!as_number(tensor_.datatype.peek(tensor.get()), &datatype) || datatype < 0) return false;
    const Py_ssize_t count = shape && PyTuple_CheckExact(shape.get()) ? PyTuple_Size(shape.get()) : -1;
    if (count < 0 || count > static_cast<Py_ssize_t>(wire::kMaxDims)) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!as_number(PyTuple_GetItem(shape.get(), i), &dims[i])) return false;
    }
    const auto size = static_cast<uint64_t>(input.bytes.size());
    write_tensor(sending->tail, text, static_cast<uint64_t>(datatype), dims, static_cast<uint64_t>(count), 0,
                 input.offset, size);
    sending->size += (size + wire::kAlignment - 1) & ~(wire::kAlignment - 1);
    // It does not fit into a packet, or takes so long to copy that other threads should run.
    return sending->tail.bytes().size() <= wire::kMaxPacketBytes && sending->size <= kMostCopied;
  }

  // Copies the inputs into the block. Returns false, perhaps with an exception, if the tables of this process do not fit together.
  bool fill(const Sending& sending, wire::Block* block) const {
    PyObject* const object = sending.block.get();
    const Ref region = block_.kind.is(object) ? Ref::to(block_.region.peek(object)) : Ref();
    if (!region || !region_.kind.is(region.get())) return false;
    const Ref buffer = Ref::to(region_.buffer.peek(region.get()));
    const Bytes memory(buffer.get(), PyBUF_WRITABLE);
    const Py_ssize_t start = number_in(block_.offset.peek(object)), id = number_in(region_.id.peek(region.get()));
    const auto size = static_cast<Py_ssize_t>(sending.size);
    if (!memory || start < 0 || id < 0 || start > memory.size() - size) return false;
    for (const Input& input : sending.inputs) {
      std::memcpy(memory.data() + start + input.offset, input.bytes.data(), static_cast<size_t>(input.bytes.size()));
    }
    *block = {static_cast<uint64_t>(id), static_cast<uint64_t>(start), sending.size};
    return true;
  }

  // `Calls.take_released`.
  bool take_released(Sending* sending) const {
    Py_ssize_t left = PyObject_Size(part(Part::released));
    if (left < 0 || left > kMostReleased) return false;
    // What is taken must not be lost for want of memory.
    sending->released.reserve(static_cast<size_t>(left));
    for (; left > 0; --left) {
      Ref place(PyObject_CallNoArgs(part(Part::take_released)));
      if (!place) {  // another thread took the last one
        PyErr_Clear();
        break;
      }
      const bool is_place = PyTuple_CheckExact(place.get()) && PyTuple_Size(place.get()) == 2;
      sending->released.push_back(std::move(place));
      if (!is_place) return false;
    }
    return true;
  }

  // Gives back what was taken for an INFER that was not sent. Keeps the exception that is set.
  void undo(const Sending& sending) const {
    const KeptError kept;
    for (const Ref& place : sending.released) {
      if (!Ref(PyObject_CallFunctionObjArgs(part(Part::give_back), place.get(), nullptr))) PyErr_WriteUnraisable(place.get());
    }
    if (sending.block && !give_back(sending.block.get())) PyErr_WriteUnraisable(sending.block.get());
  }

  // Returns the number of the channel's socket, -1 if it is closed.
  int descriptor() const {
    const Ref fd(PyObject_CallNoArgs(part(Part::fileno)));
    if (!fd) PyErr_Clear();
    return static_cast<int>(number_in(fd.get()));
  }

  // Hands INFER to the kernel. Returns false if that would not be at once, or not in its turn.
  bool send(const std::string& packet) const {
    if (PyObject_Size(part(Part::queued)) != 0) return false;
    return ::send(descriptor(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size());
  }

  // Gives up `_leading`, and wakes a thread that waits for that. Keeps the exception that is set.
  void stop_leading() const {
    const KeptError kept;
    if (!Ref(PyObject_CallNoArgs(part(Part::stop_leading)))) PyErr_WriteUnraisable(part(Part::stop_leading));
    PyObject *number = nullptr, *follower = nullptr;
    Py_ssize_t at = 0;
    if (!PyDict_Next(part(Part::followers), &at, &number, &follower)) return;
    const Ref bell = call_.bell.get(follower);
    // A bell that rings already cannot be rung again.
    if (!bell || !Ref(PyObject_CallMethodObjArgs(bell.get(), release_.get(), nullptr))) PyErr_Clear();
  }

  // Queues INFER, which Python sends then. The runtime is behind with reading, or gone.
  PyObject* queue(const Sending& sending, PyObject* request, PyObject* left) const {
    const Ref packet(PyBytes_FromStringAndSize(sending.packet.data(), static_cast<Py_ssize_t>(sending.packet.size())));
    if (packet && leave(sending, request, left)) {
      if (Ref(PyObject_CallFunctionObjArgs(part(Part::queue), packet.get(), nullptr))) return waits();
      const KeptError kept;
      if (PyList_SetSlice(left, 0, PyList_Size(left), nullptr) != 0 || PyDict_DelItem(part(Part::open_calls), sending.number.get()) != 0) {
        PyErr_WriteUnraisable(left);
      }
    }
    undo(sending);
    return nullptr;
  }

  // Opens a call in Python, and adds it to `left`: its answer comes there. Returns false with an exception.
  bool leave(const Sending& sending, PyObject* request, PyObject* left) const {
    const Ref call = call_.kind.copy(part(Part::call));
    return call && call_.number.set_to(call.get(), sending.number.get()) && call_.keeps.set_to(call.get(), request) &&
           call_.inbox.set(call.get(), PyObject_CallNoArgs(part(Part::new_inbox))) && PyList_Append(left, call.get()) == 0 &&
           PyDict_SetItem(part(Part::open_calls), sending.number.get(), call.get()) == 0;
  }

  static PyObject* waits() { Py_RETURN_NONE; }

  // Waits for the reply, as the leader. INFER is sent: if the reply cannot be waited for here, or the thread leaves, the call stays in `left`.
  PyObject* receive(const Sending& sending, PyObject* request, PyObject* left) const {
    ssize_t size = PyObject_Size(part(Part::inbox)) == 0 ? -1 : 0;
    if (size == 0) return leave(sending, request, left) ? waits() : nullptr;
    while (size < 0) {
      int error;
      // Each time: a signal handler may have closed the channel.
      const int fd = descriptor();
      Py_BEGIN_ALLOW_THREADS;
      size = recv(fd, packet_.data(), packet_.size(), 0);
      error = errno;
      Py_END_ALLOW_THREADS;
      if (size >= 0) break;
      // The channel meets the same error.
      if (error != EINTR) return leave(sending, request, left) ? waits() : nullptr;
      if (PyErr_CheckSignals() < 0) {
        const KeptError kept;
        if (!leave(sending, request, left)) PyErr_WriteUnraisable(request);
        return nullptr;
      }
    }
    Ref response;
    if (size > 0 && static_cast<uint64_t>(size) <= wire::kMaxPacketBytes) {
      response = read_or_not({packet_.data(), static_cast<size_t>(size)}, number_in(sending.number.get()));
    }
    if (response) return response.release();
    PyErr_Clear();
    const Ref bytes(PyBytes_FromStringAndSize(packet_.data(), size));
    if (!bytes || !Ref(PyObject_CallFunctionObjArgs(part(Part::store), bytes.get(), nullptr))) {
      // The packet is lost, and a thread waits for it.
      Ref(PyObject_CallNoArgs(part(Part::end_process)));
      return nullptr;
    }
    return leave(sending, request, left) ? waits() : nullptr;
  }

  Ref read_or_not(std::string_view packet, Py_ssize_t call) const {
    try {
      return read(packet, call);
    } catch (const std::bad_alloc&) {
      return Ref();
    }
  }

  // Makes the response of a reply to this call. Returns nothing, perhaps with an exception, and has done nothing, for
  // any other packet.
  Ref read(std::string_view packet, Py_ssize_t call) const {
    Reply found;
    if (!found.read(packet) || found.call != static_cast<uint64_t>(call) || !found.is_last) return Ref();
    std::vector<uint64_t> sizes;
    std::vector<Ref> leases;
    for (const wire::Block& block : found.blocks) sizes.push_back(block.size);
    if (!make_leases(found.blocks, &leases)) return Ref();
    Ref tensors(PyList_New(0));
    bool is_made = static_cast<bool>(tensors);
    for (const wire::NamedTensor& row : found.outputs) {
      is_made = is_made && row.block < sizes.size() && row.offset + row.size <= sizes[row.block];
      const Ref tensor = is_made ? tensor_of(row, leases[row.block]) : Ref();
      is_made = tensor && PyList_Append(tensors.get(), tensor.get()) == 0;
    }
    Ref response = is_made ? response_.kind.make() : Ref();
    if (response) {
      response_.outputs.set(response.get(), tensors.release());
      response_.error.set_to(response.get(), Py_None);
      response_.parameters.set_to(response.get(), Py_None);
      for (const wire::Place& place : found.released) is_made = add_returned(place) && is_made;
    }
    if (response && is_made) return response;
    // Python makes them again.
    tensors = Ref();
    for (const Ref& lease : leases) PyObject_DelAttrString(lease.get(), "give_back");
    return Ref();
  }

  bool make_leases(const List<wire::Block>& blocks, std::vector<Ref>* leases) const {
    leases->reserve(blocks.size());
    for (const wire::Block& block : blocks) {
      const Ref id = number(block.region), offset = number(block.offset);
      const Ref place(id && offset ? PyTuple_Pack(2, id.get(), offset.get()) : nullptr);
      const Ref region = place ? Ref::to(PyDict_GetItemWithError(part(Shared::request_regions), id.get())) : Ref();
      // A region of this stub's own, or one that has not come yet.
      if (!region || !region_.kind.is(region.get())) return drop(leases);
      const Ref buffer = Ref::to(region_.buffer.peek(region.get()));
      const Py_ssize_t room = number_in(region_.size_bytes.peek(region.get()));
      if (!buffer || buffer.is_none() || room < 0 || block.offset + block.size > static_cast<uint64_t>(room)) return drop(leases);
      Ref lease = lease_on(region, buffer, offset, block.size, place, part(Part::give_back));
      if (!lease) return drop(leases);
      leases->push_back(std::move(lease));
    }
    return true;
  }

  // Drops leases without giving their blocks back: Python makes them again. Returns false.
  static bool drop(std::vector<Ref>* leases) {
    for (const Ref& lease : *leases) PyObject_DelAttrString(lease.get(), "give_back");
    leases->clear();
    return false;
  }

  // Views an output, which lies in its lease. Strings and BF16 are viewed as bytes.
  Ref tensor_of(const wire::NamedTensor& row, const Ref& lease) const {
    std::vector<int64_t> dims;
    for (const uint64_t dimension : row.shape) dims.push_back(static_cast<int64_t>(dimension));
    uint64_t elements;
    std::string wrong;
    if (!check_tensor(dims.data(), dims.size(), row.datatype, row.size, &elements, &wrong)) return Ref();
    const Ref shape(PyTuple_New(static_cast<Py_ssize_t>(dims.size())));
    for (size_t i = 0; shape && i < dims.size(); ++i) {
      if (PyTuple_SetItem(shape.get(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(dims[i])) != 0) return Ref();
    }
    const bool is_raw = row.datatype >= wire::kBytes;
    const auto size = static_cast<int64_t>(row.size);
    char* const at = numpy::fields(lease.get())->data + row.offset;
    auto* const type = reinterpret_cast<PyTypeObject*>(part(Shared::array));
    Ref array(is_raw ? numpy::view(type, part(Shared::byte), 1, &size, at, 1, lease.get())
                     : numpy::view(type, dtypes_[row.datatype].get(), static_cast<int>(dims.size()), dims.data(), at,
                                   wire::kItemBytes[row.datatype], lease.get()));
    Ref name(PyUnicode_DecodeUTF8(row.name.data(), static_cast<Py_ssize_t>(row.name.size()), nullptr));
    Ref datatype = number(row.datatype);
    Ref tensor = array && name && datatype && shape ? tensor_.kind.make() : Ref();
    if (!tensor) return tensor;
    tensor_.name.set(tensor.get(), name.release());
    tensor_.datatype.set(tensor.get(), datatype.release());
    tensor_.shape.set_to(tensor.get(), shape.get());
    tensor_.array.set_to(tensor.get(), is_raw ? Py_None : array.get());
    tensor_.wire.set_to(tensor.get(), is_raw ? array.get() : Py_None);
    if (is_raw) tensor_.strings.set_to(tensor.get(), Py_None);
    return tensor;
  }

  // Takes the dtypes of the datatypes that have one from the beginning. Returns false with an exception.
  bool take_dtypes() {
    for (size_t i = 1; i < dtypes_.size(); ++i) {
      const Ref code = number(i);
      dtypes_[i] = Ref::to(code ? PyDict_GetItemWithError(part(Part::dtypes), code.get()) : nullptr);
      if (!dtypes_[i]) return fail("there is no dtype of datatype %zu", i);
    }
    return true;
  }

  Parts<Part, kParts.size()> parts_{kParts};
  Ref serves_, sample_, release_;
  Requests request_;
  Calls call_;
  std::array<Ref, wire::kBytes> dtypes_;
  // The packet of the leader.
  mutable std::array<char, wire::kMaxPacketBytes + 1> packet_;
};

struct AskerObject {
  PyObject_HEAD Asker* asker;
};

PyObject* asker_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* parts;
  if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &parts)) return nullptr;
  return guarded([&]() -> PyObject* {
    Ref self(PyType_GenericNew(type, nullptr, nullptr));
    if (!self) return nullptr;
    auto asker = std::make_unique<Asker>();
    if (!asker->know(parts)) return nullptr;
    reinterpret_cast<AskerObject*>(self.get())->asker = asker.release();
    return self.release();
  });
}

void asker_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<AskerObject*>(self)->asker;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

int asker_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Asker* asker = reinterpret_cast<AskerObject*>(self)->asker;
  return asker == nullptr ? 0 : asker->traverse(visit, arg);
}

PyObject* asker_infer(PyObject* self, PyObject* args) {
  PyObject *request, *left;
  if (!PyArg_ParseTuple(args, "OO!", &request, &PyList_Type, &left)) return nullptr;
  return guarded([&] { return reinterpret_cast<AskerObject*>(self)->asker->infer(request, left); });
}

PyMethodDef asker_methods[] = {
    {"infer", asker_infer, METH_VARARGS, "Return the response to a usual request, or NotImplemented for any other."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot asker_slots[] = {{Py_tp_new, reinterpret_cast<void*>(asker_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(asker_dealloc)},
                             {Py_tp_traverse, reinterpret_cast<void*>(asker_traverse)},
                             {Py_tp_methods, asker_methods},
                             {0, nullptr}};

PyType_Spec asker_spec = {"moonpool.stub.peers._stub_port.Asker", sizeof(AskerObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          asker_slots};

}  // namespace

int add_asker(PyObject* module) {
  const Ref type(PyType_FromModuleAndSpec(module, &asker_spec, nullptr));
  return type ? PyModule_AddObjectRef(module, "Asker", type.get()) : -1;
}

}  // namespace moonpool::python
