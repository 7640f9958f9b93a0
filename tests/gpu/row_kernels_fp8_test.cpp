// RMSNorm, SwiGLU and rounding to fp8 (e4m3 with a scale a row), against their definitions in fp64, as they
// are, with a mean taken off, and with the rounding errors of outliers.
#include <span>

#include "core/error.hpp"
#include "e4m3.hpp"
#include "kernels/quantize/quantize.hpp"
#include "row_kernels_problem.hpp"

namespace longhalo::testing {
namespace {

class RowKernelsFp8 : public GpuTest {};

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

// As many columns as a row may have, from all over it; every one of a narrow row.
struct GuardedOutliers {
  GuardedOutliers(int64_t width, cudaStream_t stream)
      : count(std::min<int64_t>(width, std::clamp<int64_t>(width / 32 / 8 * 8, 32, 1024))),
        device(count, stream) {
    for (int64_t i = 0; i < count; ++i)
      columns.push_back(static_cast<int32_t>(i * width / count));
    device.put(columns);
  }
  Fp8Rows with(Fp8Rows rows) {
    rows.outliers = {device.data(), count};
    return rows;
  }
  int64_t count;
  std::vector<int32_t> columns;
  Guarded<int32_t> device;
};

// `got`, rows with outliers, are the rows `alone`, and behind each the errors of its outliers, `exact` less
// what is stored of them, but for the rounding to e4m3 and `before` it, a share of `sizes`.
void expect_outliers(const HostRows& got, const HostRows& alone, const RowShape& shape,
                     const GuardedOutliers& outliers, const std::vector<double>& exact,
                     const std::vector<double>& sizes, double before) {
  expect_same_bits(got.scales, alone.scales);
  const int64_t stored = shape.width + outliers.count;
  for (int64_t i = 0; i < shape.n; ++i) {
    const double scale = got.scales[static_cast<size_t>(i)];
    for (int64_t c = 0; c < shape.width; ++c)
      ASSERT_EQ(got.codes[static_cast<size_t>(i * stored + c)],
                alone.codes[static_cast<size_t>(i * shape.width + c)])
          << "row " << i << ", column " << c;
    for (int64_t o = 0; o < outliers.count; ++o) {
      const auto at = static_cast<size_t>(i * shape.width + outliers.columns[static_cast<size_t>(o)]);
      const double error = exact[at] - e4m3_value(alone.codes[at]) * scale;
      const double code = e4m3_value(got.codes[static_cast<size_t>(i * stored + shape.width + o)]);
      const double unsure = before * std::abs(sizes[at]);
      ASSERT_LE(std::abs(code * scale - error), kE4M3Unit * std::abs(error) + 2 * unsure + kE4M3Least * scale)
          << "row " << i << ", outlier " << o;
    }
  }
}

// What a kernel takes off each row, as large as what it takes it from.
struct GuardedMean {
  GuardedMean(int64_t width, float size, cudaStream_t stream)
      : values(doubles(normal_bf16(width, 21, size))), device(width, stream) {
    device.put(normal_bf16(width, 21, size));
    for (const double value : values)
      largest = std::max(largest, static_cast<float>(std::abs(value)));
  }
  Fp8Rows off(Fp8Rows rows) {
    rows.mean = device.data();
    rows.largest_mean = largest;
    return rows;
  }
  std::vector<double> values;
  float largest = 0;
  Guarded<BFloat16> device;
};

// Values times scales are `right` less the mean, but for the rounding to e4m3, `relative` before the mean
// came off and six roundings of fp32 in doing so. No magnitude is beyond 448, nor is a scale larger than the
// largest of a row allows with `slack` besides.
void expect_centred_rows(const HostRows& got, const RowShape& shape, const std::vector<double>& right,
                         const GuardedMean& mean, double relative, double slack) {
  for (int64_t i = 0; i < shape.n; ++i) {
    const double scale = got.scales[static_cast<size_t>(i)];
    double largest = 0, error = 0;
    for (int64_t c = 0; c < shape.width; ++c) {
      const auto at = static_cast<size_t>(i * shape.width + c);
      const double off = mean.values[static_cast<size_t>(c)], centred = right[at] - off;
      const double before = (relative + 6 * kFp32Unit) * (std::abs(right[at]) + std::abs(off));
      largest = std::max(largest, std::abs(centred));
      error = std::max(error, before);
      ASSERT_LE(std::abs(e4m3_value(got.codes[at]) * scale - centred),
                kE4M3Unit * std::abs(centred) + 2 * before + kE4M3Least * scale)
          << "row " << i << ", column " << c;
    }
    ASSERT_GE(scale, (largest - 2 * error) / 448) << "row " << i;
    ASSERT_LE(scale, (largest + slack + 2 * error) / 448) << "row " << i;
  }
}

TEST_F(RowKernelsFp8, ANormsMeanComesOff) {
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
    GuardedMean mean(shape.width, 2, stream());
    in.put(x), w.put(weight);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-6F, mean.off(out.rows()));
    // The scale is chosen before the mean is off: for the largest of both.
    expect_centred_rows(out.host(), shape, right, mean, kRowSum + 8 * kFp32Unit, 2 * mean.largest);
  }
}

