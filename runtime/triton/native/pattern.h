// The grammar of patterns for names of models: `*` stands for any bytes, all else for itself.
//
// It is that of `runtime/model/config/patterns.py`, and not that of fnmatch(3), which knows more characters.

#pragma once

#include <string_view>

namespace moonpool {

// Returns true if a name is one for which a pattern stands.
inline bool fits(std::string_view pattern, std::string_view name) {
  const size_t first = pattern.find('*');
  if (first == std::string_view::npos) return name == pattern;
  const size_t last = pattern.rfind('*');
  const std::string_view begin = pattern.substr(0, first), end = pattern.substr(last + 1);
  if (name.size() < begin.size() + end.size()) return false;
  if (name.substr(0, begin.size()) != begin || name.substr(name.size() - end.size()) != end) return false;
  name = name.substr(begin.size(), name.size() - begin.size() - end.size());
  std::string_view middle = last == first ? std::string_view() : pattern.substr(first + 1, last - first - 1);
  while (!middle.empty()) {
    const std::string_view part = middle.substr(0, middle.find('*'));
    // The first place is as good as any later one, so nothing is ever tried twice.
    const size_t found = name.find(part);
    if (found == std::string_view::npos) return false;
    name.remove_prefix(found + part.size());
    middle.remove_prefix(part.size() < middle.size() ? part.size() + 1 : part.size());
  }
  return true;
}

}  // namespace moonpool
