#include "_quick_kinds.h"

#include <cstring>

// The module: its functions, and what Python teaches it.
namespace moonpool::quick {

Known known;
Constants constants;
Counts counts{};

bool Known::learn(const char* name, PyObject* sample) {
  struct Row {
    const char* name;
    Kind* kind;
    std::initializer_list<Field*> fields;
  };
  const Row rows[] = {
      {"InferenceRequest", &request.kind,
       {&request.allocator, &request.arrays, &request.attempts, &request.batch_size, &request.details, &request.durations_ns, &request.fills_place,
        &request.has_views, &request.is_cancelled, &request.left, &request.priority, &request.queued_ns, &request.responded_ns,
        &request.response, &request.responses, &request.shapes, &request.signature, &request.takes_devices, &request.targets,
        &request.states, &request.timeout_us, &request.trace, &request.userp, &request.waiter, &request.wants_wire}},
      {"Response", &response.kind, {&response.outputs, &response.parameters, &response.request_id}},
      {"Link", &link.kind,
       {&link.conversation, &link.lanes, &link.given_back, &link.released, &link.replies, &link.borrowed_blocks,
        &link.response_regions, &link.port, &link.release}},
      {"BorrowedBlocks", &borrowed_blocks.kind,
       {&borrowed_blocks.arena, &borrowed_blocks.kept, &borrowed_blocks.lock, &borrowed_blocks.returned}},
      {"Block", &block.kind, {&block.region, &block.offset, &block.size_bytes, &block.holds}},
      {"SharedRegion", &region.kind, {&region.id, &region.size_bytes, &region.buffer}},
      {"Lease", &lease.kind, {&lease.give_back, &lease.token, &lease.region, &lease.offset}},
      {"Arena", &arena.kind, {&arena.extents}},
      {"Extents", &extents.kind, {&extents.live, &extents.spares, &extents.uses}},
      {"Reactor", &reactor.kind, {&reactor.ident, &reactor.once, &reactor.epoll}},
      {"Poller", &poller.kind, {&poller.epoll, &poller.beyond}},
      {"CallDispatcher", &dispatcher.kind,
       {&dispatcher.channel, &dispatcher.link, &dispatcher.models, &dispatcher.calls, &dispatcher.tasks, &dispatcher.questions,
        &dispatcher.rate_limiter, &dispatcher.usual, &dispatcher.send_queue, &dispatcher.requests_budget}},
      {"StubSendQueue", &send_queue.kind, {&send_queue.channel, &send_queue.lock, &send_queue.waiting}},
      {"CopyBudget", &copy_budget.kind, {&copy_budget.taken}},
      {"UsualCalls", &usual_calls.kind, {&usual_calls.asks, &usual_calls.replies}},
      {"KnownCalls", &known_calls.kind, {&known_calls.begin, &known_calls.known}},
      {"ModelCall", &model_call.kind,
       {&model_call.answer, &model_call.batch, &model_call.is_cancelled, &model_call.model, &model_call.number, &model_call.request,
        &model_call.scheduler, &model_call.takes_many}},
      {"Channel", &channel.kind, {&channel.inbox, &channel.socket}},
      {"Execution", &execution.kind,
       {&execution.drivers, &execution.answers, &execution.has_deferred, &execution.has_traces, &execution.instance,
        &execution.is_lost, &execution.is_sent, &execution.pending, &execution.requests, &execution.scheduler,
        &execution.sent_ns, &execution.started_ns}},
      {"Scheduler", &scheduler.kind,
       {&scheduler.decoupled, &scheduler.lock, &scheduler.refusal, &scheduler.idle, &scheduler.queue, &scheduler.departures,
        &scheduler.busy, &scheduler.changed, &scheduler.reactor, &scheduler.statistics}},
      {"LimitedScheduler", &limited.kind, {&limited.limiter, &limited.waiting, &limited.used}},
      {"RateLimiter", &limiter.kind, {&limiter.lock, &limiter.pool}},
      {"ResourcePool", &resource_pool.kind, {&resource_pool.members, &resource_pool.waiting}},
      {"ResourceMember", &resource_member.kind,
       {&resource_member.counts, &resource_member.weight, &resource_member.rank, &resource_member.turn, &resource_member.is_holding}},
      {"ResourceCount", &resource_count.kind, {&resource_count.in_use, &resource_count.limit}},
      {"RequestQueue", &request_queue.kind, {&request_queue.is_open, &request_queue.rejects_late, &request_queue.queue}},
      {"Queue", &queue.kind,
       {&queue.count, &queue.rows, &queue.max_rows, &queue.only, &queue.deadlines, &queue.is_alone, &queue.is_greedy}},
      {"Level", &level.kind, {&level.limit, &level.timeout_us, &level.late, &level.waiting}},
      {"Departures", &departures.kind, {&departures.in_order}},
      {"CountingCondition", &condition.kind, {&condition.waiting}},
      {"ModelInstance", &instance.kind,
       {&instance.backend, &instance.state, &instance.accepts, &instance.blocks, &instance.broken, &instance.served,
        &instance.serves_until}},
      {"PythonBackend", &backend.kind, {}},
      {"StubHandle", &stub.kind, {&stub.link}},
      {"ThreadWaiter", &thread_waiter.kind,
       {&thread_waiter.bell, &thread_waiter.execution, &thread_waiter.gone, &thread_waiter.interruptible, &thread_waiter.outcome}},
      {"PunctualWaiter", &punctual_waiter.kind, {}},
      {"TaskWaiter", &task_waiter.kind, {}},
      {"ChainRun", &chain_run.kind,
       {&chain_run.asked, &chain_run.at, &chain_run.chain, &chain_run.durations_ns, &chain_run.flow, &chain_run.is_over,
        &chain_run.interruptible, &chain_run.output, &chain_run.owner, &chain_run.request, &chain_run.scheduler, &chain_run.turn}},
      {"EnsembleScheduler", &ensemble.kind, {&ensemble.caller, &ensemble.runs, &ensemble.usual}},
      {"EnsembleCaller", &ensemble_caller.kind, {&ensemble_caller.as_they_are}},
      {"StepModel", &step_model.kind, {&step_model.plans}},
      {"Statistics", &statistics.kind,
       {&statistics.last_inference_ms, &statistics.execution_count, &statistics.inference_count, &statistics.success_count,
        &statistics.success_ns, &statistics.queue_ns, &statistics.input_ns, &statistics.infer_ns, &statistics.output_ns,
        &statistics.bounds_ns, &statistics.by_duration, &statistics.summaries, &statistics.batches}},
  };
  for (const Row& row : rows) {
    if (std::strcmp(row.name, name) == 0) return row.kind->learn(sample, row.fields);
  }
  PyErr_Format(PyExc_ValueError, "no quick form uses %s", name);
  return false;
}

bool Constants::make(PyObject* ndarray_type, PyObject* byte_dtype) {
  ndarray = Ref::to(ndarray_type).release();
  byte = Ref::to(byte_dtype).release();
  zero = PyLong_FromLong(0);
  empty_text = PyUnicode_InternFromString("");
  delivered = Py_BuildValue("{s:O}", "delivered", Py_True);
  keeping = Py_BuildValue("{s:O}", "keep", Py_True);
  const std::pair<PyObject**, const char*> names[] = {
      {&acquire, "acquire"}, {&release, "release"}, {&locked, "locked"}, {&fileno, "fileno"}, {&popleft, "popleft"},
      {&append, "append"}, {&popitem, "popitem"}, {&move_to_end, "move_to_end"}, {&notify_all, "notify_all"},
      {&allocate, "allocate"}, {&cancel, "cancel"}, {&resolve, "resolve"}, {&appoint, "appoint"}, {&abandon, "abandon"},
      {&send, "_send"}, {&launch, "_launch"}, {&settle, "settle"}, {&lose, "_lose"}, {&dtype, "dtype"},
      {&shape, "shape"}, {&drive_in_reactor, "drive_in_reactor"}, {&wait, "wait"}, {&finish, "finish"},
      {&enter, "enter"}, {&receive_ready, "receive_ready"}, {&find, "find"}, {&signature, "signature"}, {&took, "took"},
      {&start, "_start"}, {&not_submitted, "_not_submitted"}, {&answer, "_answer"}, {&self, "__self__"},
      {&reply, "_reply"}, {&put, "put"}, {&take_back, "take_back"}, {&scheduler, "scheduler"}, {&member, "member"},
      {&leave_step, "_leave"}, {&offer, "_offer"}, {&broke, "_broke"}, {&follow, "_follow"}, {&last_tensor, "last"},
      {&soon, "soon"}, {&wake, "wake"}, {&take, "take"}, {&wait_alone, "wait_alone"}, {&request, "request"},
      {&batch_size, "batch_size"}, {&executing, "executing"}, {&channel, "channel"}, {&is_plain, "is_plain"},
      {&tensors, "tensors"},
  };
  for (const auto& [place, name] : names) *place = PyUnicode_InternFromString(name);
  return !PyErr_Occurred();
}

namespace {

// True if a form did all, False if it did nothing.
PyObject* answer_of(Done done) {
  if (done == Done::kError) return nullptr;
  if (done == Done::kNo) PyErr_Clear();
  return PyBool_FromLong(done == Done::kYes);
}

// The execution that a form has begun, None if it has queued its request, False if it did nothing.
PyObject* answer_of(Done done, Ref execution) {
  if (done != Done::kYes) return answer_of(done);
  return execution ? execution.release() : Ref::to(Py_None).release();
}

bool has(const char* function, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, wanted, given);
  return false;
}

PyObject* py_start(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has("start", count, 2) || !constants.make(arguments[0], arguments[1])) return nullptr;
  Py_RETURN_NONE;
}

