// What the model in a stub asks for: other models, metrics, loading and unloading.
#pragma once

#include "channel.h"
#include "memory.h"
#include "model.h"
#include "wire.h"

namespace moonpool {

class Calls {
 public:
  Calls(Channel channel, const Model& model, Loans& loans, Answers& answers)
      : channel_(std::move(channel)), model_(model), loans_(loans), answers_(answers) {}

  int fd() const { return channel_.fd(); }
  // Take in what the stub has asked, at most some questions. False at the end of the channel. Throws Violation.
  bool read();
  // The stub is gone: answer nothing any more.
  void close() { channel_.shut(); }
  // What the model did to its metrics. Throws Violation.
  void change_metrics(const wire::Metrics& changes);

 private:
  void handle(const Decoded<wire::Kind>& question);

  Channel channel_;
  [[maybe_unused]] const Model& model_;
  [[maybe_unused]] Loans& loans_;
  [[maybe_unused]] Answers& answers_;
  Packet packet_;
};

}  // namespace moonpool
