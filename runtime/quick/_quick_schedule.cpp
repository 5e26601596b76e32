#include "_quick_kinds.h"

#include <sched.h>

#include <ctime>
#include <optional>
#include <vector>

// The usual ways through the scheduler: a request that goes at once, one that is queued behind others, and a batch of which every
// request got a plain response.
//
// Theory of operation. These forms follow `Scheduler.submit`, `_send`, `finish`, `settle` and `_launch` line by line, in Python's
// order, and hold the scheduler's own lock where those hold it. They take the lock only if it is free: if it is not, Python's
// form waits for it. All that could make a batch unusual is looked at under the lock before anything is changed. Callers'
// code runs without the lock, as in Python. No signal handler runs inside a form, except where it calls back into Python, which is
// marked by the error that it then returns. So on a thread on which handlers run, a form leaves to the reactor what it does not do itself
// (`enter`, `_send`, `settle`, `_lose`), and hands out outcomes only to waiters that it knows.
namespace moonpool::quick {
namespace {

// As `_SLOW_NS` in the scheduler.
constexpr int64_t kSlowNs = 1000000;

// Keeps a thread that waits on the core on which the others wait, until its call ends.
//
// Threads of one interpreter run one after the other, whatever cores there are. If the kernel spreads many of them over cores, each hand-over
// of the interpreter's lock has to wake another core, which costs more than all the rest of a small request. So while more than
// `kMostApart` threads wait for quick models, those that come tie themselves to one core, the home. The kernel wakes them there, and while they run
// here it does not take them away. Whoever goes back to the caller's own code has the caller's cores again. If somebody changed the cores of a thread
// meanwhile, they stay as that one wants them.
//
// Tied threads say nothing of where the kernel would wake them. So after `kStays` batches nobody ties for `kChecks` batches, and the core
// of the last one's driver is the new home. Everything here needs the interpreter's lock.
class Together {
 public:
  Together() = default;
  Together(const Together&) = delete;
  Together& operator=(const Together&) = delete;
  ~Together() {
    if (is_counted_) --waiting;
    cpu_set_t now;
    if (is_tied_ && sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &tied_)) {
      sched_setaffinity(0, sizeof before_, &before_);
    }
  }

  // For a thread that is about to wait.
  void tie() {
    if (is_counted_) return;
    is_counted_ = true;
    if (++waiting <= kMostApart || !is_quick || home < 0 || constants.ties_callers != Py_True) return;
    // A machine may have more cores than fit into the set.
    if (sched_getaffinity(0, sizeof before_, &before_) != 0 || !CPU_ISSET(home, &before_) || CPU_COUNT(&before_) == 1) return;
    CPU_ZERO(&tied_);
    CPU_SET(home, &tied_);
    is_tied_ = sched_setaffinity(0, sizeof tied_, &tied_) == 0;
    if (is_tied_) ++counts.tie;
  }

  // Learns from a batch of a driver on this thread, which took so long.
  static void learn(int64_t took_ns) {
    is_quick = took_ns <= kSlowNs;
    if (++batches >= kStays + kChecks) batches = 0;
    if (batches < kChecks) {
      home = -1;
    } else if (home < 0) {
      const int here = sched_getcpu();
      home = here < CPU_SETSIZE ? here : -1;
    }
  }

 private:
  static constexpr int kMostApart = 6, kStays = 4096, kChecks = 32;

  // The threads that wait here, the core to which they tie themselves, and the batches since that was to be found.
  static inline int waiting = 0, home = -1, batches = 0;
  static inline bool is_quick = false;

  cpu_set_t before_{}, tied_{};
  bool is_counted_ = false, is_tied_ = false;
};

// True for a scheduler with these forms: one of instances, perhaps with a rate limiter.
bool is_scheduler(PyObject* object) { return known.scheduler.kind.is(object) || known.limited.kind.is(object); }

// Removes an object from a list that has it, mostly at its end.
bool remove(PyObject* list, PyObject* object) {
  for (Py_ssize_t i = PyList_Size(list) - 1; i >= 0; --i) {
    if (PyList_GetItem(list, i) == object) return PyList_SetSlice(list, i, i + 1, nullptr) == 0;
  }
  return false;
}

bool pop_last(PyObject* list) {
  const Py_ssize_t size = PyList_Size(list);
  return PyList_SetSlice(list, size - 1, size, nullptr) == 0;
}

// The permit of an instance of a `LimitedScheduler`, whose lock is held: what `RateLimiter.acquire` and `release` do while nobody waits for
// a resource. With the rate limiter's lock free, nobody else is in the middle of a change to the pool, and nobody begins one before this is
// gone: no other thread runs meanwhile, as nothing here calls Python's code.
class Permits {
 public:
  explicit Permits(PyObject* scheduler) : used_(known.limited.used.get(scheduler)) {
    const Ref limiter = known.limited.limiter.get(scheduler);
    if (!known.limiter.kind.is(limiter.get()) || is_locked(known.limiter.lock.get(limiter.get()))) return;
    const Ref pool = known.limiter.pool.get(limiter.get());
    if (!known.resource_pool.kind.is(pool.get())) return;
    int64_t waiting = -1;
    const Ref mine = known.limited.waiting.get(scheduler);
    const bool has_none = as_number(known.resource_pool.waiting.get(pool.get()).get(), &waiting) && waiting == 0;
    members_ = known.resource_pool.members.get(pool.get());
    is_usual_ = has_none && mine && PySet_Size(mine.get()) == 0 && used_ && members_ && PyDict_Check(members_.get());
  }

  // True if nobody waits. No error is set afterwards, as after the other functions if they return false or null.
  bool is_usual() const { return is_usual_ || clear(); }

