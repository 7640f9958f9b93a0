// The gradients of matrix products by cuBLASLt against the fp64 definition: tiles, their short ends, an odd
// vocabulary in padded rows; added exactly once although candidates are timed.
#include "core/error.hpp"
#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/matmul/device_matmul.hpp"

namespace longhalo::testing {
namespace {

struct Product {
  int64_t m, out, in, stride;
};

const Product kProducts[] = {{1, 8, 8, 8},         {1, 1024, 576, 1024},   {7, 64, 1024, 72},
                             {129, 576, 192, 576}, {300, 1024, 512, 1024}, {1000, 192, 64, 192},
                             {33, 1001, 64, 1008}, {257, 259, 128, 264}};

std::vector<double> transposed(int64_t rows, int64_t columns, int64_t stride, const std::vector<double>& x) {
  std::vector<double> to(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      to[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * stride + j)];
  return to;
}

std::vector<double> squares(std::vector<double> x) {
  for (double& value : x)
    value *= value;
  return x;
}

// c [m, out] = a [m, in] w [out, in]^T, and the 2-norm of each element's terms.
struct Reference {
  Reference(int64_t m, int64_t out, int64_t in, const std::vector<double>& a, const std::vector<double>& w)
      : terms(static_cast<double>(in)),
        c(static_cast<size_t>(m * out)),
        magnitude(static_cast<size_t>(m * out)) {
    matmul_reference(m, out, in, a.data(), w.data(), c.data());
    matmul_reference(m, out, in, squares(a).data(), squares(w).data(), magnitude.data());
  }
  // Sums in fp32 without rounding to nearest err like a random walk, each step below 2^-23 of the running
  // sum; 8 for the largest of many elements (device_matmul_test.cpp).
  double error(size_t at, double before) const {
    return 8 * std::sqrt(terms) * 0x1p-23 * (std::sqrt(magnitude[at]) + std::abs(before));
  }
  double terms;
  std::vector<double> c, magnitude;
};

class MatmulGradientGpu : public GpuTest {};

TEST_F(MatmulGradientGpu, OfTheInputAndOfTheWeight) {
  DeviceMatmul matmul(stream());
  for (const Product& p : kProducts) {
    SCOPED_TRACE(::testing::Message() << "m " << p.m << ", out " << p.out << ", in " << p.in);
    auto dc = normal_bf16(p.m * p.stride, 1);
    const auto a = normal_bf16(p.m * p.in, 2), w = normal_bf16(p.out * p.in, 3),
               da_before = normal_bf16(p.m * p.in, 4, 9);
    const auto dw_before = normal_floats(p.out * p.in, 5, 9);
    for (int64_t i = 0; i < p.m; ++i)  // behind the last column stands what must not be read
      for (int64_t c = p.out; c < p.stride; ++c)
        dc[static_cast<size_t>(i * p.stride + c)] = {0xffff};
    const auto columns = transposed(p.m, p.out, p.stride, doubles(dc));  // [out, m]
    const Reference da(p.m, p.in, p.out, transposed(p.out, p.m, p.m, columns),
                       transposed(p.out, p.in, p.in, doubles(w)));
    const Reference dw(p.out, p.in, p.m, columns, transposed(p.m, p.in, p.in, doubles(a)));
    Guarded<BFloat16> there_dc(p.m * p.stride, stream()), there_a(p.m * p.in, stream()),
        there_w(p.out * p.in, stream()), there_da(p.m * p.in, stream());
    Guarded<float> there_dw(p.out * p.in, stream());
    there_dc.put(dc), there_a.put(a), there_w.put(w);
    for (Accumulate accumulate : {Accumulate::kOverwrite, Accumulate::kAdd}) {
      const bool adds = accumulate == Accumulate::kAdd;
      const auto run = [&] {
        there_da.poison(), there_dw.poison();
        if (adds) there_da.put(da_before), there_dw.put(dw_before);
        matmul.input_gradient(p.m, p.out, p.in, there_dc.data(), there_w.data(), there_da.data(), accumulate,
                              p.stride);
        matmul.weight_gradient(p.m, p.out, p.in, there_dc.data(), there_a.data(), there_dw.data(), accumulate,
                               p.stride);
        return std::pair{there_da.values(), there_dw.values()};
      };
      const auto first = run();  // measures candidates on its way
      const auto wide_a = doubles(da_before), wide_w = doubles(dw_before);
      std::vector<double> right_a = da.c, right_w = dw.c;
      for (size_t at = 0; adds && at < right_a.size(); ++at)
        right_a[at] += wide_a[at];
      for (size_t at = 0; adds && at < right_w.size(); ++at)
        right_w[at] += wide_w[at];
      expect_near(first.first, right_a, kBf16Unit, [&](size_t at) {  // the product may be rounded before
        return da.error(at, adds ? wide_a[at] : 0) + (adds ? kBf16Unit * std::abs(da.c[at]) : 0);
      });
      expect_near(first.second, right_w, kFp32Unit,
                  [&](size_t at) { return dw.error(at, adds ? wide_w[at] : 0); });
      const auto second = run();
      expect_same_bits(second.first, first.first);
      expect_same_bits(second.second, first.second);
    }
  }
}

TEST_F(MatmulGradientGpu, RefusesWhatIsNotAligned) {
  DeviceMatmul matmul(stream());
  Guarded<BFloat16> x(64, stream()), y(64, stream());
  Guarded<float> z(64, stream());
  EXPECT_THROW(matmul.input_gradient(1, 8, 12, x.data(), x.data(), y.data()), InvariantError);
  EXPECT_THROW(matmul.weight_gradient(1, 7, 8, x.data(), x.data(), z.data()), InvariantError);
  EXPECT_THROW(matmul.weight_gradient(1, 16, 8, x.data(), x.data(), z.data(), Accumulate::kAdd, 8),
               InvariantError);
  matmul.weight_gradient(0, 8, 8, x.data(), x.data(), z.data());
  for (float value : z.values())
    EXPECT_TRUE(std::isnan(value));  // no rows are no work
}

}  // namespace
}  // namespace longhalo::testing
