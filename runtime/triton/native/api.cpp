#include "api.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>

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

// A program that holds the server as a library may keep its symbols to itself; then the library is asked.
void* find(const char* name) {
  if (void* function = dlsym(RTLD_DEFAULT, name)) return function;
  static void* const server = [] {
    void* found = nullptr;
    dl_iterate_phdr(open_server, &found);
    return found;
  }();
  return server ? dlsym(server, name) : nullptr;
}

// What a server must have, for `moonpool triton check` to read.
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

void log_line(int level, std::string_view file, int line, std::string_view text) noexcept {
  const std::string name(file), message(text);
  if (triton::Error* error = triton::LogMessage(level, name.c_str(), line, message.c_str())) {
    triton::ErrorDelete(error);
  }
}

void log(int level, std::string_view text) noexcept { log_line(level, "moonpool", 0, text); }

}  // namespace moonpool