TEST_F(RowKernelsFp8, AnActivationsMeanComesOff) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto gate_up = gates_and_ups(shape);
    std::vector<double> right(static_cast<size_t>(shape.n * shape.width));
    swiglu_reference(shape.n, shape.width, doubles(gate_up).data(), right.data());
    Guarded<BFloat16> in(shape.n * 2 * shape.width, stream());
    GuardedRows out(shape, stream());
    GuardedMean mean(shape.width, 10, stream());
    in.put(gate_up);
    swiglu(stream(), shape.n, shape.width, in.data(), mean.off(out.rows()));
    expect_centred_rows(out.host(), shape, right, mean, kSilu, 0);
  }
}

TEST_F(RowKernelsFp8, AMeanComesOffBeforeRounding) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 6, 20);
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    GuardedRows out(shape, stream());
    GuardedMean mean(shape.width, 20, stream());
    in.put(x);
    quantize_rows(stream(), shape.n, shape.width, in.data(), mean.off(out.rows()));
    expect_centred_rows(out.host(), shape, doubles(x), mean, 0, 0);
    EXPECT_THROW(quantize_rows_least_error(stream(), shape.n, shape.width, in.data(), mean.off(out.rows())),
                 InvariantError);
  }
}

// What is left of `right` without the mean, and |right| + |mean|, of which it errs by a share.
struct Centred {
  Centred(const std::vector<double>& right, const std::vector<double>& mean) {
    for (size_t at = 0; at < right.size(); ++at) {
      const double off = mean[at % mean.size()];
      values.push_back(right[at] - off);
      sizes.push_back(std::abs(right[at]) + std::abs(off));
    }
  }
  std::vector<double> values, sizes;
};

TEST_F(RowKernelsFp8, RoundingErrorsOfANormsOutliersAreStoredToo) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 3, 0.01F);
    const auto weight = normal_floats(shape.width, 4);
    std::vector<double> right(x.size());
    rmsnorm_reference(shape.n, shape.width, doubles(x).data(), doubles(weight).data(), 1e-6, right.data());
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    Guarded<float> w(shape.width, stream());
    GuardedOutliers outliers(shape.width, stream());
    GuardedMean mean(shape.width, 2, stream());
    GuardedRows alone(shape, stream()), both({shape.n, shape.width + outliers.count}, stream());
    in.put(x), w.put(weight);
    const Centred exact(right, mean.values);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-6F, mean.off(alone.rows()));
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-6F, outliers.with(mean.off(both.rows())));
    expect_outliers(both.host(), alone.host(), shape, outliers, exact.values, exact.sizes,
                    kRowSum + 8 * kFp32Unit);
  }
}