PyObject* py_learn(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has("learn", count, 2)) return nullptr;
  const Ref name(PyUnicode_AsUTF8String(arguments[0]));
  char* bytes = nullptr;
  if (!name || PyBytes_AsStringAndSize(name.get(), &bytes, nullptr) != 0) return nullptr;
  const std::pair<const char*, PyObject**> objects[] = {
      {"new lock", &constants.new_lock}, {"main thread", &constants.main_thread},
      {"peer gone", &constants.peer_gone}, {"moonpool error", &constants.moonpool_error}, {"partial", &constants.partial}, {"ties callers", &constants.ties_callers},
      {"usual cost", &constants.usual_cost}, {"submitted", &constants.submitted}, {"no sequence", &constants.no_sequence},
      {"most batch sizes", &constants.most_batch_sizes}};
  for (const auto& [what, place] : objects) {
    if (std::strcmp(what, bytes) != 0) continue;
    *place = Ref::to(arguments[1]).release();
    Py_RETURN_NONE;
  }
  if (!known.learn(bytes, arguments[1])) return nullptr;
  Py_RETURN_NONE;
}

PyObject* py_submit(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has("submit", count, 2)) return nullptr;
  Ref execution;
  const Done done = submit(arguments[0], arguments[1], &execution);
  return answer_of(done, std::move(execution));
}