  // Returns the idle instance that has executed least, of equal ones the last, if its resources are free; borrowed from the list.
  PyObject* next(PyObject* idle) const {
    PyObject* found = nullptr;
    int64_t least = 0;
    for (Py_ssize_t i = PyList_Size(idle) - 1; i >= 0; --i) {
      PyObject* const instance = PyList_GetItem(idle, i);
      int64_t rank = 0;
      PyObject* const member = member_of(instance);
      if (member == nullptr || !as_number(known.resource_member.rank.get(member).get(), &rank)) return none();
      if (found != nullptr && rank >= least) continue;
      found = instance;
      least = rank;
    }
    return found != nullptr && has(found) ? found : none();
  }

  // Takes the permit of an instance that `next` returned. Returns false with an error set.
  bool acquire(PyObject* instance) const {
    return PySet_Add(used_.get(), instance) == 0 && change(member_of(instance), 1) &&
           known.resource_member.is_holding.set_to(member_of(instance), Py_True);
  }

  // True if an instance has a permit that `release` can return.
  bool holds(PyObject* instance) const {
    PyObject* const member = member_of(instance);
    return (member != nullptr && known.resource_member.is_holding.is_true(member) && PySet_Contains(used_.get(), instance) == 1) || clear();
  }

  // Returns the permit of an instance that has executed. Returns false with an error set.
  bool release(PyObject* instance) const {
    PyObject* const member = member_of(instance);
    int64_t weight = 0;
    return as_number(known.resource_member.weight.get(member).get(), &weight) && change(member, -1) &&
           add(known.resource_member.rank, member, weight) && known.resource_member.is_holding.set_to(member, Py_False) &&
           PySet_Discard(used_.get(), instance) == 1;
  }

 private:
  static bool clear() {
    PyErr_Clear();
    return false;
  }
  static PyObject* none() {
    PyErr_Clear();
    return nullptr;
  }

  PyObject* member_of(PyObject* instance) const {
    PyObject* const member = PyDict_GetItemWithError(members_.get(), instance);
    return known.resource_member.kind.is(member) ? member : none();
  }

  // Returns the rows of a member's resources, each a count and the number that it needs.
  static Ref rows_of(PyObject* member) { return known.resource_member.counts.get(member); }

  bool has(PyObject* instance) const {
    PyObject* const member = member_of(instance);
    if (!known.resource_member.turn.is_none(member) || known.resource_member.is_holding.is_true(member)) return false;
    const Ref rows = rows_of(member);
    const Py_ssize_t count = rows && PyList_CheckExact(rows.get()) ? PyList_Size(rows.get()) : -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const row = PyList_GetItem(rows.get(), i);
      PyObject* const of = PyTuple_GetItem(row, 0);
      int64_t in_use = 0, limit = 0, needed = 0;
      if (!known.resource_count.kind.is(of) || !as_number(known.resource_count.in_use.get(of).get(), &in_use) ||
          !as_number(known.resource_count.limit.get(of).get(), &limit) || !as_number(PyTuple_GetItem(row, 1), &needed) ||
          in_use + needed > limit) {
        return false;
      }
    }
    return count >= 0;
  }

  // Takes a member's resources, or returns them.
  static bool change(PyObject* member, int64_t sign) {
    const Ref rows = rows_of(member);
    const Py_ssize_t count = rows ? PyList_Size(rows.get()) : -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const row = PyList_GetItem(rows.get(), i);
      int64_t needed = 0;
      if (!as_number(PyTuple_GetItem(row, 1), &needed)) return false;
      if (!add(known.resource_count.in_use, PyTuple_GetItem(row, 0), sign * needed)) return false;
    }
    return count >= 0;
  }

  const NoCollection no_collection_;
  const Ref used_;
  Ref members_;
  bool is_usual_ = false;
};

// Returns an execution as `Execution.__init__` and `Scheduler._start` make it. Needs the lock.
Ref start(PyObject* scheduler, PyObject* instance, PyObject* requests, PyObject* started_ns, PyObject* driver) {
  const Executions& of = known.execution;
  Ref execution = of.kind.make();
  Ref drivers(PyList_New(1));
  if (!execution || !drivers || PyList_SetItem(drivers.get(), 0, Ref::to(driver).release()) != 0) return Ref();
  PyObject* const object = execution.get();
  const bool is_set = of.scheduler.set_to(object, scheduler) && of.instance.set_to(object, instance) &&
                      of.requests.set_to(object, requests) && of.started_ns.set_to(object, started_ns) &&
                      of.sent_ns.set_to(object, started_ns) && of.is_sent.set_to(object, Py_False) &&
                      of.is_lost.set_to(object, Py_False) && of.answers.set_to(object, Py_None) &&
                      of.has_deferred.set_to(object, Py_False) && of.has_traces.set_to(object, Py_False) &&
                      of.drivers.set(object, drivers.release());
  const Ref busy = known.scheduler.busy.get(scheduler);
  if (!is_set || !busy || PyDict_SetItem(busy.get(), instance, object) != 0) return Ref();
  return execution;
}

// Passes on what a signal handler raised while a batch was being sent or read, as Python's form does: nobody knows how far it came.
void lose(PyObject* scheduler, PyObject* execution) {
  Raised raised;
  // If another signal handler raises in `_lose`, the thread that takes the execution over sees this.
  known.execution.is_lost.set_to(execution, Py_True);
  const Ref method(PyObject_GetAttr(scheduler, constants.lose));
  const Ref arguments(PyTuple_Pack(2, execution, raised.value()));
  const Ref done(method && arguments ? PyObject_Call(method.get(), arguments.get(), constants.delivered) : nullptr);
  if (!done) PyErr_WriteUnraisable(scheduler);
  raised.set_again();
}

