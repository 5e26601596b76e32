#include "msgpack.h"

#include <cstring>
#include <limits>

namespace moonpool {
namespace {

// The bits of a floating-point number as that number.
template <class Real, class Bits>
double real_of(Bits bits) {
  Real real;
  static_assert(sizeof real == sizeof bits, "the same number of bits");
  std::memcpy(&real, &bits, sizeof real);
  return static_cast<double>(real);
}

// The number of bytes of the character at the beginning of the text; 0 where there is none.
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

}  // namespace

bool is_utf8(std::string_view text, size_t* characters) {
  size_t count = 0;
  for (size_t at = 0; at < text.size(); ++count) {
    const size_t size = character_bytes(text.substr(at));
    if (size == 0) return false;
    at += size;
  }
  *characters = count;
  return true;
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

// A value takes a byte at least, so no count is larger than what is left.
Value Reader::counted(Form form, uint64_t count) {
  const uint64_t least = form == Form::kMap ? 2 * count : count;
  if (static_cast<uint64_t>(end_ - at_) < least) return bad();
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
    value.negative = static_cast<int64_t>(first) - 0x100;
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
      value.negative = static_cast<int64_t>(value.number << unused) >> unused;
      value.form = value.negative < 0 ? Form::kNegative : Form::kUint;
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
    default:  // extension types, and the one byte that means nothing
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
  if (value.form == Form::kNegative) return value.negative;
  if (value.form == Form::kUint && value.number <= uint64_t{std::numeric_limits<int64_t>::max()}) {
    return static_cast<int64_t>(value.number);
  }
  bad();
  return 0;
}

void Writer::head(unsigned form, uint64_t number, size_t width) {
  byte(form);
  while (width > 0) byte(static_cast<unsigned>(number >> 8 * --width & 0xff));
}

void Writer::uint(uint64_t value) {
  if (value < 0x80) {
    byte(static_cast<unsigned>(value));
  } else if (value <= UINT8_MAX) {
    head(0xcc, value, 1);
  } else if (value <= UINT16_MAX) {
    head(0xcd, value, 2);
  } else if (value <= UINT32_MAX) {
    head(0xce, value, 4);
  } else {
    head(0xcf, value, 8);
  }
}

void Writer::integer(int64_t value) {
  const auto bits = static_cast<uint64_t>(value);
  if (value >= 0) {
    uint(bits);
  } else if (value >= -32) {
    byte(static_cast<unsigned>(bits & 0xff));
  } else if (value >= INT8_MIN) {
    head(0xd0, bits, 1);
  } else if (value >= INT16_MIN) {
    head(0xd1, bits, 2);
  } else if (value >= INT32_MIN) {
    head(0xd2, bits, 4);
  } else {
    head(0xd3, bits, 8);
  }
}

void Writer::real(double value) {
  uint64_t bits;
  static_assert(sizeof bits == sizeof value, "a double has 64 bits");
  std::memcpy(&bits, &value, sizeof bits);
  head(0xcb, bits, 8);
}

void Writer::text(std::string_view value) {
  size_t characters;
  std::string mended;
  if (!is_utf8(value, &characters)) {
    for (size_t at = 0; at < value.size();) {
      const size_t size = character_bytes(value.substr(at));
      mended.append(size == 0 ? std::string_view("\xef\xbf\xbd") : value.substr(at, size));
      at += size == 0 ? 1 : size;
    }
    value = mended;
  }
  if (value.size() < 32) {
    byte(0xa0 | static_cast<unsigned>(value.size()));
  } else if (value.size() <= UINT8_MAX) {
    head(0xd9, value.size(), 1);
  } else if (value.size() <= UINT16_MAX) {
    head(0xda, value.size(), 2);
  } else {
    head(0xdb, value.size(), 4);
  }
  bytes_.append(value);
}

void Writer::raw(std::string_view value) {
  if (value.size() <= UINT8_MAX) {
    head(0xc4, value.size(), 1);
  } else if (value.size() <= UINT16_MAX) {
    head(0xc5, value.size(), 2);
  } else {
    head(0xc6, value.size(), 4);
  }
  bytes_.append(value);
}

void write(Writer& writer, const Value& value) {
  switch (value.form) {
    case Form::kFlag:
      return writer.flag(value.number != 0);
    case Form::kUint:
      return writer.uint(value.number);
    case Form::kNegative:
      return writer.integer(value.negative);
    case Form::kReal:
      return writer.real(value.real);
    case Form::kText:
      return writer.text(value.bytes);
    case Form::kRaw:
      return writer.raw(value.bytes);
    case Form::kArray:
      return writer.array(value.number);
    case Form::kMap:
      return writer.map(value.number);
    case Form::kNil:
    case Form::kBad:
      return writer.nil();
  }
}

void Writer::array(size_t count) {
  if (count < 16) {
    byte(0x90 | static_cast<unsigned>(count));
  } else if (count <= UINT16_MAX) {
    head(0xdc, count, 2);
  } else {
    head(0xdd, count, 4);
  }
}

void Writer::map(size_t count) {
  if (count < 16) {
    byte(0x80 | static_cast<unsigned>(count));
  } else if (count <= UINT16_MAX) {
    head(0xde, count, 2);
  } else {
    head(0xdf, count, 4);
  }
}

}  // namespace moonpool
