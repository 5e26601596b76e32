#include "calls.h"

#include <string>

#include "api.h"

namespace moonpool {

using wire::Kind;

bool Calls::read() {
  const Channel::Received received = channel_.receive(packet_, true);
  if (received == Channel::Received::kNothing) return true;
  if (received == Channel::Received::kGone) return false;
  const auto question = decode(wire::kCalls, wire::Side::STUB, packet_.bytes());
  if (!question) throw Violation(question.wrong);
  handle(question);
  return true;
}

void Calls::change_metrics(const wire::Metrics&) {}

void Calls::handle(const Decoded<Kind>& question) {
  if (question.kind() == Kind::WITHDRAW || question.kind() == Kind::LET_GO) return;
  if (question.kind() == Kind::INDIRECT) throw Violation("INDIRECT on the calls channel");
  const uint64_t call = Reader(question.fields).uint();
  const wire::Error error{triton::kUnsupported, "models cannot ask for anything here yet"};
  const std::vector<wire::Block> none;
  Writer writer;
  if (question.kind() == Kind::INFER) {
    wire::encode<Kind::REPLY>(writer, call, true, none, none, none, std::nullopt, error);
  } else {
    wire::encode<Kind::DONE>(writer, call, error, [](Writer& each) { each.map(0); });
  }
  if (channel_.send(writer.bytes()) == Channel::Sent::kFull) {
    throw Violation("the stub does not read its calls channel");
  }
}

}  // namespace moonpool