// `Scheduler._send` and `Execution.take`: kNo if Python has to send, in any way.
Done send(PyObject* scheduler, PyObject* execution) {
  const Ref instance = known.execution.instance.get(execution), requests = known.execution.requests.get(execution);
  const Ref backend = known.instance.backend.get(instance.get());
  if (!known.backend.kind.is(backend.get())) return Done::kNo;
  const Ref stub = known.instance.state.get(instance.get());
  if (!known.stub.kind.is(stub.get())) return Done::kNo;
  Ref link = known.stub.link.get(stub.get());
  const Done done = execute(link.get(), requests.get());
  if (done == Done::kError) lose(scheduler, execution);
  if (done != Done::kYes) return done;
  const Executions& of = known.execution;
  if (!of.sent_ns.set(execution, PyLong_FromLongLong(monotonic_ns())) || !of.pending.set(execution, link.release()) ||
      !of.is_sent.set_to(execution, Py_True)) {
    return Done::kError;
  }
  const Py_ssize_t count = PyList_Size(requests.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Ref request = Ref::to(PyList_GetItem(requests.get(), i));
    const Requests& its = known.request;
    if (!its.left.is_true(request.get()) && !its.is_cancelled.is_true(request.get())) continue;
    if (its.fills_place.is_true(request.get())) continue;
    // Its caller left or cancelled before the instance had it.
    if (!Ref(PyObject_CallMethodObjArgs(backend.get(), constants.cancel, instance.get(), request.get(), nullptr))) {
      return Done::kError;
    }
  }
  return Done::kYes;
}

// Returns the queue that the batcher has, if it is one that needs no plan: each batch is one request, or all that fits, of one lane
// without deadlines. Empty for any other.
Ref plain_queue(PyObject* request_queue) {
  if (!known.request_queue.kind.is(request_queue)) return Ref();
  Ref queue = known.request_queue.queue.get(request_queue);
  const Queues& of = known.queue;
  if (!of.kind.is(queue.get())) return Ref();
  if (!of.is_alone.is_true(queue.get()) && !of.is_greedy.is_true(queue.get())) return Ref();
  const Ref level = of.only.get(queue.get());
  if (!known.level.kind.is(level.get()) || !known.level.late.is_none(level.get())) return Ref();
  return size_of(of.deadlines.get(queue.get())) == 0 ? std::move(queue) : Ref();
}

Ref lane_of(const Ref& queue) { return known.level.waiting.get(known.queue.only.get(queue.get()).get()); }

int64_t count_of(const Ref& queue) {
  int64_t count = -1;
  if (!as_number(known.queue.count.get(queue.get()).get(), &count)) return -1;
  return count;
}

// `Queue.add`, for a level that has room for any number.
Done enqueue(const Ref& queue, PyObject* request, PyObject* now_ns) {
  const Ref level = known.queue.only.get(queue.get());
  int64_t limit = 0, timeout_us = 0, rows = 0;
  if (!as_number(known.level.limit.get(level.get()).get(), &limit) ||
      !as_number(known.level.timeout_us.get(level.get()).get(), &timeout_us) || limit != 0 || timeout_us != 0) {
    return Done::kNo;
  }
  const Ref lane = lane_of(queue), key(PyLong_FromVoidPtr(request));
  const Ref batch_size = known.request.batch_size.get(request), signature = known.request.signature.get(request);
  if (!lane || !key || !as_number(batch_size.get(), &rows) || PyDict_Contains(lane.get(), key.get()) != 0) return Done::kNo;
  const Ref entry(PyTuple_Pack(5, request, batch_size.get(), signature.get(), now_ns, constants.zero));
  if (!entry || PyObject_SetItem(lane.get(), key.get(), entry.get()) != 0) return Done::kError;
  const bool is_counted = add(known.queue.count, queue.get(), 1) && add(known.queue.rows, queue.get(), rows);
  return is_counted ? Done::kYes : Done::kError;
}

// `Queue._alone` and `Queue._greedy`, of one lane. The queue has at least one request. Returns null with an error set.
Ref next_batch(const Ref& queue) {
  const Ref lane = lane_of(queue);
  Ref batch(PyList_New(0)), wanted;
  int64_t room = 0, taken_rows = 0;
  if (!lane || !batch || !as_number(known.queue.max_rows.get(queue.get()).get(), &room)) return Ref();
  const bool is_alone = known.queue.is_alone.is_true(queue.get());
  while (PyDict_Size(lane.get()) > 0 && room > 0) {
    const Ref pair = call(lane.get(), constants.popitem, Py_False);
    PyObject* const entry = pair ? PyTuple_GetItem(pair.get(), 1) : nullptr;
    int64_t rows = 0;
    if (entry == nullptr || !as_number(PyTuple_GetItem(entry, 1), &rows)) return Ref();
    PyObject* const signature = PyTuple_GetItem(entry, 2);
    if (PyList_Size(batch.get()) == 0) {
      wanted = Ref::to(signature);
    } else {
      const int is_same = rows > room ? 0 : PyObject_RichCompareBool(signature, wanted.get(), Py_EQ);
      if (is_same < 0) return Ref();
      if (is_same == 0) {
        PyObject* const key = PyTuple_GetItem(pair.get(), 0);
        if (PyObject_SetItem(lane.get(), key, entry) != 0) return Ref();
        if (!Ref(PyObject_CallMethodObjArgs(lane.get(), constants.move_to_end, key, Py_False, nullptr))) return Ref();
        break;
      }
    }
    if (PyList_Append(batch.get(), PyTuple_GetItem(entry, 0)) != 0) return Ref();
    room -= rows;
    taken_rows += rows;
    if (is_alone) break;
  }
  const bool is_counted = add(known.queue.count, queue.get(), -PyList_Size(batch.get())) && add(known.queue.rows, queue.get(), -taken_rows);
  return is_counted ? std::move(batch) : Ref();
}

