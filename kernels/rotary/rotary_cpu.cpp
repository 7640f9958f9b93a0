#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/rotary/rotary_simd.hpp"

namespace longhalo {
namespace {

// Sines and cosines are the cost of this kernel, so only every 32nd position gets its own; those between are
// that anchor turned on by one of 32 offsets (angle addition in double: an error of about 2^-52, far below
// fp32's). Anchors stand at multiples of 32 steps of the GLOBAL position, so a row does not depend on the
// tile it comes in.
constexpr int64_t kAnchor = 32;

class TurnTable {
 public:
  TurnTable(int64_t rows, const std::vector<double>& frequencies, RotaryDirection direction)
      : frequencies_(frequencies),
        sign_(direction == RotaryDirection::kForward ? 1 : -1),
        half_(static_cast<int64_t>(frequencies.size())),
        values_(static_cast<size_t>(2 * rows * half_)) {}

  void set(int64_t row, double position) {
    double* cosine = values_.data() + 2 * row * half_;
    for (int64_t c = 0; c < half_; ++c) {
      const double angle = position * frequencies_[static_cast<size_t>(c)];
      cosine[c] = std::cos(angle);
      cosine[half_ + c] = sign_ * std::sin(angle);
    }
  }
  Turn turn(int64_t row) const {
    const double* cosine = values_.data() + 2 * row * half_;
    return {cosine, cosine + half_};
  }

 private:
  const std::vector<double>& frequencies_;
  double sign_;
  int64_t half_;
  std::vector<double> values_;
};

}  // namespace

void rotary(int64_t n, int64_t heads, int64_t head_dim, const std::vector<double>& frequencies,
            double first_position, double step, float* x, RotaryDirection direction) {
  const int64_t half = head_dim / 2;
  check(n >= 0 && heads >= 1 && head_dim >= 2 && head_dim % 2 == 0, "rotary has rows of even head dimension");
  check(static_cast<int64_t>(frequencies.size()) == half, "rotary has one frequency a pair of dimensions");
  check(first_position >= 0, "rotary positions are not negative");
  if (n == 0) return;
  // Row i stands at (start + i) * step + rest.
  const int64_t start = step > 0 ? static_cast<int64_t>(std::floor(first_position / step)) : 0;
  const double rest = first_position - static_cast<double>(start) * step;
  const int64_t first_block = start / kAnchor, blocks = (start + n - 1) / kAnchor - first_block + 1;

  TurnTable offsets(kAnchor, frequencies, direction);
  const int64_t low = blocks == 1 ? start % kAnchor : 0, high = std::min(low + n, kAnchor);
  for (int64_t j = low; j < high; ++j)
    offsets.set(j, static_cast<double>(j) * step);
  if (blocks == 2 &&
      high - low < kAnchor) {  // a short run over an edge needs the offsets of both of its ends
    for (int64_t j = start % kAnchor; j < kAnchor; ++j)
      offsets.set(j, static_cast<double>(j) * step);
  }
  const RotaryKernels& kernels = LONGHALO_SIMD(rotary_kernels);
#pragma omp parallel if (blocks > 1)
  {
    TurnTable anchor(1, frequencies, direction);
    std::vector<float> table(static_cast<size_t>(head_dim));
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t base = (first_block + b) * kAnchor;
      anchor.set(0, static_cast<double>(base) * step + rest);
      for (int64_t at = std::max(base, start); at < std::min(base + kAnchor, start + n); ++at)
        kernels.row(heads, half, anchor.turn(0), offsets.turn(at - base), table.data(),
                    x + (at - start) * heads * head_dim);
    }
  }
}

}  // namespace longhalo
