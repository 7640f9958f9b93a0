// RMSNorm, SwiGLU and rounding to int8 after the rotation of blocks of 64, against their definitions in fp64.
#include <bit>
#include <functional>

#include "kernels/quantize/quantize.hpp"
#include "row_kernels_problem.hpp"

namespace longhalo::testing {
namespace {

class RowKernelsInt8 : public GpuTest {};

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

TEST_F(RowKernelsInt8, QuantisedToInt8AfterTheRotation) {
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

TEST_F(RowKernelsInt8, RmsnormToInt8) {
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

TEST_F(RowKernelsInt8, SwigluToInt8) {
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

TEST_F(RowKernelsInt8, Int8HidesNothingThatIsNotFinite) {
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

TEST_F(RowKernelsInt8, NoRowsAreNoWork) {
  Guarded<BFloat16> x(64, stream());
  Guarded<float> weight(64, stream());
  GuardedInt8 rows({1, 64}, stream());
  rmsnorm(stream(), 0, 64, x.data(), weight.data(), 1e-5F, rows.rows());
  swiglu(stream(), 0, 64, x.data(), rows.rows());
  quantize_rows(stream(), 0, 64, x.data(), rows.rows());
  for (float scale : rows.scales.values())
    EXPECT_TRUE(std::isnan(scale));
}

}  // namespace
}  // namespace longhalo::testing
