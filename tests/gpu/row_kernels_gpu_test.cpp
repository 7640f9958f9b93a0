// RMSNorm, SwiGLU, quantisation, embedding, sums over chunks and the search for what is not finite: each
// against its definition in fp64, on rows narrower than a warp, of a block, and too wide for registers.
#include <bit>
#include <functional>
#include <limits>
#include <span>

#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/chunk_sums/chunk_sums.hpp"
#include "kernels/embedding/embedding.hpp"
#include "kernels/finite/first_not_finite.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct RowShape {
  int64_t n, width;
};

const RowShape kRowShapes[] = {{1, 8},     {5, 8},     {131, 24},   {7, 576},   {33, 1536},
                               {3, 4096},  {9, 1024},  {129, 4096}, {5, 14336}, {2, 16384},
                               {1, 32768}, {2, 32776}, {1, 57344}};

// The chain of additions that a sum over a row goes through, in units of fp32: a thread adds at most 56
// numbers (width / 1024 where rows are read twice), then 10 steps among threads.
constexpr double kRowSum = 66 * kFp32Unit;

class RowKernelsGpu : public GpuTest {};

struct HostRows {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// fp8 results with their guards.
struct GuardedRows {
  GuardedRows(const RowShape& shape, cudaStream_t stream)
      : values(shape.n * shape.width, stream), scales(shape.n, stream) {}
  Fp8Rows rows() { return {values.data(), scales.data()}; }
  void poison() { values.poison(), scales.poison(); }
  HostRows host() {
    HostRows host{{}, scales.values()};
    for (Fp8E4M3 value : values.values())
      host.codes.push_back(value.bits);
    return host;
  }
  Guarded<Fp8E4M3> values;
  Guarded<float> scales;
};

double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);  // bias 7, 3 bits
  if ((code & 0x7f) == 0x7f) return kNan;
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest of all e4m3 numbers, the even code of two as near; beyond the largest, the largest.
uint8_t e4m3_code(float x) {
  if (std::isnan(x)) return 0x7f;
  static const std::vector<double> values = [] {
    std::vector<double> all;
    for (int code = 0; code < 0x7f; ++code)
      all.push_back(e4m3_value(static_cast<uint8_t>(code)));
    return all;
  }();
  const double magnitude = std::abs(static_cast<double>(x));
  const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
  auto code = static_cast<int>(above - values.begin());
  if (above == values.end()) {
    code = 0x7e;
  } else if (code > 0) {
    const double up = *above - magnitude, down = magnitude - values[static_cast<size_t>(code - 1)];
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

// Values times scales are what `right` says, but for the rounding to e4m3 and `relative` before it; the
// largest magnitude of a row is stored as 448.
void expect_rows(const HostRows& got, const RowShape& shape, const std::vector<double>& right,
                 double relative) {
  for (int64_t i = 0; i < shape.n; ++i) {
    const double scale = got.scales[static_cast<size_t>(i)];
    double largest = 0;
    int top = 0;
    for (int64_t c = 0; c < shape.width; ++c) {
      const auto at = static_cast<size_t>(i * shape.width + c);
      largest = std::max(largest, std::abs(right[at]));
      top = std::max(top, got.codes[at] & 0x7f);
      ASSERT_LE(std::abs(e4m3_value(got.codes[at]) * scale - right[at]),
                (kE4M3Unit + 2 * relative) * std::abs(right[at]) + kE4M3Least * scale)
          << "row " << i << ", column " << c;
    }
    ASSERT_NEAR(scale, largest / 448, 2 * relative * largest / 448) << "row " << i;
    ASSERT_EQ(top, largest > 0 ? 0x7e : 0) << "row " << i;
  }
}

TEST_F(RowKernelsGpu, Rmsnorm) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 1, 3);
    const auto weight = normal_floats(shape.width, 2);
    std::vector<double> right(x.size());
    rmsnorm_reference(shape.n, shape.width, doubles(x).data(), doubles(weight).data(), 1e-5, right.data());
    Guarded<BFloat16> in(shape.n * shape.width, stream()), out(shape.n * shape.width, stream());
    Guarded<float> w(shape.width, stream());
    in.put(x), w.put(weight);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-5F, out.data());
    const auto got = out.values();
    // Half of the sum's error, the root's and two products', and the rounding of the result.
    expect_near(got, right, kBf16Unit + kRowSum + 8 * kFp32Unit, [](size_t) { return 0.0; });
    out.poison();
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-5F, out.data());
    expect_same_bits(out.values(), got);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-5F, in.data());
    expect_same_bits(in.values(), got);  // in place
  }
}