TEST_F(RowKernelsFp8, RoundingErrorsOfOutliersAreStoredToo) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 6, 20);
    Guarded<BFloat16> in(shape.n * shape.width, stream());
    GuardedOutliers outliers(shape.width, stream());
    GuardedMean mean(shape.width, 20, stream());
    GuardedRows alone(shape, stream()), both({shape.n, shape.width + outliers.count}, stream());
    in.put(x);
    quantize_rows(stream(), shape.n, shape.width, in.data(), mean.off(alone.rows()));
    quantize_rows(stream(), shape.n, shape.width, in.data(), outliers.with(mean.off(both.rows())));
    const Centred exact(doubles(x), mean.values);
    // Of fp32's roundings there are four: the mean comes off, the scale, its inverse, and the product with
    // it.
    expect_outliers(both.host(), alone.host(), shape, outliers, exact.values, exact.values, 4 * kFp32Unit);
    EXPECT_THROW(
        quantize_rows_least_error(stream(), shape.n, shape.width, in.data(), outliers.with(both.rows())),
        InvariantError);
    EXPECT_THROW(swiglu(stream(), 1, shape.width / 2, in.data(), outliers.with(both.rows())), InvariantError);
  }
}

TEST_F(RowKernelsFp8, OutliersOfRowsThatAreNotFiniteAreNotEither) {
  const RowShape shape{4, 64};
  auto x = normal_bf16(shape.n * shape.width, 7);
  GuardedOutliers outliers(shape.width, stream());
  std::fill_n(x.begin(), shape.width, BFloat16{});
  x[static_cast<size_t>(shape.width + 9)] = to_bfloat16(-kInfinity);
  const int32_t column = outliers.columns[5];
  x[static_cast<size_t>(2 * shape.width + column)] = to_bfloat16(kNan);
  Guarded<BFloat16> in(shape.n * shape.width, stream());
  GuardedRows out({shape.n, shape.width + outliers.count}, stream());
  in.put(x);
  quantize_rows(stream(), shape.n, shape.width, in.data(), outliers.with(out.rows()));
  const HostRows got = out.host();
  for (int64_t i = 0; i < shape.n; ++i) {
    for (int64_t o = 0; o < outliers.count; ++o) {
      const auto at = static_cast<size_t>(i * (shape.width + outliers.count) + shape.width + o);
      const double value =
          e4m3_value(got.codes[at]) * static_cast<double>(got.scales[static_cast<size_t>(i)]);
      EXPECT_EQ(std::isnan(value), i == 1 || (i == 2 && o == 5)) << "row " << i << ", outlier " << o;
      if (i == 0) {
        EXPECT_EQ(value, 0);
      }
    }
  }
}

TEST_F(RowKernelsFp8, RmsnormToFp8) {
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

TEST_F(RowKernelsFp8, SwigluToFp8) {
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

TEST_F(RowKernelsFp8, QuantisedRowsAreRoundedToTheNearestE4M3) {
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

TEST_F(RowKernelsFp8, OfSixteenScalesTheOneOfLeastErrorIsTaken) {
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
class RoundingToFp8 : public RowKernelsFp8, public ::testing::WithParamInterface<ToFp8> {};
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

TEST_F(RowKernelsFp8, NoRowsAreNoWork) {
  Guarded<BFloat16> x(64, stream());
  Guarded<float> weight(64, stream());
  GuardedRows rows({1, 64}, stream());
  rmsnorm(stream(), 0, 64, x.data(), weight.data(), 1e-5F, rows.rows());
  swiglu(stream(), 0, 32, x.data(), rows.rows());
  quantize_rows(stream(), 0, 64, x.data(), rows.rows());
  quantize_rows_least_error(stream(), 0, 64, x.data(), rows.rows());
  for (uint8_t code : rows.host().codes)
    EXPECT_EQ(code, 0xff);
}

}  // namespace
}  // namespace longhalo::testing
