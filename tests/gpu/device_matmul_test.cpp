// Matrix products by cuBLASLt against the fp64 definition: shapes of prefill tiles, of their short ends and
// of decode; the residual stream added exactly once although candidates are timed; fp8 with a scale a row,
// with and without a bias; int8 bit by bit.
#include "kernels/matmul/device_matmul.hpp"

#include <cmath>
#include <random>

#include "core/error.hpp"
#include "e4m3.hpp"
#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/matmul/int8_matmul.hpp"
#include "kernels/quantize/quantize.hpp"

namespace longhalo::testing {
namespace {

struct Product {
  int64_t m, out, in;
};

const Product kProducts[] = {{1, 8, 8},       {1, 4096, 1024}, {2, 576, 576},
                             {8, 1536, 576},  {7, 64, 4096},   {129, 576, 192},
                             {257, 320, 576}, {1000, 192, 64}, {300, 1024, 512}};

// Sums of `in` products in fp32: rounding errors add like a random walk (Higham and Mary 2019), each below
// `unit` of the running sum, which the magnitude sqrt(sum of squares) stands for; 8 for the largest of many
// elements.
double sum_error(const Product& p, double unit, double magnitude) {
  return 8 * std::sqrt(static_cast<double>(p.in)) * unit * magnitude;
}

struct Reference {
  std::vector<double> c;          // [m, out]
  std::vector<double> magnitude;  // [m, out] sqrt(sum (a w)^2), and |c| before
  std::vector<double> rounding;   // [m, out] of the product alone, which the library rounds before it adds c
};

Reference reference(const Product& p, const std::vector<double>& a, const std::vector<double>& w,
                    const std::vector<double>* before) {
  Reference right;
  right.c = before != nullptr ? *before : std::vector<double>(static_cast<size_t>(p.m * p.out));
  matmul_reference(p.m, p.out, p.in, a.data(), w.data(), right.c.data(),
                   before != nullptr ? Accumulate::kAdd : Accumulate::kOverwrite);
  std::vector<double> a2, w2;
  for (double x : a)
    a2.push_back(x * x);
  for (double x : w)
    w2.push_back(x * x);
  right.magnitude.resize(right.c.size());
  matmul_reference(p.m, p.out, p.in, a2.data(), w2.data(), right.magnitude.data());
  right.rounding.resize(right.c.size());
  for (size_t at = 0; before != nullptr && at < right.c.size(); ++at)
    right.rounding[at] = kBf16Unit * std::abs(right.c[at] - (*before)[at]);
  for (size_t at = 0; at < right.c.size(); ++at)
    right.magnitude[at] = std::sqrt(right.magnitude[at]) + (before != nullptr ? std::abs((*before)[at]) : 0);
  return right;
}

class DeviceMatmulTest : public GpuTest {};

// The tensor cores add in fp32 without rounding to nearest: one unit is 2^-23.
constexpr double kTensorCoreUnit = 0x1p-23;

TEST_F(DeviceMatmulTest, Bf16OverwritesAndAdds) {
  DeviceMatmul matmul(stream());
  for (const Product& p : kProducts) {
    SCOPED_TRACE(::testing::Message() << "m " << p.m << ", out " << p.out << ", in " << p.in);
    const auto a = normal_bf16(p.m * p.in, 1), w = normal_bf16(p.out * p.in, 2),
               before = normal_bf16(p.m * p.out, 3, 9);
    const auto before_wide = doubles(before);
    Guarded<BFloat16> da(p.m * p.in, stream()), dw(p.out * p.in, stream()), dc(p.m * p.out, stream());
    da.put(a), dw.put(w);
    for (Accumulate accumulate : {Accumulate::kOverwrite, Accumulate::kAdd}) {
      const bool add = accumulate == Accumulate::kAdd;
      const Reference right = reference(p, doubles(a), doubles(w), add ? &before_wide : nullptr);
      const auto run = [&] {
        dc.poison();  // NaN in what is only overwritten must not show
        if (add) dc.put(before);
        matmul.run(p.m, p.out, p.in, da.data(), dw.data(), dc.data(), accumulate);
        return dc.values();
      };
      const auto first = run();  // measures candidates on its way
      expect_near(first, right.c, kBf16Unit, [&](size_t at) {
        return right.rounding[at] + sum_error(p, kTensorCoreUnit, right.magnitude[at]);
      });
      expect_same_bits(run(), first);
      expect_same_bits(run(), first);
    }
  }
}

TEST_F(DeviceMatmulTest, Fp32ResultsOfAnyVocabulary) {
  DeviceMatmul matmul(stream());
  for (const Product& p :
       {Product{1, 8, 8}, Product{1, 5003, 576}, Product{5, 1001, 64}, Product{33, 4096, 576}}) {
    SCOPED_TRACE(::testing::Message() << "m " << p.m << ", out " << p.out << ", in " << p.in);
    const auto a = normal_bf16(p.m * p.in, 4), w = normal_bf16(p.out * p.in, 5);
    const Reference right = reference(p, doubles(a), doubles(w), nullptr);
    Guarded<BFloat16> da(p.m * p.in, stream()), dw(p.out * p.in, stream());
    Guarded<float> dc(p.m * p.out, stream());
    da.put(a), dw.put(w);
    matmul.run(p.m, p.out, p.in, da.data(), dw.data(), dc.data());
    const auto first = dc.values();
    expect_near(first, right.c, 0,
                [&](size_t at) { return sum_error(p, kTensorCoreUnit, right.magnitude[at]); });
    dc.poison();
    matmul.run(p.m, p.out, p.in, da.data(), dw.data(), dc.data());
    expect_same_bits(dc.values(), first);
  }
}

TEST_F(DeviceMatmulTest, OperandsThatBeginAtOddMultiplesOf16Bytes) {
  DeviceMatmul matmul(stream());
  const Product p{65, 192, 320};
  const auto a = normal_bf16(p.m * p.in + 8, 6), w = normal_bf16(p.out * p.in + 8, 7);
  Guarded<BFloat16> da(p.m * p.in + 8, stream()), dw(p.out * p.in + 8, stream()),
      dc(p.m * p.out + 8, stream());
  da.put(a), dw.put(w);
  matmul.run(p.m, p.out, p.in, da.data() + 8, dw.data() + 8, dc.data() + 8);
  const auto got = dc.values();
  const Reference right = reference(p, doubles(std::vector<BFloat16>(a.begin() + 8, a.end())),
                                    doubles(std::vector<BFloat16>(w.begin() + 8, w.end())), nullptr);
  expect_near(std::vector<BFloat16>(got.begin() + 8, got.end()), right.c, kBf16Unit,
              [&](size_t at) { return sum_error(p, kTensorCoreUnit, right.magnitude[at]); });
  for (size_t at = 0; at < 8; ++at)
    EXPECT_EQ(got[at].bits, 0xffff);
}

TEST_F(DeviceMatmulTest, InsideACapturedGraph) {
  DeviceMatmul matmul(stream(), int64_t{32} << 20);
  const Product p{1, 576, 1536};
  const auto a = normal_bf16(p.in, 8), w = normal_bf16(p.out * p.in, 9), before = normal_bf16(p.out, 10);
  const auto before_wide = doubles(before);
  Guarded<BFloat16> da(p.in, stream()), dw(p.out * p.in, stream()), dc(p.out, stream());
  da.put(a), dw.put(w), dc.put(before);
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  matmul.run(p.m, p.out, p.in, da.data(), dw.data(), dc.data(), Accumulate::kAdd);  // a shape not met before
  check_cuda(cudaStreamEndCapture(stream(), &graph), "ending a capture");
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  expect_same_bits(dc.values(), before);  // nothing ran yet
  check_cuda(cudaGraphLaunch(executable, stream()), "cudaGraphLaunch");
  const Reference right = reference(p, doubles(a), doubles(w), &before_wide);
  const auto once = [&](size_t at) {
    return right.rounding[at] + sum_error(p, kTensorCoreUnit, right.magnitude[at]);
  };
  expect_near(dc.values(), right.c, kBf16Unit, once);
  dc.put(before);
  matmul.run(p.m, p.out, p.in, da.data(), dw.data(), dc.data(), Accumulate::kAdd);  // now it may measure
  expect_near(dc.values(), right.c, kBf16Unit, once);
  check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST_F(DeviceMatmulTest, NoRowsAreNoWork) {
  DeviceMatmul matmul(stream());
  Guarded<BFloat16> x(64, stream()), c(64, stream());
  matmul.run(0, 8, 8, x.data(), x.data(), c.data());
  for (BFloat16 value : c.values())
    EXPECT_EQ(value.bits, 0xffff);
  EXPECT_THROW(matmul.run(1, 8, 12, x.data(), x.data(), c.data()), InvariantError);
  EXPECT_THROW(matmul.run(1, 8, 8, x.data() + 1, x.data(), c.data()), InvariantError);
}

// e4m3 rows as quantize_rows makes them (its own test judges it), dequantised on the host.
struct Quantised {
  Quantised(int64_t rows, int64_t width, const std::vector<BFloat16>& x, cudaStream_t stream)
      : values(rows * width, stream), scales(rows, stream), exact(x.size()) {
    Guarded<BFloat16> from(rows * width, stream);
    from.put(x);
    quantize_rows(stream, rows, width, from.data(), {values.data(), scales.data()});
    const auto codes = values.values();
    const auto host_scales = scales.values();
    for (size_t at = 0; at < exact.size(); ++at) {
      exact[at] =
          e4m3_value(codes[at].bits) * static_cast<double>(host_scales[at / static_cast<size_t>(width)]);
    }
  }
  ConstFp8Rows rows() { return {values.data(), scales.data()}; }
  Guarded<Fp8E4M3> values;
  Guarded<float> scales;
  std::vector<double> exact;
};

TEST_F(DeviceMatmulTest, Fp8WithAScaleARow) {
  DeviceMatmul matmul(stream());
  const DeviceInfo& info = device().info();
  for (const Product& p :
       {Product{1, 4096, 1024}, Product{16, 64, 64}, Product{129, 576, 192}, Product{7, 1536, 4096},
        Product{300, 1024, 512}, Product{1000, 192, 64}, Product{1, 4096, 14336}}) {
    SCOPED_TRACE(::testing::Message() << "m " << p.m << ", out " << p.out << ", in " << p.in);
    auto a = normal_bf16(p.m * p.in, 11), w = normal_bf16(p.out * p.in, 12, 0.02F);
    for (int64_t i = 0; i < p.m; ++i)  // scales that differ much from row to row
      for (int64_t c = 0; c < p.in; ++c) {
        BFloat16& x = a[static_cast<size_t>(i * p.in + c)];
        x = to_bfloat16(std::ldexp(to_float(x), static_cast<int>(i % 11) - 5));
      }
    for (int64_t o = 0; o < p.out; ++o)
      for (int64_t c = 0; c < p.in; ++c) {
        BFloat16& x = w[static_cast<size_t>(o * p.in + c)];
        x = to_bfloat16(std::ldexp(to_float(x), static_cast<int>(o % 7) - 3));
      }
    Quantised qa(p.m, p.in, a, stream()), qw(p.out, p.in, w, stream());
    Guarded<BFloat16> dc(p.m * p.out, stream());
    if (!info.is_hopper() && info.major < 10) {
      EXPECT_THROW(matmul.run(p.m, p.out, p.in, qa.rows(), qw.rows(), dc.data()), UserError);
      continue;
    }
    const auto before = normal_bf16(p.m * p.out, 13);
    const auto before_wide = doubles(before);
    const auto bias = normal_bf16(p.out, 14, 3), other_bias = normal_bf16(p.out, 15, 3);
    Guarded<BFloat16> d_bias(p.out, stream()), d_other_bias(p.out, stream());
    d_bias.put(bias), d_other_bias.put(other_bias);
    for (Accumulate accumulate : {Accumulate::kOverwrite, Accumulate::kAdd}) {
      const bool add = accumulate == Accumulate::kAdd;
      const Reference plain = reference(p, qa.exact, qw.exact, add ? &before_wide : nullptr);
      const auto run = [&](const BFloat16* with) {
        dc.poison();
        if (add) dc.put(before);
        matmul.run(p.m, p.out, p.in, qa.rows(), qw.rows(), dc.data(), accumulate, with);
        return dc.values();
      };
      const auto judge = [&](const std::vector<BFloat16>& got, const std::vector<BFloat16>& with) {
        Reference right = plain;
        for (size_t at = 0; at < right.c.size() && !with.empty(); ++at) {
          const double added = to_float(with[at % with.size()]);
          right.c[at] += added;
          right.magnitude[at] += std::abs(added);
          right.rounding[at] = kBf16Unit * (std::abs(plain.c[at]) + std::abs(right.c[at]) +
                                            (add ? std::abs(before_wide[at]) : 0));
        }
        // Fast accumulation cuts every product to 13 bits below the running sum's first.
        expect_near(got, right.c, kBf16Unit, [&](size_t at) {
          return right.rounding[at] + sum_error(p, 0x1p-13, right.magnitude[at]);
        });
      };
      const auto first = run(nullptr);
      judge(first, {});
      const auto biased = run(d_bias.data());
      judge(biased, bias);
      judge(run(d_other_bias.data()), other_bias);  // with the same plan
      expect_same_bits(run(d_bias.data()), biased);
      expect_same_bits(run(nullptr), first);
    }
  }
}

struct HostInt8 {
  std::vector<int8_t> values;
  std::vector<float> scales;
};

// From -127 to 127; with `far` all 127, for the largest sums.
HostInt8 random_int8(int64_t rows, int64_t width, uint32_t seed, bool far = false) {
  HostInt8 made;
  std::mt19937 random(seed);
  for (int64_t at = 0; at < rows * width; ++at) {
    made.values.push_back(static_cast<int8_t>(far ? 127 : static_cast<int>(random() % 255) - 127));
  }
  for (int64_t i = 0; i < rows; ++i)
    made.scales.push_back(std::ldexp(static_cast<float>(random() % 1000 + 1), static_cast<int>(i % 11) - 20));
  return made;
}

// Sums are exact and everything after them is defined, so every bit is known.
void expect_exact_int8(DeviceMatmul& matmul, const Product& p, cudaStream_t stream, bool far = false) {
  SCOPED_TRACE(::testing::Message() << "m " << p.m << ", out " << p.out << ", in " << p.in);
  const HostInt8 a = random_int8(p.m, p.in, 31, far), w = random_int8(p.out, p.in, 32, far);
  const auto before = normal_bf16(p.m * p.out, 33, 1e-2F);
  std::vector<BFloat16> right[2];
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t o = 0; o < p.out; ++o) {
      int64_t sum = 0;
      for (int64_t k = 0; k < p.in; ++k)
        sum += a.values[static_cast<size_t>(i * p.in + k)] * w.values[static_cast<size_t>(o * p.in + k)];
      const float scale = a.scales[static_cast<size_t>(i)] * w.scales[static_cast<size_t>(o)];
      const float value = static_cast<float>(sum) * scale;
      right[0].push_back(to_bfloat16(value));
      right[1].push_back(
          to_bfloat16(to_float(right[0].back()) + to_float(before[static_cast<size_t>(i * p.out + o)])));
    }
  }
  Guarded<int8_t> da(p.m * p.in, stream), dw(p.out * p.in, stream);
  Guarded<float> a_scales(p.m, stream), w_scales(p.out, stream);
  Guarded<BFloat16> dc(p.m * p.out, stream);
  da.put(a.values), dw.put(w.values), a_scales.put(a.scales), w_scales.put(w.scales);
  const ConstInt8Rows rows{da.data(), a_scales.data()}, weights{dw.data(), w_scales.data()};
  for (int run = 0; run < 2; ++run) {
    dc.poison();
    matmul.run(p.m, p.out, p.in, rows, weights, dc.data());
    expect_same_bits(dc.values(), right[0]);
    dc.put(before);
    matmul.run(p.m, p.out, p.in, rows, weights, dc.data(), Accumulate::kAdd);
    expect_same_bits(dc.values(), right[1]);
  }
}

class Int8Products : public DeviceMatmulTest {
 protected:
  void SetUp() override {
    DeviceMatmulTest::SetUp();
    if (IsSkipped() || device().info().is_hopper()) return;
    Guarded<int8_t> values(64 * 64, stream());
    Guarded<float> scales(64, stream());
    Guarded<BFloat16> c(64 * 64, stream());
    const ConstInt8Rows rows{values.data(), scales.data()};
    EXPECT_THROW(DeviceMatmul(stream()).run(64, 64, 64, rows, rows, c.data()), UserError);
    GTEST_SKIP() << "int8 products are made for compute capability 9.0";
  }
};

TEST_F(Int8Products, OfNoRowsAreNoWork) {
  DeviceMatmul matmul(stream());
  Guarded<int8_t> values(64, stream());
  Guarded<float> scales(8, stream());
  Guarded<BFloat16> c(64, stream());
  const ConstInt8Rows rows{values.data(), scales.data()};
  matmul.run(0, 8, 64, rows, rows, c.data());
  for (BFloat16 value : c.values())
    EXPECT_EQ(value.bits, 0xffff);
  EXPECT_THROW(matmul.run(1, 8, 96, rows, rows, c.data()), InvariantError);
  EXPECT_THROW(matmul.run(1, 8, kLongestInt8Sum + 64, rows, rows, c.data()), InvariantError);
}

// Of each kind of tile: narrow ones for few rows, wide ones where they occupy the GPU.
TEST_F(Int8Products, AreExactWhenSmall) {  // compute-sanitizer's too
  DeviceMatmul matmul(stream());
  for (const Product& p :
       {Product{1, 8, 64}, Product{16, 72, 64}, Product{64, 64, 64}, Product{65, 40, 128},
        Product{127, 72, 192}, Product{129, 264, 192}, Product{257, 320, 576}, Product{700, 2824, 192}})
    expect_exact_int8(matmul, p, stream());
}

TEST_F(Int8Products, AreExactWhenLarge) {
  DeviceMatmul matmul(stream());
  for (const Product& p :
       {Product{1, 4096, 1024}, Product{128, 576, 576}, Product{7, 1536, 4096}, Product{63, 8200, 2112},
        Product{300, 1024, 512}, Product{1000, 192, 64}, Product{1300, 1800, 704}, Product{4500, 1544, 320}})
    expect_exact_int8(matmul, p, stream());
  // Several tiles a block and one stage each: a tile is ready while the copy engine still reads the last one.
  for (const Product& p : {Product{64, 33792, 64}, Product{1024, 2048, 64}, Product{2048, 8448, 64}})
    expect_exact_int8(matmul, p, stream());
  expect_exact_int8(matmul, {1, 8, 133120}, stream(), true);  // sums just below 2^31
  expect_exact_int8(matmul, {130, 16, 133120}, stream(), true);
}

}  // namespace
}  // namespace longhalo::testing