TEST_F(RowKernelsGpu, RmsnormToFp8) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    auto x = normal_bf16(shape.n * shape.width, 3, 0.01F);
    if (shape.n > 1) std::fill_n(x.begin(), shape.width, BFloat16{});  // a row of zeros
    const auto weight = normal_floats(shape.width, 4);
    std::vector<double> right(x.size());
    rmsnorm_reference(shape.n, shape.width, doubles(x).data(), doubles(weight).data(), 1e-6, right.data());
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    Guarded<float> w(shape.width, stream());
    GuardedRows out(shape, stream());
    in.put(x), w.put(weight);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-6F, out.rows());
    const HostRows got = out.host();
    expect_rows(got, shape, right, kRowSum + 8 * kFp32Unit);
    EXPECT_EQ(got.scales[0] == 0, shape.n > 1);
    out.poison();
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-6F, out.rows());
    const HostRows again = out.host();
    expect_same_bits(again.codes, got.codes);
    expect_same_bits(again.scales, got.scales);
  }
}

std::vector<BFloat16> gates_and_ups(const RowShape& shape) {
  auto gate_up = normal_bf16(shape.n * 2 * shape.width, 5, 6);
  const float far[] = {-1000, -88.5F, -80, 0, 90, 3e4F};
  for (size_t at = 0; at < 6; ++at)  // gates of the first row; the widths are 8 at least
    gate_up[at] = to_bfloat16(far[at]);
  return gate_up;
}

// exp errs by 2 + 1.2 |x| units of 2^-23, which reach 2 * 108 units of 2^-24 before it overflows; a sum, a
// reciprocal and two products are exact to a few.
constexpr double kSilu = (216 + 8) * kFp32Unit;

TEST_F(RowKernelsGpu, Swiglu) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto gate_up = gates_and_ups(shape);
    const auto wide = doubles(gate_up);
    std::vector<double> right(static_cast<size_t>(shape.n * shape.width));
    swiglu_reference(shape.n, shape.width, wide.data(), right.data());
    Guarded<BFloat16> in(shape.n * 2 * shape.width, stream()), out(shape.n * shape.width, stream());
    in.put(gate_up);
    swiglu(stream(), shape.n, shape.width, in.data(), out.data());
    const auto got = out.values();
    // Below exp(-87) silu may have become 0: |g| e^g < 1e-35 there, and |up| < 50.
    expect_near(got, right, kBf16Unit + kSilu, [](size_t) { return 5e-34; });
    out.poison();
    swiglu(stream(), shape.n, shape.width, in.data(), out.data());
    expect_same_bits(out.values(), got);
  }
}

TEST_F(RowKernelsGpu, SwigluToFp8) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto gate_up = gates_and_ups(shape);
    std::vector<double> right(static_cast<size_t>(shape.n * shape.width));
    swiglu_reference(shape.n, shape.width, doubles(gate_up).data(), right.data());
    Guarded<BFloat16> in(shape.n * 2 * shape.width, stream());
    GuardedRows out(shape, stream());
    in.put(gate_up);
    swiglu(stream(), shape.n, shape.width, in.data(), out.rows());
    const HostRows got = out.host();
    expect_rows(got, shape, right, kSilu);
    out.poison();
    swiglu(stream(), shape.n, shape.width, in.data(), out.rows());
    const HostRows again = out.host();
    expect_same_bits(again.codes, got.codes);
    expect_same_bits(again.scales, got.scales);
  }
}

