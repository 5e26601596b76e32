#include "api.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "msgpack.h"
#include "wire.h"

namespace moonpool::triton {

#define MOONPOOL_DEFINE(prefix, name, result, arguments) result(*name) arguments = nullptr;
MOONPOOL_TRITON_FUNCTIONS(MOONPOOL_DEFINE, MOONPOOL_DEFINE)
#undef MOONPOOL_DEFINE

namespace {

int open_server(dl_phdr_info* info, size_t, void* found) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  if (std::strncmp(slash ? slash + 1 : info->dlpi_name, "libtritonserver", 15) != 0) return 0;
  *static_cast<void**>(found) = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
  return 1;
}

// A program that has the server as a library may hide its symbols. Then look them up in the library.
void* find(const char* name) {
  if (void* function = dlsym(RTLD_DEFAULT, name)) return function;
  static void* const server = [] {
    void* found = nullptr;
    dl_iterate_phdr(open_server, &found);
    return found;
  }();
  return server ? dlsym(server, name) : nullptr;
}

// The required functions, in a form that `moonpool triton check` reads.
#define MOONPOOL_NAME(prefix, name, result, arguments) " " #prefix #name
#define MOONPOOL_SKIP(prefix, name, result, arguments)
extern "C" __attribute__((visibility("default"))) const char moonpool_required_functions[];
const char moonpool_required_functions[] = MOONPOOL_TRITON_FUNCTIONS(MOONPOOL_NAME, MOONPOOL_SKIP);
#undef MOONPOOL_SKIP
#undef MOONPOOL_NAME

}  // namespace

std::string resolve() {
  std::string missing;
#define MOONPOOL_FIND(prefix, name, result, arguments) \
  name = reinterpret_cast<result(*) arguments>(find(#prefix #name));
#define MOONPOOL_REQUIRE(prefix, name, result, arguments) \
  MOONPOOL_FIND(prefix, name, result, arguments)          \
  if (!name) missing += " " #prefix #name;
  MOONPOOL_TRITON_FUNCTIONS(MOONPOOL_REQUIRE, MOONPOOL_FIND)
#undef MOONPOOL_REQUIRE
#undef MOONPOOL_FIND
  return missing;
}

}  // namespace moonpool::triton

namespace moonpool {
namespace {

// Returns the character that begins here, and its length; 0 bytes if it is not UTF-8.
std::pair<uint32_t, size_t> character(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t size = character_bytes(text);
  uint32_t code = size < 2 ? first : first & (0xffu >> (size + 1));
  for (size_t i = 1; i < size; ++i) code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3fu);
  return {code, size};
}

bool is_shown(uint32_t code) {
  return std::any_of(wire::kShownCodes.begin(), wire::kShownCodes.end(),
                     [code](const auto& range) { return range[0] <= code && code <= range[1]; });
}

}  // namespace

std::string one_line(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  std::string line;
  line.reserve(text.size());
  while (!text.empty()) {
    const auto [code, size] = character(text);
    if (code == '\n') {
      line += "\\n";
    } else if (size == 0 || is_shown(code)) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), code < 0x100 ? "\\x%02x" : "\\u%04x", static_cast<unsigned>(code));
      line += escape;
    } else {
      line += text.substr(0, size);
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return line;
}

void check(triton::Error* error) {
  if (!error) return;
  Failure failure(triton::ErrorCode(error), triton::ErrorMessage(error));
  triton::ErrorDelete(error);
  throw failure;
}

void complain(triton::Error* error, const char* doing) noexcept {
  if (!error) return;
  log(triton::kError, std::string(doing) + ": " + triton::ErrorMessage(error));
  triton::ErrorDelete(error);
}

void log_from(int level, std::string_view file, int line, std::string_view text) noexcept {
  const std::string name(file), message(text);
  if (triton::Error* error = triton::LogMessage(level, name.c_str(), line, message.c_str())) {
    triton::ErrorDelete(error);
  }
}

void log(int level, std::string_view text) noexcept { log_from(level, "moonpool", 0, one_line(text)); }

}  // namespace moonpool