PyObject* py_finish(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has("finish", count, 3)) return nullptr;
  return answer_of(finish_execution(arguments[0], arguments[1], arguments[2] == Py_True));
}

PyObject* py_outcome(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return has("outcome", count, 2) ? outcome_of(arguments[0], arguments[1]).release() : nullptr;
}

PyObject* py_known_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return has("known_call", count, 3) ? known_call(arguments[0], arguments[1], arguments[2]) : nullptr;
}

PyObject* py_serve_call(PyObject*, PyObject* dispatcher) { return serve_call(dispatcher); }

PyObject* py_answer_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return has("answer_call", count, 2) ? answer_of(answer_call(arguments[0], arguments[1])) : nullptr;
}

PyObject* py_chain_step(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has("chain_step", count, 2)) return nullptr;
  Ref execution;
  const Done done = chain_step(arguments[0], arguments[1], &execution);
  return answer_of(done, std::move(execution));
}

PyObject* py_counts(PyObject*, PyObject*) {
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "execute", counts.execute, "answers", counts.answers, "submit", counts.submit,
                       "finish", counts.finish, "serve_call", counts.serve_call, "answer_call", counts.answer_call, "tie", counts.tie,
                       "chain_step", counts.chain_step);
}

// No form may let an exception of C++ out. Each looks after what it has begun; this is for what it makes before that.
template <auto function>
PyObject* with_many(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return function(self, arguments, count); });
}
template <auto function>
PyObject* with_one(PyObject* self, PyObject* argument) {
  return guarded([&] { return function(self, argument); });
}

template <auto function>
PyCFunction many() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(with_many<function>));
}

PyMethodDef functions[] = {
    {"start", many<py_start>(), METH_FASTCALL, nullptr},
    {"learn", many<py_learn>(), METH_FASTCALL, nullptr},
    {"submit", many<py_submit>(), METH_FASTCALL, nullptr},
    {"finish", many<py_finish>(), METH_FASTCALL, nullptr},
    {"outcome", many<py_outcome>(), METH_FASTCALL, nullptr},
    {"known_call", many<py_known_call>(), METH_FASTCALL, nullptr},
    {"serve_call", with_one<py_serve_call>, METH_O, nullptr},
    {"answer_call", many<py_answer_call>(), METH_FASTCALL, nullptr},
    {"chain_step", many<py_chain_step>(), METH_FASTCALL, nullptr},
    {"counts", py_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_quick", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace moonpool::quick

PyMODINIT_FUNC PyInit__quick() {
  PyObject* const module = PyModule_Create(&moonpool::quick::module);
  if (module == nullptr) return nullptr;
  if (moonpool::python::add_sources(module) != 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
