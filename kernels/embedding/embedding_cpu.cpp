#include <algorithm>
#include <numeric>
#include <vector>

#include "core/error.hpp"
#include "kernels/embedding/embedding.hpp"

namespace longhalo {
namespace {

// Columns that one thread sums at a time, so that a token that stands everywhere is shared by all threads.
constexpr int64_t kColumns = 128;

}  // namespace

void embedding_backward(int64_t n, int64_t hidden, const int32_t* tokens, const float* dx, float* d_table) {
  check(n >= 0 && hidden >= 1, "an embedding has rows of at least one element");
  if (n == 0) return;
  std::vector<int64_t> order(static_cast<size_t>(n));  // places, by their tokens
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tokens[a] < tokens[b]; });
  std::vector<size_t> begins;  // in `order`, of each token's places
  for (size_t at = 0; at < order.size(); ++at)
    if (at == 0 || tokens[order[at]] != tokens[order[at - 1]]) begins.push_back(at);
  begins.push_back(order.size());
  const auto used = static_cast<int64_t>(begins.size()) - 1, parts = (hidden + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(dynamic, 16) collapse(2) if (n > 1)
  for (int64_t t = 0; t < used; ++t) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = part * kColumns, columns = std::min(kColumns, hidden - first);
      const size_t begin = begins[static_cast<size_t>(t)], end = begins[static_cast<size_t>(t) + 1];
      double sums[kColumns] = {};
      for (size_t at = begin; at < end; ++at)
        for (int64_t c = 0; c < columns; ++c)
          sums[c] += static_cast<double>(dx[order[at] * hidden + first + c]);
      float* row = d_table + int64_t{tokens[order[begin]]} * hidden + first;
      for (int64_t c = 0; c < columns; ++c)
        row[c] += static_cast<float>(sums[c]);
    }
  }
}

}  // namespace longhalo
