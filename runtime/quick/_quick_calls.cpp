#include "_quick_kinds.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "known_calls.h"

// The usual call of a model to another one, from its INFER to its REPLY.
//
// Theory of operation. `serve_call` does for one packet what `CallDispatcher._ready` does, on the reactor's thread. `answer_call` does
// what `ModelCall.resolve` and `CallDispatcher._answer` do, on the thread that has the outcome. Code of Python's runs where other models
// are looked up, and where a view is dropped that may be the last one of its memory. What is looked at before is not relied on
// afterwards, but for objects that never change.
//
// The packet is a stranger's, and the kernel has copied it. No more of it is read than the number and two lists of numbers, between
// bytes that equal those of a message that Python's form has read and checked. The block that the stub names is compared with its region,
// and the places that it gives back with what it has, before anything is made of them. The bytes of tensors are never looked at.
namespace moonpool::quick {
namespace {

constexpr size_t kMaxPacketBytes = wire::kMaxPacketBytes;
// A copy from this size on takes so long that others should have the interpreter meanwhile. Python's form copies it.
constexpr Py_ssize_t kLongCopyBytes = 256 * 1024;

// Answers that Python has to do it. What Python would meet as well is left to it.
PyObject* declined() {
  PyErr_Clear();
  Py_RETURN_NOTIMPLEMENTED;
}

// Returns true if a dictionary has a key, or if that cannot be found out.
bool has(const Ref& table, PyObject* key) { return !table || PyDict_Contains(table.get(), key) != 0; }
bool is_empty(const Ref& set) { return set && PySet_Size(set.get()) == 0; }

// One INFER.
class Ask {
 public:
  explicit Ask(PyObject* dispatcher) : dispatcher_(dispatcher) {}

  // Returns None if no packet has come, True if a usual one was served, and any other packet, for Python to take.
  PyObject* serve() {
    const Ref channel = known.dispatcher.channel.get(dispatcher_);
    if (!channel) return nullptr;
    if (!known.channel.kind.is(channel.get())) return call(channel.get(), constants.receive_ready).release();
    const Ref inbox = known.channel.inbox.get(channel.get());
    const int fd = descriptor_of(channel.get());
    if (fd < 0 || size_of(inbox) != 0) return call(channel.get(), constants.receive_ready).release();
    // Not on the stack, as a thread may have a small one.
    const std::unique_ptr<char[]> room(new char[kMaxPacketBytes + 1]);
    const ssize_t size = ::recv(fd, room.get(), kMaxPacketBytes + 1, MSG_DONTWAIT);
    if (size < 0) {
      if (errno == EAGAIN) Py_RETURN_NONE;
      return call(channel.get(), constants.receive_ready).release();
    }
    const bool is_whole = size > 0 && static_cast<size_t>(size) <= kMaxPacketBytes;
    const std::string_view bytes(room.get(), static_cast<size_t>(size));
    size_ = size;
    if (is_whole && (attempt([&] { return find(bytes); }) || unmake())) {
      if (!submit_request()) return nullptr;
      ++counts.serve_call;
      Py_RETURN_TRUE;
    }
    PyErr_Clear();
    Ref packet(PyBytes_FromStringAndSize(room.get(), size));
    if (is_whole || !packet) return packet.release();
    // The channel refuses it in its own words.
    if (!call(inbox.get(), constants.append, packet.get())) return nullptr;
    return call(channel.get(), constants.receive_ready).release();
  }

