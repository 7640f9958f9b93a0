// Whether clang-tidy can read this system's C++ library at all: check_tidy.sh tries this file first.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <source_location>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

int64_t probe(std::span<const int64_t> values, std::source_location here = std::source_location::current()) {
  const std::string name = here.file_name();
  const auto largest = std::max_element(values.begin(), values.end());
  return largest == values.end() ? static_cast<int64_t>(name.size()) : *largest;
}
