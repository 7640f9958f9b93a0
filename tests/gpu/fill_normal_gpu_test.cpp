// Random weights: normally distributed, the same for every launch, different for every tensor and seed.
#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo::testing {
namespace {

class FillNormal : public GpuTest {
 protected:
  static std::vector<BFloat16> fill(int64_t count, uint64_t seed, uint64_t stream_id, float scale = 1) {
    Guarded<BFloat16> x(count, stream());
    fill_normal(stream(), count, seed, stream_id, scale, x.data());
    return x.values();
  }
};

double correlation(const std::vector<double>& a, const std::vector<double>& b, size_t shift) {
  double sum = 0;
  for (size_t i = 0; i + shift < a.size(); ++i)
    sum += a[i] * b[i + shift];
  return sum / static_cast<double>(a.size() - shift);
}

// With so many numbers every moment lies within 5 of its standard deviations but once in a million draws; the
// draw is fixed. Rounding to bf16 adds 2^-16 / 3 to the variance at most.
TEST_F(FillNormal, MomentsAreThoseOfTheNormalDistribution) {
  constexpr int64_t kCount = 4'000'003;
  const auto x = doubles(fill(kCount, 17, 3));
  double mean = 0, square = 0, cube = 0, fourth = 0, largest = 0;
  int64_t within_one = 0;
  for (double value : x) {
    mean += value, square += value * value, cube += value * value * value;
    fourth += value * value * value * value;
    largest = std::max(largest, std::abs(value));
    within_one += std::abs(value) < 1.001953125 ? 1 : 0;  // between two bf16 numbers
  }
  const auto n = static_cast<double>(kCount);
  EXPECT_NEAR(mean / n, 0, 5 * std::sqrt(1 / n));
  EXPECT_NEAR(square / n, 1, 5 * std::sqrt(2 / n) + 0x1p-16);
  EXPECT_NEAR(cube / n, 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(fourth / n, 3, 5 * std::sqrt(96 / n) + 0x1p-12);
  const double share =
      std::erf(1.00390625 / std::sqrt(2));  // 1 rounds to 1 up to the middle of 1 and 1 + 2^-7
  EXPECT_NEAR(static_cast<double>(within_one) / n, share, 5 * std::sqrt(share * (1 - share) / n));
  EXPECT_GT(largest, 4.5);
  EXPECT_LT(largest, 6.8);  // the least radius uniform is 2^-33
}

TEST_F(FillNormal, NeighboursTensorsAndSeedsAreIndependent) {
  constexpr int64_t kCount = 1'000'000;
  const auto x = doubles(fill(kCount, 1, 1));
  const double bound = 5 / std::sqrt(static_cast<double>(kCount));
  for (size_t shift : {1, 2, 3, 7, 8, 2048})
    EXPECT_NEAR(correlation(x, x, shift), 0, bound) << shift;
  EXPECT_NEAR(correlation(x, doubles(fill(kCount, 1, 2)), 0), 0, bound);
  EXPECT_NEAR(correlation(x, doubles(fill(kCount, 2, 1)), 0), 0, bound);
  EXPECT_NEAR(correlation(x, doubles(fill(kCount, 1, 2)), 1), 0, bound);
}

TEST_F(FillNormal, AnElementDependsOnItsIndexAlone) {
  const auto all = fill(100'003, 5, 9);
  for (int64_t count : {0, 1, 2, 7, 8, 9, 2047, 2049, 50'001}) {
    const auto some = fill(count, 5, 9);
    expect_same_bits(some, {all.begin(), all.begin() + count});
  }
}

TEST_F(FillNormal, ScaleMultiplies) {
  const auto one = doubles(fill(10'001, 5, 9)), scaled = doubles(fill(10'001, 5, 9, 0.125F));
  for (size_t i = 0; i < one.size(); ++i)
    ASSERT_EQ(scaled[i], one[i] * 0.125);
}

}  // namespace
}  // namespace longhalo::testing
