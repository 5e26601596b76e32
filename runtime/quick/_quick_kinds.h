// The classes of the runtime whose instances the quick forms read and change, and the attributes that they use.
//
// A module in Python teaches its own classes when it is imported (`learn`), so nothing here imports anything.
#pragma once

#include "objects.h"

#include "wire.h"

namespace moonpool::quick {

using namespace python;

// The answer of a quick form: it did everything; it did nothing, and Python's form has to; or an error is set.
enum class Done { kYes, kNo, kError };

struct Requests {
  Kind kind;
  Field allocator{"allocator"}, arrays{"arrays"}, attempts{"attempts"}, batch_size{"batch_size"}, details{"details"},
      durations_ns{"durations_ns"}, fills_place{"fills_place"}, has_views{"has_views"}, is_cancelled{"is_cancelled"}, left{"left"}, priority{"priority"},
      queued_ns{"queued_ns"}, responded_ns{"responded_ns"}, response{"response"}, responses{"responses"}, shapes{"shapes"},
      signature{"signature"}, takes_devices{"takes_devices"}, targets{"targets"}, timeout_us{"timeout_us"}, states{"states"}, trace{"trace"},
      userp{"userp"}, waiter{"waiter"}, wants_wire{"wants_wire"};
};
struct Responses {
  Kind kind;
  Field outputs{"outputs"}, parameters{"parameters"}, request_id{"request_id"};
};
struct Links {
  Kind kind;
  Field conversation{"conversation"}, lanes{"lanes"}, given_back{"_given_back"}, released{"released"},
      replies{"replies"}, borrowed_blocks{"borrowed_blocks"}, response_regions{"response_regions"}, port{"port"},
      release{"_release"};
};
struct BorrowedBlocksKind {
  Kind kind;
  Field arena{"_arena"}, kept{"_kept"}, lock{"lock"}, returned{"_returned"};
};
struct Blocks {
  Kind kind;
  Field region{"region"}, offset{"offset"}, size_bytes{"size_bytes"}, holds{"holds"};
};
struct Regions {
  Kind kind;
  Field id{"id"}, size_bytes{"size_bytes"}, buffer{"buffer"};
};
struct Leases {
  Kind kind;
  Field give_back{"give_back"}, token{"token"}, region{"region"}, offset{"offset"};
};
struct Arenas {
  Kind kind;
  Field extents{"_extents"};
};
struct ExtentsKind {
  Kind kind;
  Field live{"live"}, spares{"_spares"}, uses{"uses"};
};
struct Channels {
  Kind kind;
  Field inbox{"_inbox"}, socket{"_socket"};
};
struct Executions {
  Kind kind;
  Field drivers{"_drivers"}, answers{"answers"}, has_deferred{"has_deferred"}, has_traces{"has_traces"}, instance{"instance"},
      is_lost{"is_lost"}, is_sent{"is_sent"}, pending{"pending"}, requests{"requests"}, scheduler{"scheduler"},
      sent_ns{"sent_ns"}, started_ns{"started_ns"};
};
struct Schedulers {
  Kind kind;
  Field decoupled{"_decoupled"}, lock{"_lock"}, refusal{"_refusal"}, idle{"_idle"}, queue{"_queue"}, departures{"_departures"},
      busy{"_busy"}, changed{"_changed"}, reactor{"reactor"}, statistics{"statistics"};
};
struct LimitedSchedulers {
  Kind kind;
  Field limiter{"_limiter"}, waiting{"_waiting"}, used{"_used"};
};
struct Limiters {
  Kind kind;
  Field lock{"_lock"}, pool{"_pool"};
};
struct ResourcePools {
  Kind kind;
  Field members{"_members"}, waiting{"_waiting"};
};
struct ResourceMembers {
  Kind kind;
  Field counts{"counts"}, weight{"weight"}, rank{"rank"}, turn{"turn"}, is_holding{"is_holding"};
};
struct ResourceCounts {
  Kind kind;
  Field in_use{"in_use"}, limit{"limit"};
};
struct RequestQueues {
  Kind kind;
  Field is_open{"_is_open"}, rejects_late{"_rejects_late"}, queue{"_queue"};
};
struct Queues {
  Kind kind;
  Field count{"count"}, rows{"_rows"}, max_rows{"_max_rows"}, only{"_only"}, deadlines{"_deadlines"}, is_alone{"is_alone"},
      is_greedy{"is_greedy"};
};
struct Levels {
  Kind kind;
  Field limit{"limit"}, timeout_us{"timeout_us"}, late{"late"}, waiting{"waiting"};
};
struct DeparturesKind {
  Kind kind;
  Field in_order{"in_order"};
};
struct Conditions {
  Kind kind;
  Field waiting{"waiting"};
};
struct Instances {
  Kind kind;
  Field backend{"backend"}, state{"state"}, accepts{"accepts"}, blocks{"blocks"}, broken{"broken"}, served{"served"},
      serves_until{"serves_until"};
};
struct Backends {
  Kind kind;
};
struct Stubs {
  Kind kind;
  Field link{"link"};
};
struct ThreadWaiters {
  Kind kind;
  Field bell{"_bell"}, execution{"_execution"}, gone{"_gone"}, interruptible{"interruptible"}, outcome{"outcome"};
};
struct PunctualWaiters {
  Kind kind;
};
struct TaskWaiters {
  Kind kind;
};
struct Reactors {
  Kind kind;
  Field ident{"_ident"}, once{"_once"}, epoll{"_epoll"};
};
struct Pollers {
  Kind kind;
  Field epoll{"_epoll"}, beyond{"_beyond"};
};
struct Dispatchers {
  Kind kind;
  Field channel{"_channel"}, link{"_link"}, models{"_models"}, calls{"_calls"}, tasks{"_tasks"}, questions{"_questions"},
      rate_limiter{"_rate_limiter"}, usual{"_usual"}, send_queue{"_send_queue"}, requests_budget{"_requests_budget"};
};
struct SendQueues {
  Kind kind;
  Field channel{"_channel"}, lock{"_lock"}, waiting{"_waiting"};
};
struct CopyBudgets {
  Kind kind;
  Field taken{"_taken"};
};
struct UsualCallsKind {
  Kind kind;
  Field asks{"_asks"}, replies{"_replies"};
};
struct KnownCallsKind {
  Kind kind;
  Field begin{"_begin"}, known{"_known"};
};
struct ModelCalls {
  Kind kind;
  Field answer{"_answer"}, batch{"batch"}, is_cancelled{"is_cancelled"}, model{"model"}, number{"number"}, request{"request"},
      scheduler{"scheduler"}, takes_many{"takes_many"};
};
struct ChainRuns {
  Kind kind;
  Field asked{"request"}, at{"_at"}, chain{"_chain"}, durations_ns{"durations_ns"}, flow{"_flow"}, is_over{"is_over"}, output{"_output"},
      interruptible{"interruptible"}, owner{"_owner"}, request{"_request"}, scheduler{"_scheduler"}, turn{"_turn"};
};
struct EnsembleSchedulers {
  Kind kind;
  Field caller{"caller"}, runs{"_runs"}, usual{"_usual"};
};
struct EnsembleCallers {
  Kind kind;
  Field as_they_are{"as_they_are"};
};
struct StepModels {
  Kind kind;
  Field plans{"plans"};
};
struct StatisticsKind {
  Kind kind;
  Field last_inference_ms{"last_inference_ms"}, execution_count{"execution_count"}, inference_count{"inference_count"},
      success_count{"success_count"}, success_ns{"success_ns"}, queue_ns{"queue_ns"}, input_ns{"input_ns"},
      infer_ns{"infer_ns"}, output_ns{"output_ns"}, bounds_ns{"bounds_ns"}, by_duration{"by_duration"}, summaries{"summaries"}, batches{"_batches"};
};

// Everything that was taught. Read by all forms, written by `learn` alone.
struct Known {
  Requests request;
  Responses response;
  Links link;
  BorrowedBlocksKind borrowed_blocks;
  Blocks block;
  Regions region;
  Leases lease;
  Arenas arena;
  ExtentsKind extents;
  Channels channel;
  Executions execution;
  Schedulers scheduler;
  LimitedSchedulers limited;
  Limiters limiter;
  ResourcePools resource_pool;
  ResourceMembers resource_member;
  ResourceCounts resource_count;
  RequestQueues request_queue;
  Queues queue;
  Levels level;
  DeparturesKind departures;
  Conditions condition;
  Instances instance;
  Backends backend;
  Stubs stub;
  ThreadWaiters thread_waiter;
  PunctualWaiters punctual_waiter;
  TaskWaiters task_waiter;
  StatisticsKind statistics;
  Reactors reactor;
  Pollers poller;
  Dispatchers dispatcher;
  SendQueues send_queue;
  CopyBudgets copy_budget;
  UsualCallsKind usual_calls;
  KnownCallsKind known_calls;
  ModelCalls model_call;
  ChainRuns chain_run;
  EnsembleSchedulers ensemble;
  EnsembleCallers ensemble_caller;
  StepModels step_model;

