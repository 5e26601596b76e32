// Reads lines of a pattern, a tab and a name, and writes a line for each: 1 where the pattern stands for the name, else
// 0.
#include <cstdio>
#include <iostream>
#include <string>

#include "pattern.h"

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const size_t tab = line.find('\t');
    const bool is_one = moonpool::fits(line.substr(0, tab), line.substr(tab + 1));
    std::puts(is_one ? "1" : "0");
  }
  return 0;
}