// int8 results with their guards.
struct GuardedInt8 {
  GuardedInt8(const RowShape& shape, cudaStream_t stream)
      : values(shape.n * shape.width, stream), scales(shape.n, stream) {}
  Int8Rows rows() { return {values.data(), scales.data()}; }
  Guarded<int8_t> values;
  Guarded<float> scales;
};

const RowShape kBlockShapes[] = {{1, 64},     {5, 128},   {7, 576},   {33, 1536}, {3, 4096}, {9, 1024},
                                 {129, 4096}, {5, 14336}, {1, 32768}, {2, 32832}, {1, 57344}};

// Blocks of 64 through the Hadamard matrix by its definition: entry (i, j) is 1/8, negative where i and j
// share an odd number of bits.
std::vector<double> hadamard(const std::vector<double>& x) {
  std::vector<double> y(x.size());
  for (size_t block = 0; block < x.size(); block += 64)
    for (size_t i = 0; i < 64; ++i)
      for (size_t j = 0; j < 64; ++j)
        y[block + i] += (std::popcount(i & j) % 2 == 1 ? -1 : 1) * x[block + j] / 8;
  return y;
}

// Values times scales are the rotated numbers, but for half a scale of rounding and `relative` of the
// block's magnitudes before it; a row's largest is stored as 127. Its own second run gives the same bits.
void expect_rotated(const RowShape& shape, const std::vector<double>& x, double relative, cudaStream_t stream,
                    const std::function<void(const Int8Rows&)>& run) {
  GuardedInt8 out(shape, stream);
  run(out.rows());
  const auto values = out.values.values();
  const auto scales = out.scales.values();
  const std::vector<double> right = hadamard(x);
  for (int64_t i = 0; i < shape.n; ++i) {
    const auto row = static_cast<size_t>(i * shape.width), width = static_cast<size_t>(shape.width);
    const double scale = scales[static_cast<size_t>(i)];
    double largest = 0, error = 0;
    int top = 0;
    for (size_t at = row; at < row + width; ++at) {
      double magnitudes = 0;
      for (size_t j = 0; j < 64; ++j)
        magnitudes += std::abs(x[at / 64 * 64 + j]) / 8;
      largest = std::max(largest, std::abs(right[at]));
      error = std::max(error, relative * magnitudes);
      top = std::max(top, std::abs(static_cast<int>(values[at])));
      ASSERT_LE(std::abs(values[at] * scale - right[at]), (0.5 + 1e-4) * scale + relative * magnitudes)
          << "row " << i << ", column " << at - row;
    }
    ASSERT_NEAR(scale, largest / 127, (2 * error + 2 * kFp32Unit * largest) / 127) << "row " << i;
    ASSERT_EQ(top, largest > 0 ? 127 : 0) << "row " << i;
  }
  out.values.poison(), out.scales.poison();
  run(out.rows());
  expect_same_bits(out.values.values(), values);
  expect_same_bits(out.scales.values(), scales);
}

// Of the block's magnitudes: sixteen numbers added on the tensor cores, which do not round to nearest, and
// two additions more.
constexpr double kRotation = 16 * 2 * kFp32Unit + 2 * kFp32Unit;
// What norm and SwiGLU make in fp32 is rounded to bf16 for it.
constexpr double kRounding = kBf16Unit;