  // Teaches the class of `sample` under a name. Returns false with an error set.
  bool learn(const char* name, PyObject* sample);
};
extern Known known;

// Objects that are made once.
struct Constants {
  PyObject *ndarray, *byte, *zero, *empty_text, *new_lock, *main_thread, *peer_gone, *moonpool_error, *partial,
      *ties_callers, *usual_cost, *submitted, *no_sequence, *most_batch_sizes;
  // Names of methods.
  PyObject *acquire, *release, *locked, *fileno, *popleft, *append, *popitem, *move_to_end, *notify_all, *allocate,
      *cancel, *resolve, *appoint, *abandon, *send, *launch, *settle, *lose, *dtype, *shape, *drive_in_reactor, *wait,
      *finish, *enter, *receive_ready, *find, *signature, *scheduler, *took, *start, *not_submitted, *answer, *self,
      *reply, *put, *take_back, *member, *leave_step, *offer, *broke, *follow, *last_tensor, *soon, *wake, *take,
      *wait_alone, *request, *batch_size, *executing, *channel, *is_plain, *tensors;
  PyObject* delivered;  // {"delivered": True}
  PyObject* keeping;    // {"keep": True}
  // Makes them. Returns false with an error set.
  bool make(PyObject* ndarray_type, PyObject* byte_dtype);
};
extern Constants constants;

// The number of an object's items, -1 with an error set.
inline Py_ssize_t size_of(const Ref& object) { return object ? PyObject_Size(object.get()) : -1; }

// Calls a method without arguments, or with one.
inline Ref call(PyObject* object, PyObject* name) { return Ref(PyObject_CallMethodObjArgs(object, name, nullptr)); }
inline Ref call(PyObject* object, PyObject* name, PyObject* argument) {
  return Ref(PyObject_CallMethodObjArgs(object, name, argument, nullptr));
}

// Returns true if somebody holds a lock, or if that cannot be found out.
bool is_locked(const Ref& lock);
// Returns true if the usual batches of a link go the compiled way.
bool is_compiled(PyObject* link);
// Returns the descriptor of a channel, -1 if it is closed.
int descriptor_of(PyObject* channel);

// Calls a function that may throw for want of memory. Returns false then, with an error set: nothing that it did may need more than its own
// destructors.
template <class F>
bool attempt(const F& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

// The scheduler's lock, if it is free.
class Held {
 public:
  explicit Held(PyObject* scheduler) : lock_(known.scheduler.lock.get(scheduler)) {
    const Ref got = lock_ ? call(lock_.get(), constants.acquire, Py_False) : Ref();
    is_held_ = got.is_true();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { release(); }
  bool is_held() const { return is_held_; }
  void release() {
    if (!std::exchange(is_held_, false)) return;
    const KeptError kept;
    call(lock_.get(), constants.release);
  }

 private:
  Ref lock_;
  bool is_held_ = false;
};

// Adds to an attribute that is an int. Returns false with an error set.
bool add(const Field& field, PyObject* object, int64_t more);

// The places that callers have dropped, on their way to the stub.
class Released {
 public:
  // Takes them from the link. Returns false, perhaps with an error set, if there are too many or one is no place.
  bool take(PyObject* link);
  // Puts them back: they were not sent. Returns false with an error set.
  bool give_back(PyObject* link) const;
  const std::vector<wire::Place>& places() const { return places_; }

 private:
  std::vector<Ref> taken_;
  std::vector<wire::Place> places_;
};

// How often each form did its work, for tests: a form that always declines would pass all others.
struct Counts {
  uint64_t execute, answers, submit, finish, serve_call, answer_call, tie, chain_step;
};
extern Counts counts;

// The forms. Each does all of what the function of that name in Python does, or nothing.

// Returns a request with the attributes that `InferenceRequest.__init__` sets. Empty with an error set.
Ref request_of(Ref arrays, PyObject* shapes, bool has_views);
// Returns a lease on a block in a region, as `SharedRegion.lease` makes one for `Link.open`. Empty with an error set. `memory` is the
// region's buffer, in which the caller knows the block to lie.
Ref lease_on(PyObject* link, PyObject* region, PyObject* memory, PyObject* id, PyObject* offset, PyObject* size);
// `KnownCalls.find`. Returns NotImplemented if Python has to do it.
PyObject* known_call(PyObject* begin, PyObject* calls, PyObject* packet);
// `CallDispatcher._ready`, for one packet. Returns None if none has come, True if it was served, or the packet, for Python to take.
PyObject* serve_call(PyObject* dispatcher);
// `ModelCall.resolve`.
Done answer_call(PyObject* models_call, PyObject* response);
// `Execution.drive_in_reactor`. Returns false with an error set.
bool drive(PyObject* execution);
// `BorrowedBlocks.allocate`, of a block that the stub keeps. Empty with an error set.
Ref lend_block(PyObject* blocks, int64_t size_bytes);
// `BorrowedBlocks.take_back`. Returns false with an error set.
bool take_back(PyObject* blocks, const std::vector<wire::Place>& places);
// `Link.execute`.
Done execute(PyObject* link, PyObject* requests);
// `Link.finish`. If it answers kNo, the packet is in the channel's inbox.
Done finish(PyObject* link, PyObject* requests, Ref* answers);
// `Link.wait`.
Done wait(PyObject* link);
// `Link.wait`, for a caller who alone waits for the stub.
Done wait_alone(PyObject* link);
// `Scheduler.submit`. Sets `execution` to what it returns.
Done submit(PyObject* scheduler, PyObject* request, Ref* execution);
// `wait_for_response` without a time limit. Returns the outcome, empty with an error set.
Ref outcome_of(PyObject* scheduler, PyObject* request);
// `ChainRun._submit`. Sets `execution` to what it returns.
Done chain_step(PyObject* run, PyObject* value, Ref* execution);
// `ChainRun.resolve`.
Done go_on(PyObject* run, PyObject* outcome);
// `EnsembleScheduler.submit`, of a caller's thread. Sets `execution` to what it returns.
Done begin_run(PyObject* scheduler, PyObject* request, Ref* execution);
// Counts the duration of a request that succeeded. Returns false with an error set.
bool count_duration(PyObject* statistics, int64_t taken_ns);
// `Statistics.record_batch`, without summaries; the parts are input, infer and output. Returns false with an error set.
bool count_batch(PyObject* statistics, int64_t rows, int64_t requests, int64_t success_ns, int64_t queue_ns, const int64_t (&parts_ns)[3]);
// `ThreadWaiter.resolve`. Returns false with an error set.
bool tell(PyObject* waiter, PyObject* outcome);
// True for a `ThreadWaiter`, or one with a time limit.
bool is_thread(PyObject* waiter);
// `Execution.offer`, and `ThreadWaiter.appoint` of one that has not left. Returns false with an error set.
bool hand_to(PyObject* waiter, PyObject* execution);
// `Scheduler.finish`.
Done finish_execution(PyObject* scheduler, PyObject* execution, bool interruptible);

}  // namespace moonpool::quick