// Adds the durations of a batch to those of a request, if it has any. Returns false with an error set.
bool add_durations(PyObject* request, const int64_t (&durations_ns)[3]) {
  const Ref sums = known.request.durations_ns.get(request);
  if (!sums || sums.is_none()) return static_cast<bool>(sums);
  for (Py_ssize_t i = 0; i < 3; ++i) {
    const Ref summand(PyLong_FromLongLong(durations_ns[i]));
    PyObject* const before = PyList_GetItem(sums.get(), i);
    PyObject* const sum = summand && before != nullptr ? PyNumber_Add(before, summand.get()) : nullptr;
    if (sum == nullptr || PyList_SetItem(sums.get(), i, sum) != 0) return false;
  }
  return true;
}

// `bisect_left`, of a tuple of ints.
Py_ssize_t bucket_of(PyObject* bounds_ns, int64_t taken_ns) {
  Py_ssize_t low = 0, high = PyTuple_Size(bounds_ns);
  while (low < high) {
    const Py_ssize_t middle = low + (high - low) / 2;
    int64_t bound = 0;
    // A bound that is too large for the type is above all durations.
    const bool is_below = as_number(PyTuple_GetItem(bounds_ns, middle), &bound) && bound < taken_ns;
    (is_below ? low : high) = is_below ? middle + 1 : middle;
  }
  return low;
}

// `Execution.record` of a batch in which every request got a plain response. Needs the lock.
bool record(PyObject* scheduler, PyObject* execution, PyObject* instance, PyObject* requests, int64_t answered_ns, int64_t now_ns) {
  const Ref statistics = known.scheduler.statistics.get(scheduler);
  int64_t sent_ns = 0, started_ns = 0, rows = 0, success_ns = 0, queue_ns = 0;
  if (!statistics || !as_number(known.execution.sent_ns.get(execution).get(), &sent_ns) ||
      !as_number(known.execution.started_ns.get(execution).get(), &started_ns)) {
    return false;
  }
  const int64_t input_ns = sent_ns - started_ns, infer_ns = answered_ns - sent_ns, output_ns = now_ns - answered_ns;
  const Py_ssize_t count = PyList_Size(requests);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const request = PyList_GetItem(requests, i);
    int64_t its_rows = 0, queued_ns = 0;
    if (!add_durations(request, {input_ns, infer_ns, output_ns})) return false;
    if (!as_number(known.request.batch_size.get(request).get(), &its_rows) ||
        !as_number(known.request.queued_ns.get(request).get(), &queued_ns)) {
      return false;
    }
    rows += its_rows;
    success_ns += now_ns - queued_ns;
    queue_ns += started_ns - queued_ns;
    if (!count_duration(statistics.get(), now_ns - queued_ns)) return false;
  }
  const bool is_counted = add(known.instance.served, instance, count);
  return is_counted && count_batch(statistics.get(), rows, count, success_ns, queue_ns, {input_ns, infer_ns, output_ns});
}

// Rings the bell of a thread that waits, if it does not ring already.
bool ring(PyObject* waiter) {
  const Ref bell = known.thread_waiter.bell.get(waiter);
  if (bell && call(bell.get(), constants.release)) return true;
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
  PyErr_Clear();
  return true;
}

// Gives a waiter the outcome of its request. Returns false with an error set.
bool resolve(PyObject* waiter, PyObject* answer) {
  if (is_thread(waiter)) return tell(waiter, answer);
  Done done = answer_call(waiter, answer);
  if (done == Done::kNo) done = go_on(waiter, answer);
  return done == Done::kNo ? static_cast<bool>(call(waiter, constants.resolve, answer)) : done == Done::kYes;
}

// Has the reactor call a method of an object with one or two arguments. No error is set afterwards.
void call_in_reactor(PyObject* scheduler, PyObject* object, PyObject* name, PyObject* argument,
                     PyObject* second = nullptr) {
  const Ref reactor = known.scheduler.reactor.get(scheduler), method(PyObject_GetAttr(object, name));
  const Ref soon(reactor ? PyObject_GetAttr(reactor.get(), constants.soon) : nullptr);
  const Ref action(
      method ? PyObject_CallFunctionObjArgs(constants.partial, method.get(), argument, second, nullptr) : nullptr);
  if (!soon || !action || !call(soon.get(), constants.append, action.get()) || !call(reactor.get(), constants.wake)) PyErr_Clear();
}

// `Scheduler._hand_out`, where outcomes may leave in any order. Every caller gets its outcome, whatever the waiter of the one before raised.
// Returns false with the first error set.
bool hand_out(PyObject* scheduler, PyObject* requests, PyObject* answers) {
  std::optional<KeptError> first;
  const Py_ssize_t count = PyList_Size(requests);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Ref request = Ref::to(PyList_GetItem(requests, i)), answer = Ref::to(PyList_GetItem(answers, i));
    if (known.request.left.is_true(request.get())) continue;
    const Ref waiter = known.request.waiter.get(request.get());
    if (waiter && resolve(waiter.get(), answer.get())) continue;
    if (first) {
      PyErr_Clear();
    } else {
      first.emplace();
    }
    // A signal handler may have cut it: `resolve` of a task may be called twice.
    if (known.task_waiter.kind.is(waiter.get())) {
      call_in_reactor(scheduler, waiter.get(), constants.resolve, answer.get());
    }
  }
  return !first;
}

