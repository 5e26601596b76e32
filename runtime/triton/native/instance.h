// An instance of a model: the processes that serve it, one after another.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "api.h"
#include "batch.h"
#include "launcher.h"
#include "model.h"
#include "stub.h"

namespace moonpool {

class Instance {
 public:
  // Starts the first process. Throws Failure with the reason why it does not run.
  Instance(triton::ModelInstance* instance, Model& model);
  // Lets the model finalize, and waits until its process is gone.
  ~Instance();

  // One batch; on the server's thread of this instance. Throws Failure where nothing was done with the requests; else
  // all have been dealt with.
  void execute(triton::Request** requests, uint32_t count);
  // Whether it is ready, also by its model's word. From any thread. Throws Failure that says why not.
  void check_ready();

 private:
  Stub& stub();
  void start();
  std::shared_ptr<Stub> started();
  bool is_due(Stub& stub) const;
  void renew(Stub& stub);
  void replace(std::shared_ptr<Stub> stub);

  const Model& model_;
  std::string name_, kind_;
  int32_t device_ = 0;
  uint64_t number_ = 0;
  // Requests that its present process has executed.
  uint64_t served_ = 0;
  std::shared_ptr<Launcher> launcher_;
  std::shared_ptr<Mailbox> mailbox_;
  Batch batch_;
  // Why there will be no other process.
  std::optional<Failure> end_;

  std::mutex mutex_;  // of the pointer, for those that are not the instance's thread
  std::shared_ptr<Stub> stub_;
};

}  // namespace moonpool
