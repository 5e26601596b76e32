#include "_quick_kinds.h"

// A step of an ensemble in which each step reads one tensor of the step before.
//
// Theory of operation. `begin_run` does what `EnsembleScheduler.submit` and `ChainRun.begin` do for a plain array of a caller's thread,
// `chain_step` what `ChainRun._submit` does, and `go_on` what `ChainRun.resolve` and `_took` do with a response: it submits the next step, or gives the
// caller the response to its request. Each looks first if that is usual. The model of a step is looked up by Python's `member`, each time, and
// signal handlers may run there. So an error that is set by then may be any, and goes to `ChainRun._broke`, as in Python's form.
namespace moonpool::quick {
namespace {

Done no() {
  PyErr_Clear();
  return Done::kNo;
}

bool is_array(PyObject* object) { return object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) == constants.ndarray; }

// The request of one step.
class Step {
 public:
  explicit Step(PyObject* run) : run_(run) {}

  // Makes the request. Nobody has it yet if Python has to do it all the same.
  Done prepare(PyObject* value) {
    const ChainRuns& of = known.chain_run;
    if (!of.kind.is(run_) || !is_array(value) || of.is_over.is_true(run_)) return Done::kNo;
    const Ref asked = of.asked.get(run_), chain = of.chain.get(run_), flow = of.flow.get(run_), owner = of.owner.get(run_);
    const Requests& its = known.request;
    if (!its.kind.is(asked.get()) || !its.details.is_none(asked.get()) || its.is_cancelled.is_true(asked.get())) return no();
    waiter_ = its.waiter.get(asked.get());
    if (!is_thread(waiter_.get()) || !chain || !PyList_CheckExact(chain.get()) || !flow || !owner) return no();
    if (!as_number(of.at.get(run_).get(), &at_) || at_ < 0 || at_ >= PyList_Size(chain.get())) return no();
    step_ = Ref::to(PyList_GetItem(chain.get(), at_));
    const Ref member = call(owner.get(), constants.member, PyTuple_GetItem(step_.get(), 0));
    if (!member) return Done::kError;
    if (!known.step_model.kind.is(member.get())) return Done::kNo;
    const Ref plans = known.step_model.plans.get(member.get());
    plan_ = Ref::to(plans ? PyDict_GetItemWithError(plans.get(), flow.get()) : nullptr);
    // Inputs, shapes, scheduler and if its output is the caller's.
    if (!plan_ || PyTuple_Size(plan_.get()) != 3) return no();
    if (PyTuple_GetItem(plan_.get(), 2) == Py_True) {
      if (!its.allocator.is_none(asked.get())) return no();
      wants_wire_ = its.wants_wire.is_true(asked.get());
      takes_devices_ = !wants_wire_ || its.takes_devices.is_true(asked.get());
    }
    return make(value);
  }

  // Submits the request. Returns kYes, or kError with an error set.
  Done submit(Ref* execution) {
    const ChainRuns& of = known.chain_run;
    const Requests& its = known.request;
    PyObject *const request = request_.get(), *const scheduler = PyTuple_GetItem(plan_.get(), 1);
    const bool is_set = its.waiter.set_to(request, run_) && its.durations_ns.set(request, of.durations_ns.get(run_).release()) &&
                        its.takes_devices.set_to(request, takes_devices_ ? Py_True : Py_False) &&
                        its.wants_wire.set_to(request, wants_wire_ ? Py_True : Py_False) && of.at.set(run_, PyLong_FromLongLong(at_ + 1)) &&
                        of.output.set_to(run_, PyTuple_GetItem(step_.get(), 2)) && of.scheduler.set_to(run_, scheduler) &&
                        of.request.set_to(run_, request);
    if (!is_set) return Done::kError;
    Done done = quick::submit(scheduler, request, execution);
    if (done == Done::kNo) {
      *execution = call(scheduler, constants.enter, request);
      done = *execution ? Done::kYes : Done::kError;
    }
    if (done == Done::kError) return done;
    // The caller may have left meanwhile.
    if (of.is_over.is_true(run_) && !call(run_, constants.leave_step, Py_None)) return Done::kError;
    ++counts.chain_step;
    return Done::kYes;
  }