TEST_F(RowKernelsGpu, QuantisedToInt8AfterTheRotation) {
  for (const RowShape& shape : kBlockShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    auto x = normal_bf16(shape.n * shape.width, 21, 20);
    x[5] = to_bfloat16(3e4F);                                                        // an outlier
    if (shape.n > 1) std::fill_n(x.begin() + shape.width, shape.width, BFloat16{});  // a row of zeros
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    in.put(x);
    expect_rotated(shape, doubles(x), kRotation, stream(), [&](const Int8Rows& out) {
      quantize_rows(stream(), shape.n, shape.width, in.data(), out);
    });
  }
}

TEST_F(RowKernelsGpu, RmsnormToInt8) {
  for (const RowShape& shape : kBlockShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 22, 0.01F);
    const auto weight = normal_floats(shape.width, 23);
    std::vector<double> right(x.size());
    rmsnorm_reference(shape.n, shape.width, doubles(x).data(), doubles(weight).data(), 1e-6, right.data());
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    Guarded<float> w(shape.width, stream());
    in.put(x), w.put(weight);
    expect_rotated(shape, right, kRotation + kRounding + kRowSum + 8 * kFp32Unit, stream(),
                   [&](const Int8Rows& out) {
                     rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-6F, out);
                   });
  }
}

TEST_F(RowKernelsGpu, SwigluToInt8) {
  for (const RowShape& shape : kBlockShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto gate_up = gates_and_ups(shape);
    std::vector<double> right(static_cast<size_t>(shape.n * shape.width));
    swiglu_reference(shape.n, shape.width, doubles(gate_up).data(), right.data());
    Guarded<BFloat16> in(shape.n * 2 * shape.width, stream());
    in.put(gate_up);
    expect_rotated(shape, right, kRotation + kRounding + kSilu, stream(),
                   [&](const Int8Rows& out) { swiglu(stream(), shape.n, shape.width, in.data(), out); });
  }
}

TEST_F(RowKernelsGpu, Int8HidesNothingThatIsNotFinite) {
  const RowShape shape{6, 128};
  auto x = normal_bf16(shape.n * shape.width, 24);
  const auto row = [&](int64_t i) { return x.begin() + i * shape.width; };
  std::fill_n(row(0), shape.width, BFloat16{});
  std::fill_n(row(1), shape.width, to_bfloat16(0x1p-120F));
  row(2)[9] = to_bfloat16(-kInfinity);
  row(3)[11] = to_bfloat16(kNan);
  row(4)[70] = to_bfloat16(kInfinity), row(4)[71] = to_bfloat16(kInfinity);
  Guarded<BFloat16> in(shape.n * shape.width, stream());
  Guarded<float> weight(shape.width, stream());
  in.put(x), weight.put(std::vector<float>(static_cast<size_t>(shape.width), 1));
  GuardedInt8 out(shape, stream());
  quantize_rows(stream(), shape.n, shape.width, in.data(), out.rows());
  std::vector<float> scales = out.scales.values();
  for (size_t i : {0U, 1U})
    EXPECT_EQ(scales[i], 0);
  for (size_t i : {2U, 3U, 4U})
    EXPECT_TRUE(std::isnan(scales[i])) << "row " << i;
  EXPECT_GT(scales[5], 0);
  rmsnorm(stream(), shape.n, shape.width, in.data(), weight.data(), 1e-5F, out.rows());
  scales = out.scales.values();
  for (size_t i : {2U, 3U, 4U})
    EXPECT_TRUE(std::isnan(scales[i])) << "row " << i << " of the norm";
  EXPECT_GT(scales[5], 0);
  swiglu(stream(), shape.n, 64, in.data(), out.rows());
  scales = out.scales.values();
  for (size_t i : {2U, 3U, 4U})
    EXPECT_TRUE(std::isnan(scales[i])) << "row " << i << " of SwiGLU";
  EXPECT_GT(scales[5], 0);
  EXPECT_THROW(quantize_rows(stream(), 1, 96, in.data(), out.rows()), InvariantError);
}

