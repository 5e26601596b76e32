// A batch of requests: gathered, put into shared memory, answered, counted, released.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "api.h"
#include "model.h"
#include "requests.h"
#include "responses.h"
#include "stub.h"
#include "wire.h"

namespace moonpool {

// Executes one batch after another, on the instance's thread, with the same memory.
class Batch {
 public:
  Batch(triton::ModelInstance* instance, const Model& model, bool is_on_device)
      : instance_(instance), model_(model), requests_(model, is_on_device), responses_(model) {}

  // Take over these requests. One that cannot be executed gets its error at once.
  void gather(triton::Request** requests, uint32_t count) {
    start_ns_ = sent_ns_ = answered_ns_ = now_ns();
    requests_.begin(++number_);
    for (uint32_t i = 0; i < count; ++i) {
      try {
        requests_.add(requests[i]);
      } catch (const Failure& failure) {
        fail_alone(requests[i], failure);
      }
    }
    outcomes_.assign(requests_.all().size(), Outcome{});
  }

  bool is_empty() const { return outcomes_.empty(); }
  // Send the batch; the stub counts as executing then. Returns false if it had ended and did not get the batch. Throws
  // Failure if the batch was not sent, and Violation.
  bool give(Stub& stub) {
    released_.clear();
    stub.open_requests().begin(number_, requests_.all());
    stub.send_log_levels();
    stub.take_back_late();
    const uint64_t size = requests_.lay_out();
    // The first block is for copies. Without copies it is an empty block in an existing region.
    wire::Block block{stub.borrowed_blocks().first_region(), 0, 0};
    try {
      if (size > 0) {
        char* memory;
        const Spot spot = stub.borrowed_blocks().lend(size, &memory);
        requests_.copy(memory);
        block = {spot.region, spot.offset, size};
      }
      write(stub, block);
    } catch (const Failure&) {
      stub.borrowed_blocks().end_batch();
      for (const wire::Place& place : released_) stub.answers().release(place);
      throw;
    }
    sent_ns_ = now_ns();
    // Before the stub has the batch: it may release the batch's blocks at once, and `tidy` must leave these to the
    // answer.
    stub.set_executing(true);
    const Channel::Sent sent = stub.work().send(message_.bytes());
    if (sent != Channel::Sent::kDone) stub.set_executing(false);
    if (sent == Channel::Sent::kFull) throw Violation("it answers without reading");
    return sent == Channel::Sent::kDone;
  }

  // Wait for the answer, and send each request its response. Throws Violation, and Failure if the stub has ended.
  void finish(Stub& stub) {
    wait(stub);
    answered_ns_ = now_ns();
    stub.catch_up();
    std::string stored;
    const auto message = opened(wire::kWork, packet_.bytes(), stub.answers(), &stored);
    if (message.kind() != wire::Kind::ANSWER) {
      throw Violation(std::string(message.message->name) + " came out of turn; ANSWER may come next");
    }
    take_answer(stub, wire::Answer(message.fields));
  }

  // Answer those that have no answer yet with this error. `stub` has ended, or is null if it never got them.
  void fail(const Failure& failure, Stub* stub) noexcept {
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      Outcome& outcome = outcomes_[i];
      if (outcome.is_answered) continue;
      outcome.is_good = false;
      outcome.left = OpenRequests::Left::kRelease;
      if (stub && !stub->open_requests().deserted(i)) continue;
      send_failure(requests_.all()[i], triton::ResponseNew, failure);
    }
    if (stub) stub->open_requests().end();
  }