 private:
  // Finds out if a packet is a usual INFER that can be served, and makes its request. Changes nothing.
  bool find(std::string_view packet) {
    const Dispatchers& of = known.dispatcher;
    const Ref usual = of.usual.get(dispatcher_);
    link_ = of.link.get(dispatcher_);
    if (!known.usual_calls.kind.is(usual.get()) || !known.link.kind.is(link_.get())) return false;
    if (!is_compiled(link_.get()) || !known.link.lanes.is_none(link_.get())) return false;
    const Ref asks = known.usual_calls.asks.get(usual.get());
    if (!known.known_calls.kind.is(asks.get())) return false;
    const Ref begin = known.known_calls.begin.get(asks.get()), calls = known.known_calls.known.get(asks.get());
    if (!begin || !calls || !call_.find(begin.get(), calls.get(), packet)) return false;
    // Model, version, signature, shapes, details, inputs, size and `wants_wire`.
    PyObject* const plan = call_.value.get();
    if (PyTuple_Size(plan) != 8 || PyTuple_GetItem(plan, 4) != Py_None || PyTuple_GetItem(plan, 7) != Py_False) return false;
    const Ref models = of.models.get(dispatcher_);
    hosted_ = models ? Ref(PyObject_CallMethodObjArgs(models.get(), constants.find, PyTuple_GetItem(plan, 0),
                                                      PyTuple_GetItem(plan, 1), nullptr))
                     : Ref();
    if (!hosted_) return false;
    const Ref signature(PyObject_GetAttr(hosted_.get(), constants.signature));
    scheduler_ = Ref(PyObject_GetAttr(hosted_.get(), constants.scheduler));
    number_ = Ref(PyLong_FromUnsignedLongLong(call_.number));
    if (!signature.is(PyTuple_GetItem(plan, 2)) || !scheduler_ || !number_) return false;
    calls_ = of.calls.get(dispatcher_);
    const Ref tasks = of.tasks.get(dispatcher_), questions = of.questions.get(dispatcher_);
    if (!calls_ || !is_empty(tasks) || !is_empty(questions) || has(calls_, number_.get())) return false;
    return PyDict_Size(calls_.get()) < static_cast<Py_ssize_t>(wire::kMaxCalls) && make(plan);
  }

  // `UsualCalls.request`. The lease is made last: its end would give the block back.
  bool make(PyObject* plan) {
    const Ref regions = known.link.response_regions.get(link_.get());
    int64_t least = 0, size = 0;
    if (call_.blocks.size() != 1 || !regions || !PyDict_Check(regions.get()) || !as_number(PyTuple_GetItem(plan, 6), &least)) return false;
    const wire::Block& block = call_.blocks[0];
    const Ref id(PyLong_FromUnsignedLongLong(block.region)), offset(PyLong_FromUnsignedLongLong(block.offset));
    const Ref size_bytes(PyLong_FromUnsignedLongLong(block.size));
    const Ref region = Ref::to(id ? PyDict_GetItemWithError(regions.get(), id.get()) : nullptr);
    if (!offset || !size_bytes || !known.region.kind.is(region.get())) return false;
    if (!as_number(known.region.size_bytes.get(region.get()).get(), &size) || size < 0 || least < 0) return false;
    // No number has more than 63 bits.
    if (block.offset + block.size > static_cast<uint64_t>(size) || block.size < static_cast<uint64_t>(least)) return false;
    const Ref memory = known.region.buffer.get(region.get());
    PyObject *const shapes = PyTuple_GetItem(plan, 3), *const inputs = PyTuple_GetItem(plan, 5);
    if (!memory || memory.is_none() || !PyList_CheckExact(inputs)) return false;
    lease_ = lease_on(link_.get(), region.get(), memory.get(), id.get(), offset.get(), size_bytes.get());
    Ref arrays(lease_ ? PyList_New(PyList_Size(inputs)) : nullptr);
    for (Py_ssize_t i = 0; arrays && i < PyList_Size(inputs); ++i) {
      // Shape, dtype and offset.
      PyObject* const row = PyList_GetItem(inputs, i);
      const Ref arguments(PyTuple_Pack(4, PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1), lease_.get(), PyTuple_GetItem(row, 2)));
      PyObject* const array = arguments ? PyObject_Call(constants.ndarray, arguments.get(), nullptr) : nullptr;
      if (array == nullptr || PyList_SetItem(arrays.get(), i, array) != 0) return unmake();
    }
    if (arrays) request_ = request_of(std::move(arrays), shapes, false);
    return request_ ? true : unmake();
  }