TEST_F(RowKernelsGpu, QuantisedRowsAreRoundedToTheNearestE4M3) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    auto x = normal_bf16(shape.n * shape.width, 6, 20);
    x[3] = to_bfloat16(1e-4F);  // below e4m3's normal numbers
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    GuardedRows out(shape, stream());
    in.put(x);
    quantize_rows(stream(), shape.n, shape.width, in.data(), out.rows());
    const HostRows got = out.host();
    for (int64_t i = 0; i < shape.n; ++i) {
      const BFloat16* row = x.data() + i * shape.width;
      float largest = 0;
      for (int64_t c = 0; c < shape.width; ++c)
        largest = std::max(largest, std::abs(to_float(row[c])));
      ASSERT_EQ(got.scales[static_cast<size_t>(i)], largest / 448);
      const float inverse = 448 / largest;
      for (int64_t c = 0; c < shape.width; ++c)
        ASSERT_EQ(got.codes[static_cast<size_t>(i * shape.width + c)], e4m3_code(to_float(row[c]) * inverse))
            << "row " << i << ", column " << c << ": " << to_float(row[c]) << " / " << largest / 448;
    }
  }
}

// The squared error of a row in e4m3 with the scale of `step`, in fp64.
double squared_error(std::span<const BFloat16> row, double largest, int step) {
  const double scale = largest / 448 * std::exp2(step / 16.0);
  double sum = 0;
  for (const BFloat16 x : row) {
    const double value = to_float(x);
    const double error = e4m3_value(e4m3_code(static_cast<float>(value / scale))) * scale - value;
    sum += error * error;
  }
  return sum;
}

TEST_F(RowKernelsGpu, OfSixteenScalesTheOneOfLeastErrorIsTaken) {
  int64_t others = 0;  // rows whose scale is not that of quantize_rows()
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 11, 1e-3F);
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    GuardedRows out(shape, stream());
    in.put(x);
    quantize_rows_least_error(stream(), shape.n, shape.width, in.data(), out.rows());
    const HostRows got = out.host();
    for (int64_t i = 0; i < shape.n; ++i) {
      const auto row =
          std::span(x).subspan(static_cast<size_t>(i * shape.width), static_cast<size_t>(shape.width));
      double largest = 0, squares = 0, error = 0;
      const double scale = got.scales[static_cast<size_t>(i)];
      for (int64_t c = 0; c < shape.width; ++c) {
        const double value = to_float(row[static_cast<size_t>(c)]);
        const double wrong = e4m3_value(got.codes[static_cast<size_t>(i * shape.width + c)]) * scale - value;
        largest = std::max(largest, std::abs(value));
        squares += value * value;
        error += wrong * wrong;
      }
      double least = std::numeric_limits<double>::infinity();
      for (int step = 0; step < 16; ++step)
        least = std::min(least, squared_error(row, largest, step));
      // Roundings of the scales, of exp2 (two units) and of the products before e4m3 move each number by 16
      // units at most, in the kernel's comparison and again in the result; sums err as others over a row do.
      const double bound = std::sqrt(least) + 32 * kFp32Unit * std::sqrt(squares);
      ASSERT_LE(error, bound * bound * (1 + 2 * kRowSum)) << "row " << i;
      const double step = 16 * std::log2(scale / (largest / 448));
      ASSERT_NEAR(step, std::round(step), 1e-4) << "row " << i;  // 16 units of fp32 are 2e-5 of a step
      ASSERT_TRUE(step > -0.5 && step < 15.5) << "row " << i << ", step " << step;
      others += step > 0.5;
    }
    out.poison();
    quantize_rows_least_error(stream(), shape.n, shape.width, in.data(), out.rows());
    const HostRows again = out.host();
    expect_same_bits(again.codes, got.codes);
    expect_same_bits(again.scales, got.scales);
  }
  EXPECT_GT(others, 100);  // of 320: chance alone leaves one in sixteen at the first
}

