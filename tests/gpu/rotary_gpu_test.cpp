// Rotary embedding at small and at very large positions against its definition in fp64.
#include <algorithm>

#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/rotary/rotary.hpp"

namespace longhalo::testing {
namespace {

struct Case {
  int64_t n, heads, head_dim, row_stride;
  double first_position, step;
  int64_t added_position;  // read on the device; 0: none
  float factor = 1;
  RotaryDirection direction = RotaryDirection::kForward;
};

const Case kCases[] = {{1, 1, 16, 16, 0, 1, 0},
                       {7, 9, 64, 9 * 64, 1, 1, 0},
                       {129, 32, 128, 32 * 128, 9'999'937, 1, 0},
                       {5, 8, 128, 2 * 8 * 128, 3, 1, 10'000'019},
                       {301, 3, 64, 3 * 64 + 8, 1023.5, 2048, 0},
                       {3, 2, 256, 2 * 256, 0.5, 1, 131},
                       {2, 160, 128, 160 * 128, 12'345, 1, 0},
                       {70, 1, 4096, 4096, 7, 1, 0},
                       {0, 4, 64, 256, 0, 1, 0},
                       {133, 6, 128, 6 * 128, 1'000'003, 1, 0, 0.1275F},
                       {133, 6, 128, 6 * 128 + 8, 1'000'003, 1, 0, 0.1275F, RotaryDirection::kBackward},
                       {5, 32, 64, 32 * 64, 0, 1, 77'777, 0.18F},
                       {9, 4, 64, 4 * 64, 12, 1, 0, -300.0F, RotaryDirection::kBackward}};

class RotaryGpu : public GpuTest {};

TEST_F(RotaryGpu, AgreesWithTheDefinition) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message()
                 << "n " << c.n << ", heads " << c.heads << ", d " << c.head_dim << " from "
                 << c.first_position << " + " << c.added_position << ", times " << c.factor);
    const int64_t row = c.heads * c.head_dim, half = c.head_dim / 2;
    const auto before = normal_bf16(c.n * c.row_stride, 1);
    const auto frequencies = rotary_frequencies(c.head_dim, 500'000);
    const double first = c.first_position + static_cast<double>(c.added_position);
    const auto as_doubles = doubles(before);
    std::vector<double> right = as_doubles;  // what lies between the rows stays as it is
    for (int64_t i = 0; i < c.n; ++i) {
      double* const to = right.data() + i * c.row_stride;
      rotary_reference(1, c.heads, c.head_dim, frequencies, first + static_cast<double>(i) * c.step, 1, to,
                       c.direction);
      std::transform(to, to + row, to, [&](double x) { return c.factor * x; });
    }

    Guarded<BFloat16> x(c.n * c.row_stride, stream());
    const auto there = to_device<double>(frequencies, "frequencies", stream());
    const auto position = to_device<int64_t>(std::vector<int64_t>{c.added_position}, "position", stream());
    const auto run = [&] {
      x.put(before);
      rotary(stream(), c.n, c.heads, c.head_dim, there.data(), c.first_position, c.step, x.data(),
             c.row_stride, c.added_position > 0 ? position.data() : nullptr, c.direction, c.factor);
      return x.values();
    };
    const auto got = run();
    // The angle is exact to 4e-9 radians in position and product at 10^7, to 2^-22 after its rounding to fp32
    // (half a turn), cosine and sine to 2 units of 2^-23; their product with the factor, two products and a
    // sum. All relative to the pair's magnitudes, times the factor.
    expect_near(got, right, kBf16Unit, [&](size_t at) {
      const auto row_at = static_cast<int64_t>(at) % c.row_stride;
      if (row_at >= row) return -kBf16Unit * std::abs(right[at]);  // not a bit may change
      const size_t other =
          row_at % c.head_dim < half ? at + static_cast<size_t>(half) : at - static_cast<size_t>(half);
      return (0x1p-22 + 8 * kFp32Unit) * std::abs(c.factor) *
             (std::abs(as_doubles[at]) + std::abs(as_doubles[other]));
    });
    expect_same_bits(run(), got);
  }
}

TEST_F(RotaryGpu, ATokenDoesNotDependOnTheCallItComesIn) {
  constexpr int64_t kTokens = 77, kHeads = 8, kDim = 128, kRow = kHeads * kDim;
  const auto before = normal_bf16(kTokens * kRow, 2);
  const auto frequencies = to_device<double>(rotary_frequencies(kDim, 10'000), "frequencies", stream());
  Guarded<BFloat16> whole(kTokens * kRow, stream()), parts(kTokens * kRow, stream());
  whole.put(before), parts.put(before);
  rotary(stream(), kTokens, kHeads, kDim, frequencies.data(), 5'000'000, 1, whole.data(), kRow);
  for (int64_t at = 0; at < kTokens; at += 13)
    rotary(stream(), std::min<int64_t>(13, kTokens - at), kHeads, kDim, frequencies.data(),
           5'000'000 + static_cast<double>(at), 1, parts.data() + at * kRow, kRow);
  expect_same_bits(parts.values(), whole.values());
}

}  // namespace
}  // namespace longhalo::testing