// `Execution.appoint`: the first caller drives if it is a thread that has not left; else Python asks all of them.
bool appoint(PyObject* execution) {
  const Ref requests = known.execution.requests.get(execution);
  PyObject* const first = PyList_GetItem(requests.get(), 0);
  const Ref waiter = first == nullptr ? Ref() : known.request.waiter.get(first);
  if (!waiter) return false;
  if (!is_thread(waiter.get()) || known.thread_waiter.gone.is_true(waiter.get())) {
    return static_cast<bool>(call(execution, constants.appoint));
  }
  return hand_to(waiter.get(), execution);
}

// `Scheduler._launch` of a batch without a request of the calling thread. On an `interruptible` thread, the reactor
// does what is not usual, and goes on with what a signal handler has cut. Returns false with an error set.
bool launch_one(PyObject* scheduler, PyObject* execution, bool interruptible) {
  const Done done = send(scheduler, execution);
  if (done == Done::kError) return false;
  if (done == Done::kYes) {
    if (appoint(execution)) return true;
    const KeptError kept;
    if (interruptible) call_in_reactor(scheduler, execution, constants.abandon, Py_None);
    return false;
  }
  const Ref one(PyList_New(1)), none(PyList_New(0));
  if (!one || !none || PyList_SetItem(one.get(), 0, Ref::to(execution).release()) != 0) return false;
  if (interruptible) {
    call_in_reactor(scheduler, scheduler, constants.launch, one.get(), none.get());
    return true;
  }
  return static_cast<bool>(Ref(PyObject_CallMethodObjArgs(scheduler, constants.launch, one.get(), none.get(), nullptr)));
}

// Launches all of them, whatever one raises. Returns false with the first error set.
bool launch(PyObject* scheduler, const std::vector<Ref>& executions, bool interruptible) {
  std::optional<KeptError> first;
  for (const Ref& execution : executions) {
    if (launch_one(scheduler, execution.get(), interruptible)) continue;
    if (first) {
      PyErr_Clear();
    } else {
      first.emplace();
    }
  }
  return !first;
}

// One batch with plain responses to all of its requests.
class Settlement {
 public:
  Settlement(PyObject* scheduler, PyObject* execution, PyObject* answers, int64_t answered_ns)
      : scheduler_(scheduler),
        execution_(execution),
        answers_(answers),
        instance_(known.execution.instance.get(execution)),
        requests_(known.execution.requests.get(execution)),
        answered_ns_(answered_ns) {}

  Done settle(bool interruptible) {
    const int64_t now_ns = monotonic_ns();
    {
      const Held held(scheduler_);
      if (!held.is_held()) return PyErr_Occurred() ? Done::kError : Done::kNo;
      const Ref busy = known.scheduler.busy.get(scheduler_);
      if (!busy) return Done::kError;
      if (PyDict_GetItemWithError(busy.get(), instance_.get()) != execution_) return Done::kYes;
      if (!attempt([this] { return is_usual() && has_room(); })) {
        PyErr_Clear();
        return Done::kNo;
      }
      if (interruptible && !is_simple()) return Done::kNo;
      const Done released = known.limited.kind.is(scheduler_) ? release() : Done::kYes;
      if (released != Done::kYes) return released;
      if (!record(scheduler_, execution_, instance_.get(), requests_.get(), answered_ns_, now_ns)) return Done::kError;
      if (PySequence_Contains(idle_.get(), instance_.get()) == 0 && PyList_Append(idle_.get(), instance_.get()) != 0) {
        return Done::kError;
      }
      if (PyDict_DelItem(busy.get(), instance_.get()) != 0 || !form(now_ns)) return Done::kError;
      const Ref changed = known.scheduler.changed.get(scheduler_);
      int64_t waiting = 0;
      if (!changed || !as_number(known.condition.waiting.get(changed.get()).get(), &waiting)) return Done::kError;
      if (waiting != 0 && !call(changed.get(), constants.notify_all)) return Done::kError;
    }
    int64_t sent_ns = 0;
    as_number(known.execution.sent_ns.get(execution_).get(), &sent_ns);
    Together::learn(now_ns - sent_ns);
    // Whatever callers' waiters raise, the next batch goes.
    const bool is_first = !started_.empty() && now_ns - sent_ns > kSlowNs;
    const auto send_next = [&] { return launch(scheduler_, started_, interruptible); };
    const auto answer_all = [&] { return hand_out(scheduler_, requests_.get(), answers_); };
    bool is_done = is_first ? send_next() : answer_all();
    if (!started_.empty()) {
      const KeptError kept;
      const bool is_other_done = is_first ? answer_all() : send_next();
      is_done = is_done && is_other_done;
    }
    return is_done && !PyErr_Occurred() ? Done::kYes : Done::kError;
  }

