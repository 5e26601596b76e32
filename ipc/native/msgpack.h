// Values of msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md) in bytes from an untrusted sender.
//
// Nothing here reads beyond its bytes, recurses, or allocates, except that a Writer grows. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace moonpool {

enum class Form : uint8_t { kBad, kNil, kFlag, kUint, kNegative, kReal, kText, kRaw, kArray, kMap };

// One value, or the head of an array or a map. It points into the reader's bytes.
struct Value {
  Form form = Form::kBad;
  uint64_t number = 0;  // of kUint, kFlag, and in two's complement kNegative; the count of kArray and kMap
  double real = 0;
  std::string_view bytes;  // of kText and kRaw
};

// Bytes that are not text.
struct Raw {
  std::string_view bytes;
};

// Reads values in order.
//
// A value that is cut short, reserved, or of another type than the caller asks for reads as kBad, zero or empty, and so
// does everything after it. Bytes that `decode` has accepted can be read as their table says without further checks.
class Reader {
 public:
  Reader() = default;
  // Where the bytes are only the beginning of a message, `more` are missing. An array or a map may need them.
  explicit Reader(std::string_view bytes, uint64_t more = 0)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()), more_(more) {}

  // Returns the next value. Of an array or a map it returns only the head; its contents come next.
  Value next();
  // Skips the next value and its contents.
  void skip();
  // Skips the next value if it is nil, and returns true if it was.
  bool nil();
  // Skips the next value if it is a number below 128 within these bounds, and returns true if it was.
  bool small_within(int64_t low, uint64_t high) {
    if (!is_small() || *at_ < low || static_cast<uint8_t>(*at_) > high) return false;
    ++at_;
    return true;
  }
  bool at_end() const { return at_ == end_; }
  // Where the next value begins.
  const char* at() const { return at_; }
  bool failed() const { return failed_; }

  uint64_t uint() { return is_small() ? static_cast<uint8_t>(*at_++) : expect(Form::kUint).number; }
  int64_t integer();
  double real() { return expect(Form::kReal).real; }
  bool flag() { return expect(Form::kFlag).number != 0; }
  std::string_view text() { return expect(Form::kText).bytes; }
  std::string_view raw() { return expect(Form::kRaw).bytes; }
  uint32_t array() { return static_cast<uint32_t>(expect(Form::kArray).number); }
  uint32_t map() { return static_cast<uint32_t>(expect(Form::kMap).number); }

 private:
  // Most values are numbers below 128, which are the byte that they have.
  bool is_small() const { return at_ != end_ && static_cast<uint8_t>(*at_) < 0x80; }
  Value expect(Form form);
  Value bad();
  bool take(size_t width, uint64_t* number);
  Value sized(Form form, size_t width);
  Value counted(Form form, uint64_t count);
  Value bytes(Form form, uint64_t size);

  const char* at_ = nullptr;
  const char* end_ = nullptr;
  uint64_t more_ = 0;
  bool failed_ = false;
};

// The values of a list that was accepted, each as a T.
template <class T>
class List {
 public:
  class Iterator {
   public:
    Iterator(Reader reader, uint32_t left) : reader_(reader), left_(left) { advance(); }
    const T& operator*() const { return value_; }
    const T* operator->() const { return &value_; }
    Iterator& operator++() {
      --left_;
      advance();
      return *this;
    }
    bool operator!=(const Iterator& other) const { return left_ != other.left_; }

   private:
    void advance();

    Reader reader_;
    uint32_t left_;
    T value_{};
  };

  uint32_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Iterator begin() const { return Iterator(items_, size_); }
  Iterator end() const { return Iterator(Reader(), 0); }
  void read(Reader& reader) { take(reader, reader.array(), 1); }

 protected:
  // The next items in the reader: so many, of so many values each.
  void take(Reader& reader, uint32_t size, uint64_t values) {
    size_ = size;
    items_ = reader;
    for (values *= size; values > 0 && !reader.failed(); --values) reader.skip();
  }

 private:
  Reader items_;
  uint32_t size_ = 0;
};