  // Drops the request, whose lease does not give its block back: as if it had not been made.
  bool unmake() {
    const KeptError kept;
    if (lease_) PyObject_DelAttrString(lease_.get(), "give_back");
    request_ = Ref();
    lease_ = Ref();
    return false;
  }

  // `CallDispatcher._ask`, from the point where the request is made. Returns false with an error set.
  bool submit_request() {
    const Ref rate_limiter = known.dispatcher.rate_limiter.get(dispatcher_), size(PyLong_FromSsize_t(size_));
    if (!rate_limiter || !size) return unmake();
    if (!Ref(PyObject_CallMethodObjArgs(rate_limiter.get(), constants.took, size.get(), constants.usual_cost, nullptr))) return unmake();
    if (!call_.released.empty()) {
      const Ref blocks = known.link.borrowed_blocks.get(link_.get());
      if (!blocks || !take_back(blocks.get(), call_.released)) return unmake();
    }
    const Ref models_call = make_call();
    if (!models_call || !known.request.waiter.set_to(request_.get(), models_call.get())) return false;
    if (PyDict_SetItem(calls_.get(), number_.get(), models_call.get()) != 0) return false;
    Ref execution;
    const Done done = submit(scheduler_.get(), request_.get(), &execution);
    if (done == Done::kNo) return static_cast<bool>(call(dispatcher_, constants.start, models_call.get()));
    if (done == Done::kError) return not_submitted(models_call.get());
    return !execution || execution.is_none() || drive(execution.get());
  }

  // Makes a `ModelCall` of the request.
  Ref make_call() {
    const ModelCalls& of = known.model_call;
    const Ref replies = known.link.replies.get(link_.get());
    const Ref executing(replies ? PyObject_GetAttr(replies.get(), constants.executing) : nullptr);
    PyObject* const batch = executing ? PyTuple_GetItem(executing.get(), 0) : nullptr;
    Ref made = batch == nullptr ? Ref() : of.kind.make();
    PyObject* const object = made.get();
    const bool is_set = made && of.batch.set_to(object, batch) && of.number.set_to(object, number_.get()) &&
                        of.model.set_to(object, PyTuple_GetItem(call_.value.get(), 0)) && of.takes_many.set_to(object, Py_False) &&
                        of.answer.set(object, PyObject_GetAttr(dispatcher_, constants.answer)) &&
                        of.is_cancelled.set_to(object, Py_False) && of.request.set_to(object, request_.get()) &&
                        of.scheduler.set_to(object, scheduler_.get());
    return is_set ? std::move(made) : Ref();
  }

  // Has Python answer with the error that the scheduler raised.
  bool not_submitted(PyObject* models_call) {
    const Raised raised;
    return static_cast<bool>(Ref(PyObject_CallMethodObjArgs(dispatcher_, constants.not_submitted, models_call, raised.value(), nullptr)));
  }

  PyObject* const dispatcher_;
  Py_ssize_t size_ = 0;
  KnownCall call_;
  Ref link_, hosted_, scheduler_, calls_, number_, lease_, request_;
};

// The reply to one call.
class Reply {
 public:
  Reply(PyObject* models_call, PyObject* response) : call_(models_call), response_(response) {}

  Done send() {
    if (!attempt([this] { return is_usual(); })) {
      PyErr_Clear();
      return Done::kNo;
    }
    // Drops the views of the stub's own memory, so that REPLY gives it back. Any code may run meanwhile.
    if (!known.request.arrays.set(known.model_call.request.get(call_).get(), PyList_New(0))) return Done::kError;
    const Ref calls = known.dispatcher.calls.get(dispatcher_.get()), number = known.model_call.number.get(call_);
    if (!calls || !number) return Done::kError;
    if (PyDict_GetItemWithError(calls.get(), number.get()) != call_) return PyErr_Occurred() ? Done::kError : Done::kYes;
    if (PyDict_DelItem(calls.get(), number.get()) != 0) return Done::kError;
    if (attempt([&] { return place() && transmit(number.get()); })) {
      ++counts.answer_call;
      return Done::kYes;
    }
    PyErr_Clear();
    if (!undo()) return Done::kError;
    // `CallDispatcher._reply` does the rest of `_answer`, and meets the same.
    return Ref(PyObject_CallMethodObjArgs(dispatcher_.get(), constants.reply, call_, response_, Py_True, nullptr)) ? Done::kYes
                                                                                                               : Done::kError;
  }