 private:
  bool is_usual() {
    const Schedulers& of = known.scheduler;
    const Ref departures = of.departures.get(scheduler_), statistics = of.statistics.get(scheduler_);
    const Ref queue = of.queue.get(scheduler_);
    queue_ = plain_queue(queue.get());
    idle_ = of.idle.get(scheduler_);
    if (!queue_ || !idle_ || !known.departures.kind.is(departures.get()) || known.departures.in_order.is_true(departures.get())) {
      return clear();
    }
    if (of.decoupled.is_true(scheduler_) || !known.condition.kind.is(of.changed.get(scheduler_).get())) return clear();
    if (!known.statistics.kind.is(statistics.get()) || !known.statistics.summaries.is_none(statistics.get())) return clear();
    const Py_ssize_t count = PyList_Size(requests_.get());
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const request = PyList_GetItem(requests_.get(), i);
      if (!known.request.trace.is_none(request) || known.request.fills_place.is_true(request)) return clear();
    }
    const Instances& its = known.instance;
    PyObject* const instance = instance_.get();
    if (!its.kind.is(instance) || !its.broken.is_none(instance) || !its.accepts.is_true(instance)) return clear();
    if (its.blocks.is_true(instance)) return clear();
    int64_t served = 0;
    if (!as_number(its.served.get(instance).get(), &served)) return clear();
    const Ref total(PyLong_FromLongLong(served + count)), most = its.serves_until.get(instance);
    return (total && most && PyObject_RichCompareBool(total.get(), most.get(), Py_LT) == 1) || clear();
  }

  // True if all outcomes are for waiters that a signal handler cannot leave in the middle of something.
  bool is_simple() const {
    const Py_ssize_t count = PyList_Size(requests_.get());
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Ref waiter = known.request.waiter.get(PyList_GetItem(requests_.get(), i));
      if (is_thread(waiter.get()) || known.task_waiter.kind.is(waiter.get())) continue;
      // A chain sends its next request on this thread.
      if (count > 1 || count_of(queue_) != 0 || !known.chain_run.kind.is(waiter.get())) return clear();
    }
    return true;
  }

  static bool clear() {
    PyErr_Clear();
    return false;
  }

  // Returns the permit of the instance.
  Done release() const {
    const Permits permits(scheduler_);
    // With requests in the queue, there is a next permit to ask for.
    if (!permits.is_usual() || !permits.holds(instance_.get()) || count_of(queue_) != 0) return Done::kNo;
    return permits.release(instance_.get()) ? Done::kYes : Done::kError;
  }

  // Makes room for all batches that may be started: those that left the queue must not be lost for want of memory.
  bool has_room() {
    started_.reserve(static_cast<size_t>(PyList_Size(idle_.get()) + 1));
    return true;
  }

  // `Scheduler._form`, of a queue without plan or deadlines.
  bool form(int64_t now_ns) {
    if (count_of(queue_) == 0) return true;
    const Ref started_ns(PyLong_FromLongLong(now_ns));
    if (!started_ns) return false;
    while (count_of(queue_) > 0 && PyList_Size(idle_.get()) > 0) {
      const Ref instance = Ref::to(PyList_GetItem(idle_.get(), PyList_Size(idle_.get()) - 1));
      const Ref batch = next_batch(queue_);
      if (!batch) return false;
      Ref execution = start(scheduler_, instance.get(), batch.get(), started_ns.get(), Py_None);
      if (!execution || !pop_last(idle_.get())) return false;
      started_.push_back(std::move(execution));
    }
    return true;
  }

  PyObject* const scheduler_;
  PyObject* const execution_;
  PyObject* const answers_;
  const Ref instance_, requests_;
  Ref queue_, idle_;
  const int64_t answered_ns_;
  std::vector<Ref> started_;
};

}  // namespace

bool count_duration(PyObject* statistics, int64_t taken_ns) {
  const StatisticsKind& of = known.statistics;
  const Ref by_duration = of.by_duration.get(statistics), bounds_ns = of.bounds_ns.get(statistics);
  if (!by_duration || !bounds_ns) return false;
  const Py_ssize_t bucket = bucket_of(bounds_ns.get(), taken_ns);
  int64_t before = 0;
  if (!as_number(PyList_GetItem(by_duration.get(), bucket), &before)) return false;
  PyObject* const after = PyLong_FromLongLong(before + 1);
  return after != nullptr && PyList_SetItem(by_duration.get(), bucket, after) == 0;
}

bool count_batch(PyObject* statistics, int64_t rows, int64_t requests, int64_t success_ns, int64_t queue_ns, const int64_t (&parts_ns)[3]) {
  const StatisticsKind& of = known.statistics;
  const auto [input_ns, infer_ns, output_ns] = parts_ns;
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  const int64_t now_ms = wall.tv_sec * INT64_C(1000) + wall.tv_nsec / 1000000;
  const bool is_counted =
      of.last_inference_ms.set(statistics, PyLong_FromLongLong(now_ms)) && add(of.execution_count, statistics, 1) &&
      add(of.inference_count, statistics, rows) && add(of.success_count, statistics, requests) &&
      add(of.success_ns, statistics, success_ns) && add(of.queue_ns, statistics, queue_ns) &&
      add(of.input_ns, statistics, input_ns * requests) && add(of.infer_ns, statistics, infer_ns * requests) &&
      add(of.output_ns, statistics, output_ns * requests);
  const Ref key(PyLong_FromLongLong(rows)), batches = of.batches.get(statistics);
  if (!is_counted || !key || !batches) return false;
  Ref batch = Ref::to(PyDict_GetItemWithError(batches.get(), key.get()));
  const int64_t more[4] = {1, input_ns, infer_ns, output_ns};
  if (!batch) {
    // Callers choose the sizes.
    int64_t most = 0;
    if (!as_number(constants.most_batch_sizes, &most)) return false;
    if (PyDict_Size(batches.get()) >= most) return true;
    batch = Ref(PyList_New(4));
    for (Py_ssize_t i = 0; batch && i < 4; ++i) PyList_SetItem(batch.get(), i, Ref::to(constants.zero).release());
    if (!batch || PyDict_SetItem(batches.get(), key.get(), batch.get()) != 0) return false;
  }
  for (Py_ssize_t i = 0; i < 4; ++i) {
    const Ref summand(PyLong_FromLongLong(more[i]));
    PyObject* const sum = summand ? PyNumber_Add(PyList_GetItem(batch.get(), i), summand.get()) : nullptr;
    if (sum == nullptr || PyList_SetItem(batch.get(), i, sum) != 0) return false;
  }
  return true;
}

