// Random numbers on the GPU: the moments of a normal distribution within their own sampling error, the same
// on every run, and nothing written beyond the end.
#include <cmath>
#include <cstring>
#include <vector>

#include "device/device_buffer.hpp"
#include "gpu_test.hpp"
#include "kernels/random_normal/random_normal.hpp"

namespace longhalo::testing {
namespace {

class RandomNormal : public GpuTest {
 protected:
  template <class T>
  std::vector<T> draw(int64_t count, float deviation, uint64_t seed) {
    constexpr int64_t kGuard = 64;
    const size_t bytes = static_cast<size_t>(count + kGuard) * sizeof(T);
    DeviceBuffer<T> out(count + kGuard, "random numbers", stream());
    check_cuda(cudaMemsetAsync(out.data(), 0xff, bytes, stream()), "poisoning");
    random_normal(stream(), count, deviation, seed, out.data());
    std::vector<T> values(static_cast<size_t>(count + kGuard));
    to_host<T>(values, out.data(), stream());
    const std::vector<uint8_t> untouched(kGuard * sizeof(T), 0xff);
    EXPECT_EQ(std::memcmp(values.data() + count, untouched.data(), untouched.size()), 0) << "beyond the end";
    values.resize(static_cast<size_t>(count));
    return values;
  }
};

double value_of(float x) {
  return x;
}
double value_of(BFloat16 x) {
  return to_float(x);
}

template <class T>
void expect_normal(const std::vector<T>& values, double deviation) {
  const auto n = static_cast<double>(values.size());
  double sum = 0, squares = 0, fourths = 0, neighbours = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double x = value_of(values[i]) / deviation;
    sum += x;
    squares += x * x;
    fourths += x * x * x * x;
    neighbours += x * value_of(values[(i + 1) % values.size()]) / deviation;
  }
  // Variances of x, x^2, x^4 and x y of a standard normal distribution are 1, 2, 96 and 1.
  EXPECT_LT(std::abs(sum / n), 6 / std::sqrt(n));
  EXPECT_LT(std::abs(squares / n - 1), 6 * std::sqrt(2 / n));
  EXPECT_LT(std::abs(fourths / n - 3), 6 * std::sqrt(96 / n));
  EXPECT_LT(std::abs(neighbours / n), 6 / std::sqrt(n));
}

TEST_F(RandomNormal, HasTheMomentsOfTheDistribution) {
  expect_normal(draw<float>(1'000'003, 1, 1), 1);
  expect_normal(draw<BFloat16>(1'000'003, 0.02F, 2), 0.02F);
}

TEST_F(RandomNormal, IsAFunctionOfSeedAndPlace) {
  const std::vector<float> whole = draw<float>(100'000, 1, 7);
  EXPECT_EQ(draw<float>(100'000, 1, 7), whole);
  for (const int64_t count : {0, 1, 7, 8, 9, 2047, 2048, 2049, 65'537}) {
    EXPECT_EQ(draw<float>(count, 1, 7), std::vector<float>(whole.begin(), whole.begin() + count)) << count;
  }
  const std::vector<float> other = draw<float>(100'000, 1, 8);
  double product = 0;
  for (size_t i = 0; i < whole.size(); ++i)
    product += static_cast<double>(whole[i]) * other[i];
  EXPECT_LT(std::abs(product / 100'000), 6 / std::sqrt(100'000.0)) << "another seed, other numbers";
}

TEST_F(RandomNormal, BFloat16IsTheRoundedFloat) {
  const std::vector<float> exact = draw<float>(10'001, 3, 9);
  const std::vector<BFloat16> rounded = draw<BFloat16>(10'001, 3, 9);
  for (size_t i = 0; i < exact.size(); ++i)
    ASSERT_EQ(rounded[i].bits, to_bfloat16(exact[i]).bits) << i;
}

}  // namespace
}  // namespace longhalo::testing