  // Count the requests and release them.
  void close() noexcept {
    const uint64_t end_ns = now_ns();
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      const Outcome& outcome = outcomes_[i];
      if (outcome.left != OpenRequests::Left::kReschedule) {
        complain(triton::ModelInstanceReportStatistics(instance_, requests_.all()[i], outcome.is_good, start_ns_,
                                                       sent_ns_, answered_ns_, end_ns),
                 "statistics cannot be reported");
      }
      if (outcome.left == OpenRequests::Left::kNothing) continue;
      const bool is_again = outcome.left == OpenRequests::Left::kReschedule;
      release(requests_.all()[i], is_again ? triton::kReleaseReschedule : triton::kReleaseAll);
    }
    complain(triton::ModelInstanceReportBatchStatistics(instance_, requests_.rows(), start_ns_, sent_ns_, answered_ns_,
                                                        end_ns),
             "statistics cannot be reported");
  }

 private:
  static uint64_t now_ns() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count());
  }

  // The outcome of one request.
  struct Outcome {
    bool is_answered = false, is_good = true;
    OpenRequests::Left left = OpenRequests::Left::kRelease;
  };
  void write(Stub& stub, const wire::Block& block) {
    stub.answers().take_released(&released_, wire::kMaxPlaces);
    wire::encode<wire::Kind::EXECUTE>(
        message_, number_, current_core(), released_, std::vector<wire::Block>{block}, Raw{requests_.layout()},
        [this](Writer& writer) { requests_.write_details(writer); }, std::nullopt);
    pack(message_, stub.borrowed_blocks());
  }

  void wait(Stub& stub) {
    const auto limit_ms = model_.facts().execute_timeout_ms;
    bool is_overdue = false;
    for (;;) {
      const Channel::Received received = stub.work().receive(packet_, false);
      if (is_there(received)) return;
      if (received == Channel::Received::kGone) throw stub.death();
      stub.send_cancelled();
      if (limit_ms && !is_overdue && now_ns() - sent_ns_ > *limit_ms * 1'000'000) {
        is_overdue = true;
        stub.overdue();
      }
    }
  }

  void take_answer(Stub& stub, const wire::Answer& said) {
    const size_t count = outcomes_.size();
    responses_.read(said, number_, count);
    responses_.open(said.blocks, stub.answers(), &stub.borrowed_blocks());
    // Before anybody has a response, as in the runtime. The blocks themselves are needed until all is copied.
    stub.borrowed_blocks().check_kept(said.released);
    stub.borrowed_blocks().keep(said.held);
    std::optional<List<std::optional<wire::Remarks>>::Iterator> remark;
    std::optional<List<uint64_t>::Iterator> state;
    if (said.remarks) remark.emplace(said.remarks->begin());
    if (said.states) state.emplace(said.states->begin());
    for (size_t i = 0; i < count; ++i) {
      outcomes_[i].left = stub.open_requests().answered(i, state ? **state : wire::kAnswered);
      if (outcomes_[i].left == OpenRequests::Left::kRespond) {
        respond(i, remark ? **remark : std::nullopt);
      }
      outcomes_[i].is_answered = true;
      if (remark) ++*remark;
      if (state) ++*state;
    }
    stub.open_requests().end();
    // Wake the listener, which checks from now on if the clients of open requests still wait.
    if (said.states && stub.open_requests().are_open()) stub.wake();
    responses_.release(stub.answers());
    stub.borrowed_blocks().end_batch();
    for (const wire::Place& place : said.released) stub.borrowed_blocks().take_back(place);
    responses_.check_strings();
  }

  void respond(size_t i, const std::optional<wire::Remarks>& remarks) {
    triton::Response* response;
    check(triton::ResponseNew(&response, requests_.all()[i]));
    outcomes_[i].is_good = responses_.send(response, i, remarks, triton::kResponseFinal);
  }

  void fail_alone(triton::Request* request, const Failure& failure) noexcept {
    send_failure(request, triton::ResponseNew, failure);
    complain(
        triton::ModelInstanceReportStatistics(instance_, request, false, start_ns_, start_ns_, start_ns_, now_ns()),
        "statistics cannot be reported");
    release(request);
  }

  triton::ModelInstance* const instance_;
  const Model& model_;
  Requests requests_;
  Responses responses_;
  std::vector<Outcome> outcomes_;
  uint64_t number_ = 0;
  uint64_t start_ns_ = 0, sent_ns_ = 0, answered_ns_ = 0;
  Writer message_;
  std::vector<wire::Place> released_;
  Packet packet_;
};

}  // namespace moonpool