 private:
  bool is_usual() {
    const ModelCalls& of = known.model_call;
    if (!of.kind.is(call_) || !known.response.kind.is(response_)) return false;
    const Ref parameters = known.response.parameters.get(response_), request = of.request.get(call_), answer = of.answer.get(call_);
    if (!parameters || !PyDict_CheckExact(parameters.get()) || PyDict_Size(parameters.get()) != 0) return false;
    if (!known.request.kind.is(request.get()) || !known.request.trace.is_none(request.get()) || !answer) return false;
    dispatcher_ = Ref(PyObject_GetAttr(answer.get(), constants.self));
    if (!known.dispatcher.kind.is(dispatcher_.get())) return false;
    link_ = known.dispatcher.link.get(dispatcher_.get());
    queue_ = known.dispatcher.send_queue.get(dispatcher_.get());
    const Ref usual = known.dispatcher.usual.get(dispatcher_.get()), budget = known.dispatcher.requests_budget.get(dispatcher_.get());
    if (!known.link.kind.is(link_.get()) || !known.send_queue.kind.is(queue_.get())) return false;
    if (!known.usual_calls.kind.is(usual.get()) || !known.copy_budget.kind.is(budget.get())) return false;
    const Ref taken = known.copy_budget.taken.get(budget.get());
    if (!is_compiled(link_.get()) || !known.link.lanes.is_none(link_.get())) return false;
    return taken && PyDict_Size(taken.get()) == 0 && find_plan(known.usual_calls.replies.get(usual.get()));
  }