// A name and its value. The same name may come more than once: the last one counts.
struct Entry {
  std::string_view name;
  Value value;
  void read(Reader& reader) {
    name = reader.text();
    value = reader.next();
  }
};

// The entries of a map that was accepted.
class Entries : public List<Entry> {
 public:
  void read(Reader& reader) { take(reader, reader.map(), 2); }
};

inline void read(Reader& reader, uint64_t& value) { value = reader.uint(); }
inline void read(Reader& reader, int64_t& value) { value = reader.integer(); }
inline void read(Reader& reader, double& value) { value = reader.real(); }
inline void read(Reader& reader, bool& value) { value = reader.flag(); }
inline void read(Reader& reader, std::string_view& value) { value = reader.text(); }
inline void read(Reader& reader, Raw& value) { value.bytes = reader.raw(); }
inline void read(Reader& reader, Value& value) { value = reader.next(); }
template <class T>
auto read(Reader& reader, T& value) -> decltype(value.read(reader)) {
  value.read(reader);
}
template <class T>
void read(Reader& reader, std::optional<T>& value) {
  value.reset();
  if (!reader.nil()) read(reader, value.emplace());
}

template <class... Values>
void read_all(Reader& reader, Values&... values) {
  (moonpool::read(reader, values), ...);
}

template <class T>
void List<T>::Iterator::advance() {
  if (left_ > 0) moonpool::read(reader_, value_);
}

// Returns the number of bytes of the text's first character; 0 if it is not UTF-8.
size_t character_bytes(std::string_view text);

// True for UTF-8 as Python has it: no surrogates, nothing overlong.
bool is_utf8(std::string_view text);

// Returns the beginning of a text, at most `most` bytes, without a part of a character at its end.
std::string_view beginning(std::string_view text, size_t most);

// Writes values one after another, each in its shortest form. Its memory is kept from message to message.
class Writer {
 public:
  // Keeps only the first bytes of the output, so many.
  void cut(size_t size) { bytes_.resize(size); }
  void clear() { cut(0); }
  std::string_view bytes() const { return bytes_; }

  void nil() { byte(0xc0); }
  void flag(bool value) { byte(value ? 0xc3 : 0xc2); }
  void uint(uint64_t value);
  void integer(int64_t value);
  void real(double value);
  // Bytes that are not UTF-8 become U+FFFD, because the other side refuses messages with them.
  void text(std::string_view value);
  void raw(std::string_view value);
  // Appends values that another writer has written.
  void values(std::string_view written) { bytes_ += written; }
  // Writes the head of so many values, or of so many names and values, which follow.
  void array(size_t count);
  void map(size_t count);

 private:
  void byte(unsigned value) { bytes_.push_back(static_cast<char>(value)); }
  void counted(unsigned few, unsigned many, size_t count);
  // The number takes two to the power of `width` bytes.
  void head(unsigned form, uint64_t number, unsigned width);

  std::string bytes_;
};

inline void write(Writer& writer, std::nullopt_t) { writer.nil(); }
inline void write(Writer& writer, std::string_view value) { writer.text(value); }
inline void write(Writer& writer, const char* value) { writer.text(value); }
inline void write(Writer& writer, Raw value) { writer.raw(value.bytes); }
template <class T>
std::enable_if_t<std::is_arithmetic_v<T>> write(Writer& writer, T value) {
  if constexpr (std::is_same_v<T, bool>) {
    writer.flag(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    writer.real(value);
  } else if constexpr (std::is_signed_v<T>) {
    writer.integer(value);
  } else {
    writer.uint(value);
  }
}
// A row of the tables.
template <class T>
auto write(Writer& writer, const T& row) -> decltype(row.write(writer)) {
  row.write(writer);
}
// A function that writes one value, of whatever form.
template <class F>
auto write(Writer& writer, const F& function) -> decltype(function(writer)) {
  function(writer);
}
template <class T>
void write(Writer& writer, const std::vector<T>& values) {
  writer.array(values.size());
  for (const T& value : values) write(writer, value);
}
template <class... Values>
void write_all(Writer& writer, const Values&... values) {
  (write(writer, values), ...);
}

}  // namespace moonpool