using ToFp8 = void (*)(StreamHandle, int64_t, int64_t, const BFloat16*, const Fp8Rows&);
class RoundingToFp8 : public RowKernelsGpu, public ::testing::WithParamInterface<ToFp8> {};
INSTANTIATE_TEST_SUITE_P(Both, RoundingToFp8,
                         ::testing::Values(ToFp8{&quantize_rows}, ToFp8{&quantize_rows_least_error}));

TEST_P(RoundingToFp8, HidesNothingThatIsNotFinite) {
  const RowShape shape{5, 64};
  auto x = normal_bf16(shape.n * shape.width, 7);
  const auto row = [&](int64_t i) { return x.begin() + i * shape.width; };
  std::fill_n(row(0), shape.width, BFloat16{});
  std::fill_n(row(1), shape.width, to_bfloat16(0x1p-120F));
  row(2)[9] = to_bfloat16(-kInfinity);
  row(3)[11] = to_bfloat16(kNan);
  std::fill_n(row(4), shape.width, to_bfloat16(kNan));
  Guarded<BFloat16> in(shape.n * shape.width, stream());
  GuardedRows out(shape, stream());
  in.put(x);
  GetParam()(stream(), shape.n, shape.width, in.data(), out.rows());
  const HostRows got = out.host();
  for (int64_t i = 0; i < shape.n; ++i) {
    for (int64_t c = 0; c < shape.width; ++c) {
      const double value = e4m3_value(got.codes[static_cast<size_t>(i * shape.width + c)]) *
                           static_cast<double>(got.scales[static_cast<size_t>(i)]);
      if (i < 2)
        EXPECT_EQ(value, 0);
      else
        EXPECT_EQ(std::isnan(value), i == 2 || i == 4 || c == 11) << "row " << i << ", column " << c;
    }
  }
}

TEST_F(RowKernelsGpu, NoRowsAreNoWork) {
  Guarded<BFloat16> x(64, stream()), out(64, stream());
  Guarded<float> weight(64, stream());
  Guarded<int64_t> first(1, stream());
  GuardedRows rows({1, 64}, stream());
  rmsnorm(stream(), 0, 64, x.data(), weight.data(), 1e-5F, out.data());
  rmsnorm(stream(), 0, 64, x.data(), weight.data(), 1e-5F, rows.rows());
  swiglu(stream(), 0, 32, x.data(), out.data());
  swiglu(stream(), 0, 32, x.data(), rows.rows());
  quantize_rows(stream(), 0, 64, x.data(), rows.rows());
  quantize_rows_least_error(stream(), 0, 64, x.data(), rows.rows());
  GuardedInt8 int8({1, 64}, stream());
  rmsnorm(stream(), 0, 64, x.data(), weight.data(), 1e-5F, int8.rows());
  swiglu(stream(), 0, 64, x.data(), int8.rows());
  quantize_rows(stream(), 0, 64, x.data(), int8.rows());
  embedding(stream(), 0, 64, nullptr, x.data(), out.data());
  first_not_finite(stream(), 0, 64, x.data(), first.data());
  for (BFloat16 value : out.values())
    EXPECT_EQ(value.bits, 0xffff);
  for (uint8_t code : rows.host().codes)
    EXPECT_EQ(code, 0xff);
  for (float scale : int8.scales.values())
    EXPECT_TRUE(std::isnan(scale));
  EXPECT_EQ(first.values()[0], 0);
}

TEST_F(RowKernelsGpu, EmbeddingCopiesRows) {
  for (const RowShape& shape : kRowShapes) {
    constexpr int32_t kVocabulary = 53;
    const auto table = normal_bf16(kVocabulary * shape.width, 8);
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < shape.n; ++i)
      tokens.push_back(static_cast<int32_t>((kVocabulary - 1 + i * 17) % kVocabulary));
    Guarded<BFloat16> rows(kVocabulary * shape.width, stream()), x(shape.n * shape.width, stream());
    Guarded<int32_t> chosen(shape.n, stream());
    rows.put(table), chosen.put(tokens);
    embedding(stream(), shape.n, shape.width, chosen.data(), rows.data(), x.data());
    std::vector<BFloat16> right;
    for (int32_t token : tokens)
      right.insert(right.end(), table.begin() + token * shape.width,
                   table.begin() + (token + 1) * shape.width);
    expect_same_bits(x.values(), right);
  }
}

