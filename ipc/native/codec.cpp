#include "codec.h"

#include <cstdio>

namespace moonpool {
namespace {

// Returns the value as Python shows it. Of a value that may be long, only its type.
std::string shown(const Value& value) {
  char real[32];
  switch (value.form) {
    case Form::kFlag:
      return value.number != 0 ? "True" : "False";
    case Form::kUint:
      return std::to_string(value.number);
    case Form::kNegative:
      return std::to_string(static_cast<int64_t>(value.number));
    case Form::kReal:
      std::snprintf(real, sizeof real, "%g", value.real);
      return real;
    default:
      // In the order of the forms.
      constexpr const char* kNames[] = {"nothing", "None", "", "", "", "", "str", "bytes", "list", "dict"};
      return kNames[static_cast<size_t>(value.form)];
  }
}

// Returns true if the packet announces more than `most` values, nested ones included; `wrong` says so then. As
// `check_items` in ipc/codec.py does, it looks at no more of them.
bool has_more_values(std::string_view packet, uint64_t most, std::string* wrong) {
  if (packet.size() <= most) return false;  // a value takes a byte at least
  Reader reader(packet, UINT32_MAX * uint64_t{2});
  for (uint64_t left = 1; left > 0 && !reader.at_end();) {
    const Value value = reader.next();
    if (value.form == Form::kBad) return false;  // the check of the packet stops there, too
    --most;
    --left;
    if (value.form == Form::kArray) left += value.number;
    if (value.form == Form::kMap) left += 2 * value.number;
    if (left > most) {
      *wrong = "a packet of more values than any message has";
      return true;
    }
  }
  return false;
}

// Checks one message. After the first error, `wrong` holds it.
class Checker {
 public:
  // `what` names the checked bytes: a packet, or a part of one.
  Checker(const char* what, const Spec* specs, Reader reader, std::string* wrong)
      : what_(what), specs_(specs), reader_(reader), wrong_(wrong) {}

  const Value& value() const { return value_; }
  const Reader& reader() const { return reader_; }

  // Goes on to the next value.
  bool take() {
    value_ = reader_.next();
    if (value_.form == Form::kBad) return not_msgpack("it is cut short, or of an unknown type");
    if (value_.form == Form::kText && !is_utf8(value_.bytes)) {
      return not_msgpack("a text is no UTF-8");
    }
    return true;
  }

  bool check(const Spec& spec) {
    // Most values are such numbers, which need no other look.
    if (spec.type == Type::kInt && reader_.small_within(spec.low, spec.high)) return true;
    if (!take()) return false;
    if (spec.maybe && value_.form == Form::kNil) return true;
    if (!fits(spec)) return refuse(spec, "");
    const uint64_t count = value_.number;
    switch (spec.type) {
      case Type::kTable:
        return check_entries(spec, count);
      case Type::kRow:
        return check_fields(spec.first, spec.count) || inside(spec);
      case Type::kList:
        for (uint64_t i = 0; i < count; ++i) {
          if (!check(specs_[spec.first])) return inside(spec);
        }
        return true;
      default:
        return true;
    }
  }

  bool check_fields(uint16_t first, uint16_t count) {
    for (uint16_t i = 0; i < count; ++i) {
      if (!check(specs_[first + i])) return false;
    }
    return true;
  }

  bool check_end() { return reader_.at_end() || not_msgpack("something comes after it"); }

  // Completes `wrong`, which so far holds only the refused value of a field.
  void say(const char* message) {
    if (refused_) *wrong_ = prefix_ + message + where_ + " may not be " + *wrong_;
  }