  // Finds the plan by which the outputs are placed: rows, offsets, size, and the bytes of REPLY behind the blocks.
  bool find_plan(const Ref& plans) {
    const Ref outputs = known.response.outputs.get(response_), described(PyList_New(0));
    if (!plans || !PyDict_Check(plans.get()) || !outputs || !PyDict_CheckExact(outputs.get()) || !described) return false;
    PyObject *name = nullptr, *output = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(outputs.get(), &at, &name, &output);) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(output)) != constants.ndarray) return false;
      const Ref kept_name = Ref::to(name);
      arrays_.push_back(Ref::to(output));
      const Ref dtype(PyObject_GetAttr(output, constants.dtype)), shape(PyObject_GetAttr(output, constants.shape));
      if (!dtype || !shape || PyList_Append(described.get(), kept_name.get()) != 0) return false;
      if (PyList_Append(described.get(), dtype.get()) != 0 || PyList_Append(described.get(), shape.get()) != 0) return false;
    }
    const Ref key(PyList_AsTuple(described.get()));
    plan_ = Ref::to(key ? PyDict_GetItemWithError(plans.get(), key.get()) : nullptr);
    if (!plan_ || PyTuple_Size(plan_.get()) != 4) return false;
    PyObject *const rows = PyTuple_GetItem(plan_.get(), 0), *const offsets = PyTuple_GetItem(plan_.get(), 1);
    if (!as_number(PyTuple_GetItem(plan_.get(), 2), &size_bytes_) || size_bytes_ < 0 || size_bytes_ > kLongCopyBytes) return false;
    if (!PyList_CheckExact(rows) || !PyList_CheckExact(offsets)) return false;
    const Py_ssize_t count = PyList_Size(rows);
    if (PyList_Size(offsets) != count || static_cast<Py_ssize_t>(arrays_.size()) != count) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      // The size of the output is the last field of its row. An array that does not lie in one piece has no such buffer.
      PyObject* const row = PyList_GetItem(rows, i);
      const Bytes& bytes = bytes_.emplace_back(arrays_[static_cast<size_t>(i)].get(), PyBUF_SIMPLE);
      int64_t nbytes = 0, offset = 0;
      if (!bytes || !as_number(PyList_GetItem(row, PyList_Size(row) - 1), &nbytes) || bytes.size() != nbytes) return false;
      if (!as_number(PyList_GetItem(offsets, i), &offset) || offset < 0 || offset > size_bytes_ - nbytes) return false;
      offsets_.push_back(offset);
    }
    return true;
  }

  // Copies the outputs into a block that the stub borrows. Returns false, perhaps with an error set.
  bool place() {
    blocks_ = known.link.borrowed_blocks.get(link_.get());
    block_ = blocks_ ? lend_block(blocks_.get(), size_bytes_) : Ref();
    if (!known.block.kind.is(block_.get())) return false;
    const Ref region = known.block.region.get(block_.get());
    int64_t id = 0, start = 0;
    if (!known.region.kind.is(region.get()) || !as_number(known.region.id.get(region.get()).get(), &id)) return false;
    const Ref memory = known.region.buffer.get(region.get());
    if (!as_number(known.block.offset.get(block_.get()).get(), &start) || !memory || memory.is_none()) return false;
    const Bytes room(memory.get(), PyBUF_WRITABLE);
    if (!room || start < 0 || start > room.size() - size_bytes_) return false;
    for (size_t i = 0; i < bytes_.size(); ++i) {
      std::memcpy(room.data() + start + offsets_[i], bytes_[i].data(), static_cast<size_t>(bytes_[i].size()));
    }
    place_ = {static_cast<uint64_t>(id), static_cast<uint64_t>(start), static_cast<uint64_t>(size_bytes_)};
    return true;
  }

  // `StubSendQueue.send`. Until the packet is handed on, `undo` makes it as if nothing had happened.
  bool transmit(PyObject* number) {
    int64_t value = 0;
    char* tail = nullptr;
    Py_ssize_t tail_size = 0;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(plan_.get(), 3), &tail, &tail_size) != 0 || !as_number(number, &value)) return false;
    if (!released_.take(link_.get())) return false;
    Writer message;
    message.array(1 + wire::field_count(wire::Kind::REPLY));
    message.uint(static_cast<uint64_t>(wire::Kind::REPLY));
    message.uint(static_cast<uint64_t>(value));
    message.flag(true);
    write(message, released_.places());
    message.array(1);
    place_.write(message);
    message.values({tail, static_cast<size_t>(tail_size)});
    const std::string_view bytes = message.bytes();
    if (bytes.size() > kMaxPacketBytes) return false;
    const SendQueues& of = known.send_queue;
    const Ref channel = of.channel.get(queue_.get());
    // Nobody else sends in between, as this keeps the interpreter's lock.
    if (size_of(of.waiting.get(queue_.get())) == 0 && !is_locked(of.lock.get(queue_.get())) && known.channel.kind.is(channel.get())) {
      const int fd = descriptor_of(channel.get());
      const auto size = static_cast<ssize_t>(bytes.size());
      if (fd >= 0 && ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) == size) return true;
    }
    PyErr_Clear();
    const Ref packet(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
    return packet && call(queue_.get(), constants.put, packet.get());
  }

  bool undo() {
    if (!released_.give_back(link_.get())) return false;
    if (!block_) return true;
    const Ref id = known.region.id.get(known.block.region.get(block_.get()).get()), start = known.block.offset.get(block_.get());
    const Ref places(id && start ? Py_BuildValue("[[OO]]", id.get(), start.get()) : nullptr);
    return places && call(blocks_.get(), constants.take_back, places.get());
  }

  PyObject* const call_;
  PyObject* const response_;
  Ref dispatcher_, link_, queue_, plan_, blocks_, block_;
  std::vector<Ref> arrays_;
  std::vector<Bytes> bytes_;
  std::vector<int64_t> offsets_;
  int64_t size_bytes_ = 0;
  wire::Block place_{};
  Released released_;
};

}  // namespace