  // `ChainRun._offer`. Returns false with an error set.
  bool offer(PyObject* execution) const {
    if (known.thread_waiter.gone.is_true(waiter_.get())) return static_cast<bool>(call(run_, constants.offer, execution));
    return hand_to(waiter_.get(), execution);
  }

 private:
  Done make(PyObject* value) {
    PyObject* const names = PyTuple_GetItem(step_.get(), 1);
    const Ref inputs(PyDict_New());
    for (Py_ssize_t i = 0; inputs && i < PyTuple_Size(names); ++i) {
      if (PyDict_SetItem(inputs.get(), PyTuple_GetItem(names, i), value) != 0) return Done::kError;
    }
    if (inputs) request_ = call(PyTuple_GetItem(plan_.get(), 0), constants.request, inputs.get());
    if (!request_) return Done::kError;
    return request_.is_none() ? Done::kNo : Done::kYes;
  }

  PyObject* const run_;
  Ref waiter_, step_, plan_, request_;
  int64_t at_ = 0;
  bool wants_wire_ = false, takes_devices_ = true;
};

// Ends the run with the error that is set, as `ChainRun._follow` does. kError if the error has to go on.
Done broke(PyObject* run) {
  fail("a step of an ensemble failed and set no error");
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return Done::kError;
  Raised raised;
  const Ref is_told = call(run, constants.broke, raised.value());
  if (!is_told) return Done::kError;
  if (is_told.is_true()) return Done::kYes;
  raised.set_again();
  return Done::kError;
}

// Returns the tensor that the next step reads, empty if the outcome is unusual. Changes nothing.
Ref value_of(PyObject* run, PyObject* outcome) {
  const ChainRuns& of = known.chain_run;
  const Ref turn = of.turn.get(run), parameters = known.response.parameters.get(outcome), outputs = known.response.outputs.get(outcome);
  if (!turn || !PyList_CheckExact(turn.get()) || PyList_Size(turn.get()) != 1) return Ref();
  if (PyList_GetItem(turn.get(), 0) != constants.submitted) return Ref();
  if (!parameters || !PyDict_CheckExact(parameters.get()) || PyDict_Size(parameters.get()) != 0) return Ref();
  const Ref name = of.output.get(run);
  if (!name || !outputs || !PyDict_CheckExact(outputs.get())) return Ref();
  return Ref::to(PyDict_GetItemWithError(outputs.get(), name.get()));
}

// The response to the caller of a run: `ChainRun._deliver`, `EnsembleCaller.response` and `EnsembleScheduler.ended`.
class Delivery {
 public:
  Delivery(PyObject* run, PyObject* value) : run_(run), value_(value) {}

  Done deliver() {
    if (!is_usual() || !make_response()) return no();
    {
      const Held held(owner_.get());
      if (!held.is_held()) return PyErr_Occurred() ? Done::kError : Done::kNo;
      if (PyDict_GetItemWithError(runs_.get(), asked_.get()) != run_) return no();
      if (!known.chain_run.is_over.set_to(run_, Py_True) || PyDict_DelItem(runs_.get(), asked_.get()) != 0 || !count()) return Done::kError;
    }
    // The request of the last step is dropped after the caller has its response.
    const Ref before = known.chain_run.request.get(run_);
    const bool is_told = known.request.left.is_true(asked_.get()) || tell(waiter_.get(), response_.get());
    return before && is_told && known.chain_run.request.set_to(run_, Py_None) ? Done::kYes : Done::kError;
  }

