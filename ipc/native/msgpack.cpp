#include "msgpack.h"

#include <algorithm>
#include <cstring>

namespace moonpool {
namespace {

// Returns the floating-point number with these bits.
template <class Real, class Bits>
double real_of(Bits bits) {
  Real real;
  static_assert(sizeof real == sizeof bits, "the same number of bits");
  std::memcpy(&real, &bits, sizeof real);
  return static_cast<double>(real);
}

// Returns the least exponent of two so that the number fits into that many bytes.
unsigned width_of(uint64_t number) { return (number > UINT8_MAX) + (number > UINT16_MAX) + (number > UINT32_MAX); }

}  // namespace

size_t character_bytes(std::string_view text) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0u; };
  const auto follows = [&](size_t i) { return (at(i) & 0xc0) == 0x80; };
  const unsigned first = at(0), second = at(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4 || !follows(1)) return 0;
  if (first < 0xe0) return 2;
  if (!follows(2)) return 0;
  if (first < 0xf0) {
    const bool overlong = first == 0xe0 && second < 0xa0, surrogate = first == 0xed && second >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (!follows(3)) return 0;
  const bool overlong = first == 0xf0 && second < 0x90, beyond = first == 0xf4 && second >= 0x90;
  return overlong || beyond ? 0 : 4;
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = character_bytes(text.substr(at));
    if (size == 0) return false;
    at += size;
  }
  return true;
}