PyObject* known_call(PyObject* begin, PyObject* calls, PyObject* packet) {
  KnownCall found;
  if (!found.find(begin, calls, bytes_of(packet))) return declined();
  const Ref released(PyList_New(0)), blocks(PyList_New(0));
  for (const wire::Place& each : found.released) {
    const Ref row(Py_BuildValue("[KK]", each.region, each.offset));
    if (!released || !row || PyList_Append(released.get(), row.get()) != 0) return nullptr;
  }
  for (const wire::Block& each : found.blocks) {
    const Ref row(Py_BuildValue("[KKK]", each.region, each.offset, each.size));
    if (!blocks || !row || PyList_Append(blocks.get(), row.get()) != 0) return nullptr;
  }
  return released && blocks ? Py_BuildValue("(KOOO)", found.number, released.get(), blocks.get(), found.value.get()) : nullptr;
}

PyObject* serve_call(PyObject* dispatcher) {
  if (known.dispatcher.kind.is(dispatcher)) return Ask(dispatcher).serve();
  PyErr_SetString(PyExc_TypeError, "serve_call takes a CallDispatcher");
  return nullptr;
}

Done answer_call(PyObject* models_call, PyObject* response) { return Reply(models_call, response).send(); }

bool drive(PyObject* execution) {
  const Executions& of = known.execution;
  const Ref pending = of.pending.get(execution), scheduler = of.scheduler.get(execution), instance = of.instance.get(execution);
  const Ref reactor = known.scheduler.kind.is(scheduler.get()) ? known.scheduler.reactor.get(scheduler.get()) : Ref();
  const Ref poller = known.reactor.kind.is(reactor.get()) ? known.reactor.epoll.get(reactor.get()) : Ref();
  const Ref conversation = known.link.kind.is(pending.get()) ? known.link.conversation.get(pending.get()) : Ref();
  const Ref channel(conversation ? PyObject_GetAttr(conversation.get(), constants.channel) : nullptr);
  const Ref finish(pending ? PyObject_GetAttr(execution, constants.finish) : nullptr), drivers(PyList_New(1));
  int64_t ident = 0, epoll_fd = -1;
  // All objects that a collection may be made for are made: nobody else runs from here on.
  if (known.poller.kind.is(poller.get()) && known.channel.kind.is(channel.get()) && instance && finish && drivers &&
      as_number(known.reactor.ident.get(reactor.get()).get(), &ident) &&
      static_cast<unsigned long>(ident) == PyThread_get_thread_ident() &&
      size_of(known.poller.beyond.get(poller.get())) == 0 && size_of(known.channel.inbox.get(channel.get())) == 0) {
    const Ref epoll = known.poller.epoll.get(poller.get());
    const Ref number = epoll ? call(epoll.get(), constants.fileno) : Ref();
    const Ref busy = known.scheduler.busy.get(scheduler.get()), once = known.reactor.once.get(reactor.get());
    const int fd = descriptor_of(channel.get());
    const Ref key(PyLong_FromLong(fd));
    if (fd >= 0 && as_number(number.get(), &epoll_fd) && busy && once && key &&
        PyDict_GetItemWithError(busy.get(), instance.get()) == execution &&
        PyList_SetItem(drivers.get(), 0, Ref::to(reactor.get()).release()) == 0 && of.drivers.set_to(execution, drivers.get()) &&
        PyDict_SetItem(once.get(), key.get(), finish.get()) == 0) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLONESHOT;
      event.data.fd = fd;
      if (epoll_ctl(static_cast<int>(epoll_fd), EPOLL_CTL_MOD, fd, &event) == 0) return true;
    }
  }
  // A descriptor that epoll does not know yet, and all else. The reactor sets the same again.
  PyErr_Clear();
  return static_cast<bool>(call(execution, constants.drive_in_reactor));
}

}  // namespace moonpool::quick