 private:
  bool fits(const Spec& spec) const {
    switch (spec.type) {
      case Type::kInt:
        if (value_.form == Form::kNegative) return static_cast<int64_t>(value_.number) >= spec.low;
        return value_.form == Form::kUint && value_.number <= spec.high &&
               (spec.low < 0 || value_.number >= static_cast<uint64_t>(spec.low));
      case Type::kReal:
        return value_.form == Form::kReal;
      case Type::kFlag:
        return value_.form == Form::kFlag;
      case Type::kText:
        return value_.form == Form::kText && value_.bytes.size() <= spec.high;
      case Type::kRaw:
        return value_.form == Form::kRaw && value_.bytes.size() <= spec.high;
      case Type::kTable:
        return value_.form == Form::kMap && value_.number <= spec.high;
      case Type::kList:
        return value_.form == Form::kArray && value_.number <= spec.high;
      case Type::kRow:
        return value_.form == Form::kArray && value_.number == spec.count;
      case Type::kOneOf:
        for (uint16_t i = 0; i < spec.count; ++i) {
          if (fits(specs_[spec.first + i])) return true;
        }
    }
    return false;
  }

  bool check_entries(const Spec& spec, uint64_t count) {
    for (; count > 0; --count) {
      if (!take()) return false;
      if (value_.form == Form::kRaw) return refuse(spec, "a key of ");
      if (value_.form != Form::kText) return not_msgpack("a key is no text");
      if (!take()) return false;
      const Form form = value_.form;
      const bool scalar = form != Form::kNil && form != Form::kRaw && form != Form::kArray;
      if (!scalar || form == Form::kMap) return refuse(spec, "");
    }
    return true;
  }

  bool not_msgpack(const char* why) {
    *wrong_ = std::string(what_) + " that is not msgpack: " + why;
    return false;
  }

  bool refuse(const Spec& spec, const char* prefix) {
    refused_ = true;
    prefix_ = prefix;
    *wrong_ = shown(value_);
    return inside(spec);
  }

  // Adds this field to the path of a refused value inside of it.
  bool inside(const Spec& spec) {
    if (refused_ && *spec.name != '\0') where_ = std::string(".") + spec.name + where_;
    return false;
  }

  const char* const what_;
  const Spec* specs_;
  Reader reader_;
  std::string* wrong_;
  Value value_;
  bool refused_ = false;
  std::string prefix_, where_;
};

}  // namespace

const Message* check_message(const Message* messages, size_t count, const Spec* specs, uint8_t peer,
                             std::string_view packet, Reader* fields, std::string* wrong) {
  if (has_more_values(packet, kMaxValues, wrong)) return nullptr;
  Checker checker("a packet", specs, Reader(packet), wrong);
  if (!checker.take()) return nullptr;
  const Value head = checker.value();
  const bool led = head.form == Form::kArray && head.number > 0;
  if (led && !checker.take()) return nullptr;
  const Value kind = checker.value();
  if (!led || (kind.form != Form::kUint && kind.form != Form::kNegative)) {
    *wrong = "a packet that is not an array led by a kind";
    return nullptr;
  }
  const Message* message = nullptr;
  for (size_t i = 0; i < count; ++i) {
    if (kind.form == Form::kUint && messages[i].kind == kind.number) message = &messages[i];
  }
  if (message == nullptr) {
    *wrong = "a message of unknown kind " + shown(kind);
    return nullptr;
  }
  if (message->sender != 0 && message->sender != peer) {
    *wrong = std::string(message->name) + " is not the peer's to send";
    return nullptr;
  }
  const unsigned length = 1u + message->count;
  if (head.number != length) {
    *wrong = std::string(message->name) + " that is not an array of " + std::to_string(length) + " led by its kind";
    return nullptr;
  }
  *fields = checker.reader();
  if (!checker.check_fields(message->first, message->count) || !checker.check_end()) {
    checker.say(message->name);
    return nullptr;
  }
  return message;
}

bool check_packed(const Spec* specs, const Spec& spec, std::string_view packed, uint64_t most, std::string* wrong) {
  if (has_more_values(packed, most, wrong)) return false;
  Checker checker("a layout", specs, Reader(packed), wrong);
  if (checker.check(spec) && checker.check_end()) return true;
  checker.say("layout");
  return false;
}

}  // namespace moonpool