std::string_view beginning(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

Value Reader::bad() {
  failed_ = true;
  at_ = end_;
  return Value{};
}

Value Reader::expect(Form form) {
  const Value value = next();
  return value.form == form ? value : bad();
}

bool Reader::take(size_t width, uint64_t* number) {
  if (static_cast<size_t>(end_ - at_) < width) return false;
  *number = 0;
  for (; width > 0; --width) *number = *number << 8 | static_cast<uint8_t>(*at_++);
  return true;
}

Value Reader::bytes(Form form, uint64_t size) {
  if (static_cast<uint64_t>(end_ - at_) < size) return bad();
  Value value;
  value.form = form;
  value.bytes = std::string_view(at_, size);
  at_ += size;
  return value;
}

// A value takes at least one byte, so no count may exceed the bytes that are left.
Value Reader::counted(Form form, uint64_t count) {
  const uint64_t least = form == Form::kMap ? 2 * count : count;
  if (static_cast<uint64_t>(end_ - at_) + more_ < least) return bad();
  Value value;
  value.form = form;
  value.number = count;
  return value;
}

Value Reader::sized(Form form, size_t width) {
  uint64_t size;
  if (!take(width, &size)) return bad();
  return form == Form::kText || form == Form::kRaw ? bytes(form, size) : counted(form, size);
}

Value Reader::next() {
  if (at_ == end_) return bad();
  const unsigned first = static_cast<uint8_t>(*at_++);
  Value value;
  if (first < 0x80) {
    value.form = Form::kUint;
    value.number = first;
    return value;
  }
  if (first < 0x90) return counted(Form::kMap, first & 0x0f);
  if (first < 0xa0) return counted(Form::kArray, first & 0x0f);
  if (first < 0xc0) return bytes(Form::kText, first & 0x1f);
  if (first >= 0xe0) {
    value.form = Form::kNegative;
    value.number = static_cast<uint64_t>(static_cast<int64_t>(first) - 0x100);
    return value;
  }
  switch (first) {
    case 0xc0:
      value.form = Form::kNil;
      return value;
    case 0xc2:
    case 0xc3:
      value.form = Form::kFlag;
      value.number = first & 1;
      return value;
    case 0xc4:
    case 0xc5:
    case 0xc6:
      return sized(Form::kRaw, size_t{1} << (first - 0xc4));
    case 0xca:
      if (!take(4, &value.number)) return bad();
      value.form = Form::kReal;
      value.real = real_of<float>(static_cast<uint32_t>(value.number));
      return value;
    case 0xcb:
      if (!take(8, &value.number)) return bad();
      value.form = Form::kReal;
      value.real = real_of<double>(value.number);
      return value;
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
      if (!take(size_t{1} << (first - 0xcc), &value.number)) return bad();
      value.form = Form::kUint;
      return value;
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3: {
      const size_t width = size_t{1} << (first - 0xd0);
      if (!take(width, &value.number)) return bad();
      const unsigned unused = 64 - 8 * static_cast<unsigned>(width);
      const int64_t number = static_cast<int64_t>(value.number << unused) >> unused;
      value.number = static_cast<uint64_t>(number);
      value.form = number < 0 ? Form::kNegative : Form::kUint;
      return value;
    }
    case 0xd9:
    case 0xda:
    case 0xdb:
      return sized(Form::kText, size_t{1} << (first - 0xd9));
    case 0xdc:
    case 0xdd:
      return sized(Form::kArray, size_t{2} << (first - 0xdc));
    case 0xde:
    case 0xdf:
      return sized(Form::kMap, size_t{2} << (first - 0xde));
    default:  // extension types, and the one byte that is reserved
      return bad();
  }
}

void Reader::skip() {
  for (uint64_t left = 1; left > 0 && !failed_; --left) {
    const Value value = next();
    if (value.form == Form::kArray) left += value.number;
    if (value.form == Form::kMap) left += 2 * value.number;
  }
}

bool Reader::nil() {
  if (at_ == end_ || static_cast<uint8_t>(*at_) != 0xc0) return false;
  ++at_;
  return true;
}

int64_t Reader::integer() {
  const Value value = next();
  const bool is_small = value.form == Form::kUint && value.number <= uint64_t{INT64_MAX};
  if (value.form != Form::kNegative && !is_small) return static_cast<int64_t>(bad().number);
  return static_cast<int64_t>(value.number);
}

void Writer::head(unsigned form, uint64_t number, unsigned width) {
  byte(form);
  for (int shift = (8 << width) - 8; shift >= 0; shift -= 8) byte(static_cast<unsigned>(number >> shift & 0xff));
}

void Writer::uint(uint64_t value) {
  if (value < 0x80) return byte(static_cast<unsigned>(value));
  head(0xcc + width_of(value), value, width_of(value));
}

void Writer::integer(int64_t value) {
  const auto bits = static_cast<uint64_t>(value);
  if (value >= 0) return uint(bits);
  if (value >= -32) return byte(static_cast<unsigned>(bits & 0xff));
  // Half of the numbers of each width are negative.
  const unsigned width = width_of(2 * ~bits);
  head(0xd0 + width, bits, width);
}

void Writer::real(double value) {
  uint64_t bits;
  static_assert(sizeof bits == sizeof value, "a double has 64 bits");
  std::memcpy(&bits, &value, sizeof bits);
  head(0xcb, bits, 3);
}

void Writer::text(std::string_view value) {
  std::string mended;
  if (!is_utf8(value)) {
    for (size_t at = 0; at < value.size();) {
      const size_t size = character_bytes(value.substr(at));
      mended.append(size == 0 ? std::string_view("\xef\xbf\xbd") : value.substr(at, size));
      at += size == 0 ? 1 : size;
    }
    value = mended;
  }
  if (value.size() < 32) {
    byte(0xa0 | static_cast<unsigned>(value.size()));
  } else {
    head(0xd9 + width_of(value.size()), value.size(), width_of(value.size()));
  }
  bytes_.append(value);
}

void Writer::raw(std::string_view value) {
  head(0xc4 + width_of(value.size()), value.size(), width_of(value.size()));
  bytes_.append(value);
}

void Writer::array(size_t count) { counted(0x90, 0xdc, count); }
void Writer::map(size_t count) { counted(0x80, 0xde, count); }

void Writer::counted(unsigned few, unsigned many, size_t count) {
  if (count < 16) return byte(few | static_cast<unsigned>(count));
  const unsigned width = std::max(1u, width_of(count));
  head(many + width - 1, count, width);
}

}  // namespace moonpool