 private:
  bool is_usual() {
    const ChainRuns& of = known.chain_run;
    const Requests& its = known.request;
    asked_ = of.asked.get(run_);
    owner_ = of.owner.get(run_);
    PyObject *const asked = asked_.get(), *const owner = owner_.get();
    if (!is_array(value_) || of.is_over.is_true(run_) || !its.kind.is(asked) || !known.ensemble.kind.is(owner)) return false;
    if (!its.details.is_none(asked) || !its.allocator.is_none(asked) || !its.durations_ns.is_none(asked) || its.wants_wire.is_true(asked)) {
      return false;
    }
    const Ref caller = known.ensemble.caller.get(owner), flow = of.flow.get(run_);
    waiter_ = its.waiter.get(asked);
    runs_ = known.ensemble.runs.get(owner);
    statistics_ = known.scheduler.statistics.get(owner);
    changed_ = known.scheduler.changed.get(owner);
    sums_ = of.durations_ns.get(run_);
    name_ = Ref(flow ? PyObject_GetAttr(flow.get(), constants.last_tensor) : nullptr);
    if (!is_thread(waiter_.get()) || !known.ensemble_caller.kind.is(caller.get()) || !name_) return false;
    if (!runs_ || !PyDict_CheckExact(runs_.get()) || !sums_ || !PyList_CheckExact(sums_.get())) return false;
    if (!known.statistics.kind.is(statistics_.get()) || !known.statistics.summaries.is_none(statistics_.get())) return false;
    const Ref as_they_are = known.ensemble_caller.as_they_are.get(caller.get());
    return known.condition.kind.is(changed_.get()) && as_they_are && PySet_Contains(as_they_are.get(), name_.get()) == 1;
  }

  bool make_response() {
    const Responses& of = known.response;
    response_ = of.kind.make();
    const Ref outputs(PyDict_New());
    return response_ && outputs && PyDict_SetItem(outputs.get(), name_.get(), value_) == 0 &&
           of.outputs.set_to(response_.get(), outputs.get()) && of.parameters.set(response_.get(), PyDict_Copy(constants.no_sequence)) &&
           of.request_id.set_to(response_.get(), constants.empty_text);
  }

  // `EnsembleScheduler._count`. Needs the lock.
  bool count() {
    int64_t rows = 0, queued_ns = 0, waiting = 0, parts_ns[3] = {};
    if (!as_number(known.request.batch_size.get(asked_.get()).get(), &rows)) return false;
    if (!as_number(known.request.queued_ns.get(asked_.get()).get(), &queued_ns)) return false;
    for (Py_ssize_t i = 0; i < 3; ++i) {
      if (!as_number(PyList_GetItem(sums_.get(), i), &parts_ns[i])) return false;
    }
    const int64_t taken_ns = monotonic_ns() - queued_ns;
    if (!count_batch(statistics_.get(), rows, 1, taken_ns, 0, parts_ns) || !count_duration(statistics_.get(), taken_ns)) return false;
    if (!as_number(known.condition.waiting.get(changed_.get()).get(), &waiting)) return false;
    return waiting == 0 || call(changed_.get(), constants.notify_all);
  }

  PyObject* const run_;
  PyObject* const value_;
  Ref asked_, owner_, waiter_, runs_, statistics_, changed_, sums_, name_, response_;
};

// Returns a run as `ChainRun.__init__` makes it, with an empty turn. `usual` is the scheduler's: flow and chain. Empty with an error set.
Ref make_run(PyObject* scheduler, PyObject* request, PyObject* waiter, PyObject* usual, PyObject* turn) {
  const ChainRuns& of = known.chain_run;
  Ref run = of.kind.make();
  const Ref sums(PyList_New(3));
  for (Py_ssize_t i = 0; sums && i < 3; ++i) PyList_SetItem(sums.get(), i, Ref::to(constants.zero).release());
  PyObject* const object = run.get();
  const bool is_set = run && sums && of.owner.set_to(object, scheduler) && of.asked.set_to(object, request) &&
                      of.flow.set_to(object, PyTuple_GetItem(usual, 0)) && of.chain.set_to(object, PyTuple_GetItem(usual, 1)) &&
                      of.interruptible.set(object, known.thread_waiter.interruptible.get(waiter).release()) &&
                      of.at.set_to(object, constants.zero) && of.output.set_to(object, constants.empty_text) &&
                      of.request.set_to(object, Py_None) && of.is_over.set_to(object, Py_False) &&
                      of.durations_ns.set_to(object, sums.get()) && of.turn.set_to(object, turn);
  return is_set ? std::move(run) : Ref();
}

// Returns the only input of a request, if it is that of the chain; empty if the request is unusual.
Ref input_of(PyObject* request, PyObject* usual) {
  const Ref shapes = known.request.shapes.get(request), arrays = known.request.arrays.get(request);
  const Ref tensors(shapes ? PyObject_GetAttr(shapes.get(), constants.tensors) : nullptr);
  if (!tensors || !arrays || !PyList_CheckExact(tensors.get()) || !PyList_CheckExact(arrays.get())) return Ref();
  if (PyList_Size(tensors.get()) != 1 || PyList_Size(arrays.get()) != 1) return Ref();
  int64_t number = -1, wanted = -2;
  if (!as_number(PyTuple_GetItem(PyList_GetItem(tensors.get(), 0), 0), &number)) return Ref();
  if (!as_number(PyTuple_GetItem(usual, 2), &wanted) || number != wanted) return Ref();
  PyObject* const value = PyList_GetItem(arrays.get(), 0);
  return is_array(value) ? Ref::to(value) : Ref();
}

// Ends the submission of a step: the outcome may have been quicker than this thread.
Done end_turn(PyObject* run, const Ref& turn) {
  if (PyList_Append(turn.get(), constants.submitted) != 0) return broke(run);
  PyObject* const first = PyList_GetItem(turn.get(), 0);
  return first == constants.submitted || call(run, constants.follow, first) ? Done::kYes : Done::kError;
}

}  // namespace