bool is_thread(PyObject* waiter) { return known.thread_waiter.kind.is(waiter) || known.punctual_waiter.kind.is(waiter); }

bool tell(PyObject* waiter, PyObject* outcome) { return known.thread_waiter.outcome.set_to(waiter, outcome) && ring(waiter); }

bool hand_to(PyObject* waiter, PyObject* execution) {
  return known.execution.drivers.set(execution, PyList_New(0)) && known.thread_waiter.execution.set_to(waiter, execution) && ring(waiter);
}

bool add(const Field& field, PyObject* object, int64_t more) {
  const Ref before = field.get(object);
  if (!before) return false;
  int64_t number = 0, sum = 0;
  if (as_number(before.get(), &number) && !__builtin_add_overflow(number, more, &sum)) {
    return field.set(object, PyLong_FromLongLong(sum));
  }
  const Ref summand(PyLong_FromLongLong(more));
  return summand && field.set(object, PyNumber_Add(before.get(), summand.get()));
}

namespace {

// Returns true for an instance that executes while its caller waits elsewhere.
bool is_for_this(PyObject* instance) { return known.instance.kind.is(instance) && !known.instance.blocks.is_true(instance); }

}  // namespace

Done submit(PyObject* scheduler, PyObject* request, Ref* execution) {
  const Schedulers& of = known.scheduler;
  if (!is_scheduler(scheduler) || !known.request.kind.is(request) || of.decoupled.is_true(scheduler)) return Done::kNo;
  const Ref departures = of.departures.get(scheduler), outer = of.queue.get(scheduler), idle = of.idle.get(scheduler);
  const Ref waiter = known.request.waiter.get(request);
  if (!waiter || !idle || !known.departures.kind.is(departures.get()) || known.departures.in_order.is_true(departures.get())) {
    PyErr_Clear();
    return Done::kNo;
  }
  Held held(scheduler);
  if (!held.is_held()) return PyErr_Occurred() ? Done::kError : Done::kNo;
  const Ref queue = plain_queue(outer.get());
  if (!queue || !known.request_queue.is_open.is_true(outer.get()) || known.request_queue.rejects_late.is_true(outer.get())) {
    PyErr_Clear();
    return Done::kNo;
  }
  const int64_t count = count_of(queue);
  const Py_ssize_t idle_count = PyList_Size(idle.get());
  // With requests that wait and an instance that is idle, there is something to decide.
  if (!of.refusal.is_none(scheduler) || (idle_count > 0 && count != 0)) return Done::kNo;
  Ref now_ns(PyLong_FromLongLong(monotonic_ns()));
  if (!now_ns || !known.request.queued_ns.set_to(request, now_ns.get())) return Done::kError;
  if (idle_count == 0) {
    const Done done = enqueue(queue, request, now_ns.get());
    if (done == Done::kYes) ++counts.submit;
    return done;
  }
  const Ref batch(PyList_New(1));
  if (!batch || PyList_SetItem(batch.get(), 0, Ref::to(request).release()) != 0) return Done::kError;
  Ref instance = Ref::to(PyList_GetItem(idle.get(), idle_count - 1));
  if (known.limited.kind.is(scheduler)) {
    const Permits permits(scheduler);
    if (!permits.is_usual()) return Done::kNo;
    instance = Ref::to(permits.next(idle.get()));
    if (!is_for_this(instance.get())) return Done::kNo;
    if (!permits.acquire(instance.get())) return Done::kError;
  } else if (!is_for_this(instance.get())) {
    return Done::kNo;
  }
  Ref started = start(scheduler, instance.get(), batch.get(), now_ns.get(), waiter.get());
  if (!started || !remove(idle.get(), instance.get())) return Done::kError;
  held.release();
  ++counts.submit;
  const Done done = send(scheduler, started.get());
  if (done == Done::kError) return done;
  if (done == Done::kNo) {
    const Ref goes_on(PyObject_CallMethodObjArgs(scheduler, constants.send, started.get(), request, nullptr));
    if (!goes_on) return Done::kError;
    if (!goes_on.is_true()) return Done::kYes;
  }
  *execution = std::move(started);
  return Done::kYes;
}

Done finish_execution(PyObject* scheduler, PyObject* execution, bool interruptible) {
  if (!is_scheduler(scheduler) || !known.execution.kind.is(execution)) return Done::kNo;
  const Ref busy = known.scheduler.busy.get(scheduler), instance = known.execution.instance.get(execution);
  const Ref pending = known.execution.pending.get(execution), requests = known.execution.requests.get(execution);
  if (!busy || !instance || !pending || !requests || !known.link.kind.is(pending.get())) {
    PyErr_Clear();
    return Done::kNo;
  }
  // It was taken from an interrupted thread, and is finished.
  if (PyDict_GetItemWithError(busy.get(), instance.get()) != execution) return Done::kYes;
  const int64_t answered_ns = monotonic_ns();
  Ref answers;
  const Done done = finish(pending.get(), requests.get(), &answers);
  if (done == Done::kNo) return done;
  if (done == Done::kError) {
    lose(scheduler, execution);
    // What is not moonpool's own error comes from a signal handler, if any runs on this thread.
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return Done::kError;
    if (interruptible && !PyErr_ExceptionMatches(constants.moonpool_error)) return Done::kError;
    PyErr_Clear();
    return Done::kYes;
  }
  if (!known.execution.answers.set_to(execution, answers.get())) return Done::kError;
  Settlement settlement(scheduler, execution, answers.get(), answered_ns);
  const Done settled = settlement.settle(interruptible);
  if (settled == Done::kYes) ++counts.finish;
  if (settled != Done::kNo) return settled;
  const Ref at(PyLong_FromLongLong(answered_ns)), method(PyObject_GetAttr(scheduler, constants.settle));
  const Ref arguments(at ? PyTuple_Pack(3, execution, answers.get(), at.get()) : nullptr);
  const Ref options(Py_BuildValue("{s:O}", "interruptible", interruptible ? Py_True : Py_False));
  if (!method || !arguments || !options) return Done::kError;
  return Ref(PyObject_Call(method.get(), arguments.get(), options.get())) ? Done::kYes : Done::kError;
}