TEST_F(RowKernelsGpu, TheFirstRowThatIsNotFiniteIsFound) {
  for (const RowShape& shape : {RowShape{1, 8}, RowShape{517, 24}, RowShape{301, 4096}, RowShape{3, 40960}}) {
    const auto clean = normal_bf16(shape.n * shape.width, 9, 100);
    Guarded<BFloat16> x(shape.n * shape.width, stream());
    Guarded<int64_t> first(1, stream());
    const auto find = [&](const std::vector<BFloat16>& rows) {
      x.put(rows);
      first.poison();
      first_not_finite(stream(), shape.n, shape.width, x.data(), first.data());
      return first.values()[0];
    };
    EXPECT_EQ(find(clean), shape.n);
    for (float fault : {kNan, kInfinity, -kInfinity, 0x1p65F}) {  // the square of the last overflows
      for (int64_t row : {int64_t{0}, shape.n / 2, shape.n - 1}) {
        auto rows = clean;
        for (int64_t later = row; later < shape.n; later += 2)
          rows[static_cast<size_t>((later + 1) * shape.width - 1)] = to_bfloat16(fault);
        EXPECT_EQ(find(rows), row) << fault;
      }
    }
  }
}

TEST_F(RowKernelsGpu, ChunkSumsAddTileAfterTile) {
  struct Case {
    int64_t n, hidden, first_token, chunk_tokens, tile;
  };
  for (const Case& c : {Case{1, 8, 0, 1, 1}, Case{1000, 24, 0, 256, 300}, Case{777, 576, 200, 256, 128},
                        Case{513, 4096, 3, 7, 513}, Case{300, 136, 0, 1 << 30, 64}, Case{65, 8, 5, 1, 65}}) {
    SCOPED_TRACE(::testing::Message() << "n " << c.n << ", chunks of " << c.chunk_tokens);
    const auto x = normal_bf16(c.n * c.hidden, 10);
    const int64_t chunks = (c.first_token + c.n - 1) / c.chunk_tokens + 1;
    std::vector<double> right(static_cast<size_t>(chunks * c.hidden), 0.25), sizes(right.size(), 0.25);
    for (int64_t i = 0; i < c.n; ++i) {
      for (int64_t column = 0; column < c.hidden; ++column) {
        const auto at = static_cast<size_t>((c.first_token + i) / c.chunk_tokens * c.hidden + column);
        const double value = to_float(x[static_cast<size_t>(i * c.hidden + column)]);
        right[at] += value, sizes[at] += std::abs(value);
      }
    }
    Guarded<BFloat16> in(c.n * c.hidden, stream());
    Guarded<double> sums(chunks * c.hidden, stream());
    in.put(x);
    const auto run = [&] {
      sums.put(std::vector<double>(right.size(), 0.25));
      for (int64_t at = 0; at < c.n; at += c.tile)
        add_chunk_sums(stream(), std::min(c.tile, c.n - at), c.hidden, in.data() + at * c.hidden,
                       c.first_token + at, c.chunk_tokens, sums.data());
      return sums.values();
    };
    const auto got = run();
    const double count = static_cast<double>(std::min(c.n, c.chunk_tokens));
    for (size_t at = 0; at < right.size(); ++at)
      ASSERT_NEAR(got[at], right[at], count * 0x1p-53 * sizes[at]) << "element " << at;
    expect_same_bits(run(), got);
  }
}

}  // namespace
}  // namespace longhalo::testing