Done begin_run(PyObject* scheduler, PyObject* request, Ref* execution) {
  const Requests& its = known.request;
  if (!known.ensemble.kind.is(scheduler) || !its.kind.is(request) || !its.details.is_none(request) || !its.trace.is_none(request)) return no();
  const Ref usual = known.ensemble.usual.get(scheduler), waiter = its.waiter.get(request);
  if (!usual || !PyTuple_Check(usual.get()) || !is_thread(waiter.get())) return no();
  const Ref value = input_of(request, usual.get()), turn(PyList_New(0));
  const Ref run = value && turn ? make_run(scheduler, request, waiter.get(), usual.get(), turn.get()) : Ref();
  if (!run) return no();
  {
    const Held held(scheduler);
    if (!held.is_held()) return PyErr_Occurred() ? Done::kError : Done::kNo;
    const Ref runs = known.ensemble.runs.get(scheduler);
    if (!known.scheduler.refusal.is_none(scheduler) || !runs) return no();
    if (!its.queued_ns.set(request, PyLong_FromLongLong(monotonic_ns())) || PyDict_SetItem(runs.get(), request, run.get()) != 0) {
      return Done::kError;
    }
  }
  Step step(run.get());
  Done done = step.prepare(value.get());
  if (done == Done::kNo) {
    *execution = call(run.get(), constants.enter);
    return *execution ? Done::kYes : Done::kError;
  }
  if (done == Done::kYes) done = step.submit(execution);
  return done == Done::kError ? broke(run.get()) : end_turn(run.get(), turn);
}

Done chain_step(PyObject* run, PyObject* value, Ref* execution) {
  Step step(run);
  const Done done = step.prepare(value);
  return done == Done::kYes ? step.submit(execution) : done;
}

Done go_on(PyObject* run, PyObject* outcome) {
  const ChainRuns& of = known.chain_run;
  if (!of.kind.is(run) || !known.response.kind.is(outcome)) return Done::kNo;
  const Ref value = value_of(run, outcome);
  if (!value) {
    PyErr_Clear();
    return Done::kNo;
  }
  int64_t at = 0;
  const Ref chain = of.chain.get(run);
  if (!chain || !PyList_CheckExact(chain.get()) || !as_number(of.at.get(run).get(), &at)) return no();
  if (at == PyList_Size(chain.get())) return Delivery(run, value.get()).deliver();
  Step step(run);
  const Done done = step.prepare(value.get());
  if (done == Done::kNo) return done;
  if (done == Done::kError) return broke(run);
  // The request of the step before is dropped last: the next stub can work meanwhile.
  const Ref before = of.request.get(run), turn(PyList_New(0));
  Ref execution;
  if (!before || !turn || !of.turn.set_to(run, turn.get()) || step.submit(&execution) != Done::kYes) return broke(run);
  if (execution && !execution.is_none() && !step.offer(execution.get())) return broke(run);
  return end_turn(run, turn);
}

}  // namespace moonpool::quick