namespace {

// A thread that waits for its outcome, as `ThreadWaiter` does.
class Caller {
 public:
  Caller(PyObject* scheduler, PyObject* request) : scheduler_(scheduler), request_(request) {}

  Ref outcome() {
    if (!begin()) return Ref();
    Ref execution;
    const Done done = submit(scheduler_, request_, &execution);
    if (done == Done::kError) return Ref();
    if (done == Done::kNo) {
      const Done begun = begin_run(scheduler_, request_, &execution);
      if (begun == Done::kError) return Ref();
      if (begun == Done::kNo) execution = call(scheduler_, constants.enter, request_);
    }
    if (done == Done::kNo && !execution && PyErr_Occurred()) return Ref();
    if (execution && !execution.is_none() && !drive(execution.get())) return Ref();
    for (;;) {
      Ref outcome = known.thread_waiter.outcome.get(waiter_.get());
      if (!outcome.is_none()) return outcome;
      if (!listen()) return Ref();
    }
  }

 private:
  // Makes the waiter of the request, as `ThreadWaiter.__init__` does.
  bool begin() {
    const ThreadWaiters& of = known.thread_waiter;
    waiter_ = of.kind.make();
    Ref bell(waiter_ && constants.new_lock != nullptr ? PyObject_CallNoArgs(constants.new_lock) : nullptr);
    if (!bell || !call(bell.get(), constants.acquire)) return false;
    int64_t main_thread = 0;
    if (!waiter_ || !as_number(constants.main_thread, &main_thread)) return false;
    is_interruptible_ = PyThread_get_thread_ident() == static_cast<unsigned long>(main_thread);
    PyObject* const waiter = waiter_.get();
    return of.bell.set(waiter, bell.release()) && of.execution.set_to(waiter, Py_None) && of.gone.set_to(waiter, Py_False) &&
           of.interruptible.set_to(waiter, is_interruptible_ ? Py_True : Py_False) && of.outcome.set_to(waiter, Py_None) &&
           known.request.waiter.set_to(request_, waiter);
  }

  // `Execution.drive`. The scheduler need not be the one that this thread asked: a step of an ensemble is another model's.
  bool drive(PyObject* execution) {
    const Ref pending = known.execution.pending.get(execution), owner = known.execution.scheduler.get(execution);
    if (!pending || !owner) return false;
    PyObject* const scheduler = owner.get();
    Done done = Done::kNo;
    if (known.link.kind.is(pending.get())) done = wait_for(pending.get(), scheduler, execution);
    if (done == Done::kNo) done = call(pending.get(), constants.wait) ? Done::kYes : Done::kError;
    if (done == Done::kError && !is_gone()) {
      const KeptError kept;
      call(execution, constants.drive_in_reactor);
      return false;
    }
    done = finish_execution(scheduler, execution, is_interruptible_);
    if (done != Done::kNo) return done == Done::kYes;
    const Ref method(PyObject_GetAttr(scheduler, constants.finish)), arguments(PyTuple_Pack(1, execution));
    const Ref options(Py_BuildValue("{s:O}", "interruptible", is_interruptible_ ? Py_True : Py_False));
    return method && arguments && options && Ref(PyObject_Call(method.get(), arguments.get(), options.get()));
  }

  // Waits for the answer of a link: in a moment of its own if nobody else waits for that.
  Done wait_for(PyObject* link, PyObject* scheduler, PyObject* execution) {
    const Ref requests = known.execution.requests.get(execution), queue = known.scheduler.queue.get(scheduler);
    const Py_ssize_t waiting = size_of(requests) == 1 && queue ? PyObject_Size(queue.get()) : -1;
    if (waiting == 0) return wait_alone(link);
    // A signal handler may have raised. The scheduler of an ensemble has no queue of that kind.
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) return Done::kError;
    PyErr_Clear();
    if (!is_interruptible_) together_.tie();
    return wait(link);
  }

  // Returns true, and drops the error, if it says that the stub is gone: `finish` meets it again.
  static bool is_gone() {
    if (!PyErr_ExceptionMatches(constants.peer_gone)) return false;
    PyErr_Clear();
    return true;
  }

  // Waits for the bell, and drives the execution that this thread was appointed to, if any.
  bool listen() {
    const ThreadWaiters& of = known.thread_waiter;
    const Ref bell = of.bell.get(waiter_.get());
    if (!is_interruptible_) together_.tie();
    if (!bell || !call(bell.get(), constants.acquire)) return false;
    const Ref execution = of.execution.get(waiter_.get());
    if (execution.is_none()) return true;
    if (!execution || !of.execution.set_to(waiter_.get(), Py_None)) return false;
    // `Execution.claim`: nobody else runs in between.
    const Ref drivers = known.execution.drivers.get(execution.get());
    if (size_of(drivers) != 0) return !PyErr_Occurred();
    return PyList_Append(drivers.get(), waiter_.get()) == 0 && drive(execution.get());
  }

  PyObject* const scheduler_;
  PyObject* const request_;
  Ref waiter_;
  Together together_;
  bool is_interruptible_ = false;
};

}  // namespace

Ref outcome_of(PyObject* scheduler, PyObject* request) { return Caller(scheduler, request).outcome(); }

}  // namespace moonpool::quick
