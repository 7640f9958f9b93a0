// The gradients of RMSNorm, SwiGLU, embedding, rotary embedding and landmark pooling on the GPU, each against
// its definition in fp64; results that are added into start from random numbers.
#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/embedding/embedding.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/landmark_pool/rotate_and_pool.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo::testing {
namespace {

class RowGradientsGpu : public GpuTest {};

struct RowShape {
  int64_t n, width;
};

template <class T>
std::vector<double> sum(const std::vector<T>& a, const std::vector<double>& b) {
  std::vector<double> sum = doubles(a);
  for (size_t at = 0; at < sum.size(); ++at)
    sum[at] += b[at];
  return sum;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& right) {
  double error = 0, size = 0;
  for (size_t at = 0; at < got.size(); ++at) {
    error += std::pow(got[at] - right[at], 2);
    size += std::pow(right[at], 2);
  }
  return std::sqrt(error / size);  // NaN, and so a failure, where there is nothing to be relative to
}

TEST_F(RowGradientsGpu, Rmsnorm) {
  for (const RowShape& shape :
       {RowShape{1, 8}, RowShape{131, 24}, RowShape{7, 576}, RowShape{33, 1032}, RowShape{129, 4096},
        RowShape{9, 5120}, RowShape{3, 16384}, RowShape{3000, 64}, RowShape{1500, 1536}}) {
    const int64_t n = shape.n, width = shape.width;
    SCOPED_TRACE(::testing::Message() << "n " << n << ", width " << width);
    const auto x = normal_bf16(n * width, 1, 3), d_out = normal_bf16(n * width, 2),
               dx_before = normal_bf16(n * width, 3);
    const auto weight = normal_floats(width, 4), dw_before = normal_floats(width, 5);
    std::vector<double> dx(x.size()), dw(weight.size());
    const auto wide_x = doubles(x), wide_d = doubles(d_out), wide_w = doubles(weight);
    rmsnorm_backward_reference(n, width, wide_x.data(), wide_w.data(), 1e-5, wide_d.data(), dx.data(),
                               dw.data());
    // Sums over a row: a thread adds at most 32 numbers (each a rounded product), then 5 steps in a warp and
    // 16 warps. The two terms of dx, and those of d_weight, carry what that costs and some roundings.
    const double row_sum = (32 + 5 + 16 + 12) * kFp32Unit;
    std::vector<double> dx_size(x.size()), dw_size(weight.size());
    for (int64_t i = 0; i < n; ++i) {
      double squares = 0, products = 0;
      for (int64_t c = 0; c < width; ++c) {
        const auto at = static_cast<size_t>(i * width + c);
        squares += wide_x[at] * wide_x[at];
        products += std::abs(wide_x[at] * wide_w[static_cast<size_t>(c)] * wide_d[at]);
      }
      const auto count = static_cast<double>(width);
      const double r = 1 / std::sqrt(squares / count + 1e-5);
      for (int64_t c = 0; c < width; ++c) {
        const auto at = static_cast<size_t>(i * width + c), column = static_cast<size_t>(c);
        dx_size[at] =
            r * (std::abs(wide_w[column] * wide_d[at]) + std::abs(wide_x[at]) * r * r * products / count);
        dw_size[column] += std::abs(wide_x[at] * r * wide_d[at]);
      }
    }
    Guarded<BFloat16> in(n * width, stream()), d(n * width, stream()), there_dx(n * width, stream());
    Guarded<float> w(width, stream()), there_dw(width, stream());
    Guarded<uint8_t> workspace(rmsnorm_backward_workspace(n, width), stream());
    in.put(x), d.put(d_out), w.put(weight);
    const auto run = [&] {
      there_dx.put(dx_before), there_dw.put(dw_before);
      workspace.poison();
      rmsnorm_backward(stream(), n, width, in.data(), w.data(), 1e-5F, d.data(), there_dx.data(),
                       there_dw.data(), workspace.data());
      workspace.values();
      return std::pair{there_dx.values(), there_dw.values()};
    };
    const auto [got_dx, got_dw] = run();
    expect_near(got_dx, sum(dx_before, dx), kBf16Unit,
                [&](size_t at) { return 3 * row_sum * dx_size[at] + 2 * kFp32Unit; });
    // A part of the rows is n / 1024 of them, or up to 4 n / 1024.
    const double rows = static_cast<double>(n) / 256 + 1;
    expect_near(got_dw, sum(dw_before, dw), kFp32Unit, [&](size_t at) {
      return (row_sum + (rows + 4) * kFp32Unit) * dw_size[at] +
             kFp32Unit * std::abs(static_cast<double>(dw_before[at]));
    });
    const auto [again_dx, again_dw] = run();
    expect_same_bits(again_dx, got_dx);
    expect_same_bits(again_dw, got_dw);
  }
}

TEST_F(RowGradientsGpu, Swiglu) {
  for (const RowShape& shape : {RowShape{1, 8}, RowShape{33, 1536}, RowShape{5, 14336}, RowShape{257, 200}}) {
    const int64_t n = shape.n, ffn = shape.width;
    SCOPED_TRACE(::testing::Message() << "n " << n << ", F " << ffn);
    auto gate_up = normal_bf16(n * 2 * ffn, 1, 4);
    if (ffn > 100)
      gate_up[0] = to_bfloat16(-200), gate_up[1] = to_bfloat16(200);  // exp overflows, underflows
    const auto d_out = normal_bf16(n * ffn, 2);
    std::vector<double> right(gate_up.size()), out(d_out.size());
    const auto wide = doubles(gate_up), wide_d = doubles(d_out);
    swiglu_backward_reference(n, ffn, wide.data(), wide_d.data(), right.data());
    swiglu_reference(n, ffn, wide.data(), out.data());
    Guarded<BFloat16> in(n * 2 * ffn, stream()), d(n * ffn, stream()), d_in(n * 2 * ffn, stream()),
        there_out(n * ffn, stream());
    in.put(gate_up), d.put(d_out);
    swiglu_backward(stream(), n, ffn, in.data(), d.data(), d_in.data(), there_out.data());
    const auto got = d_in.values(), got_out = there_out.values();
    // exp(x) errs by 2 units and by those of x * log2(e), which is rounded: |x| units, relative. The gate's
    // gradient is a sum of two terms of d up s.
    const auto exponential = [&](size_t at) { return (std::abs(wide[at]) + 16) * kFp32Unit; };
    expect_near(got, right, kBf16Unit, [&](size_t at) {
      const auto column = static_cast<int64_t>(at) % (2 * ffn), row = static_cast<int64_t>(at) / (2 * ffn);
      const size_t gate = column < ffn ? at : at - static_cast<size_t>(ffn), up = gate + size_t(ffn);
      const double s = 1 / (1 + std::exp(-wide[gate])), silu = std::abs(wide[gate]) * s;
      const double size = column < ffn ? std::abs(wide[up]) * (s + silu * (1 - s)) : silu;
      return 2 * exponential(gate) * size * std::abs(wide_d[static_cast<size_t>(row * ffn + column % ffn)]) +
             0x1p-126;
    });
    expect_near(got_out, out, kBf16Unit, [&](size_t at) {
      const auto row = static_cast<int64_t>(at) / ffn, column = static_cast<int64_t>(at) % ffn;
      return exponential(static_cast<size_t>(row * 2 * ffn + column)) * std::abs(out[at]) + 0x1p-126;
    });
    swiglu_backward(stream(), n, ffn, in.data(), d.data(), in.data(), nullptr);  // in place
    expect_same_bits(in.values(), got);
  }
}

TEST_F(RowGradientsGpu, RotaryTurnsBack) {
  constexpr int64_t kTokens = 37, kHeads = 6, kDim = 128, kRow = kHeads * kDim + 8, kFirst = 9'999'937;
  const auto before = normal_bf16(kTokens * kRow, 1);
  const auto frequencies = rotary_frequencies(kDim, 500'000);
  const auto wide = doubles(before);
  std::vector<double> right = wide;
  for (int64_t i = 0; i < kTokens; ++i)
    rotary_reference(1, kHeads, kDim, frequencies, static_cast<double>(kFirst + i), 1,
                     right.data() + i * kRow, RotaryDirection::kBackward);
  Guarded<BFloat16> x(kTokens * kRow, stream());
  const auto there = to_device<double>(frequencies, "frequencies", stream());
  x.put(before);
  rotary(stream(), kTokens, kHeads, kDim, there.data(), static_cast<double>(kFirst), 1, x.data(), kRow,
         nullptr, RotaryDirection::kBackward);
  expect_near(x.values(), right, kBf16Unit, [&](size_t at) {  // as in rotary_gpu_test.cpp
    const auto column = static_cast<int64_t>(at) % kRow;
    if (column >= kHeads * kDim) return -kBf16Unit * std::abs(right[at]);
    const size_t other = column % kDim < kDim / 2 ? at + kDim / 2 : at - kDim / 2;
    return (0x1p-22 + 8 * kFp32Unit) * (std::abs(wide[at]) + std::abs(wide[other]));
  });
}

// Tokens of a natural spread, one that stands in most places, none at all, and more than one stretch.
TEST_F(RowGradientsGpu, Embedding) {
  for (const RowShape& shape : {RowShape{1, 8}, RowShape{255, 64}, RowShape{256, 64}, RowShape{257, 72},
                                RowShape{2000, 1032}, RowShape{5000, 24}}) {
    for (int64_t vocabulary : {1, 2, 300, 50'000}) {
      const int64_t n = shape.n, hidden = shape.width;
      SCOPED_TRACE(::testing::Message() << "n " << n << ", D " << hidden << ", V " << vocabulary);
      std::mt19937 random(static_cast<unsigned>(n + vocabulary));
      std::vector<int32_t> tokens;
      for (int64_t i = 0; i < n; ++i)
        tokens.push_back(static_cast<int32_t>(i % 3 == 0 ? vocabulary / 2 : int64_t(random()) % vocabulary));
      const int64_t rows = std::min<int64_t>(vocabulary, 50'000 / hidden);  // a table of a fitting size
      for (int32_t& token : tokens)
        token = static_cast<int32_t>(token % rows);
      const auto dx = normal_bf16(n * hidden, 1);
      const auto before = normal_floats(rows * hidden, 2);
      std::vector<double> right = doubles(before), size(right.size()), counts(right.size());
      for (size_t at = 0; at < right.size(); ++at)
        size[at] = std::abs(right[at]);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < hidden; ++c) {
          const auto to = static_cast<size_t>(tokens[static_cast<size_t>(i)] * hidden + c);
          const auto x = static_cast<double>(to_float(dx[static_cast<size_t>(i * hidden + c)]));
          right[to] += x, size[to] += std::abs(x), counts[to] += 1;
        }
      }
      Guarded<int32_t> there_tokens(n, stream());
      Guarded<BFloat16> there_dx(n * hidden, stream());
      Guarded<float> table(rows * hidden, stream());
      Guarded<uint8_t> workspace(embedding_backward_workspace(n, hidden), stream());
      there_tokens.put(tokens), there_dx.put(dx);
      const auto run = [&] {
        table.put(before);
        workspace.poison();
        embedding_backward(stream(), n, hidden, rows, there_tokens.data(), there_dx.data(), table.data(),
                           workspace.data());
        workspace.values();
        return table.values();
      };
      const auto got = run();
      expect_near(got, right, 0, [&](size_t at) {  // 256 rows at a time, then their sums
        return (std::min(counts[at], 256.0) + counts[at] / 256 + 2) * kFp32Unit * size[at];
      });
      for (size_t at = 0; at < got.size(); ++at)
        ASSERT_TRUE(counts[at] > 0 || got[at] == before[at]) << at;
      expect_same_bits(run(), got);
    }
  }
}

struct PoolCase {
  int64_t n, first_token, kv_heads, head_dim;
  std::vector<int64_t> strides;
  bool learned;
};

// Forward on the GPU, then back, against pooling's and the rotary embedding's gradients in fp64.
TEST_F(RowGradientsGpu, RotateAndPool) {
  for (const PoolCase& c :
       {PoolCase{1, 0, 1, 64, {}, false}, PoolCase{100, 300, 3, 128, {}, true},
        PoolCase{33, 0, 1, 16, {8}, true}, PoolCase{700, 1024, 8, 128, {64}, true},
        PoolCase{700, 1024, 8, 128, {64}, false}, PoolCase{5, 2048, 2, 64, {8, 2048}, true},
        PoolCase{1000, 9'999'360, 3, 64, {16, 128, 320}, true}, PoolCase{600, 0, 40, 32, {100}, true},
        PoolCase{300, 0, 2, 256, {2, 4, 16, 300}, true}}) {
    SCOPED_TRACE(::testing::Message() << "n " << c.n << " from " << c.first_token << ", H_kv " << c.kv_heads
                                      << ", d " << c.head_dim << ", bands " << c.strides.size());
    const int64_t width = c.kv_heads * c.head_dim;
    const auto kv = normal_bf16(c.n * 2 * width, 1);
    const auto d_rotated = normal_floats(c.n * 2 * width, 2);
    const auto frequencies = rotary_frequencies(c.head_dim, 10'000);
    const auto there_frequencies = to_device<double>(frequencies, "frequencies", stream());
    const auto parts = [&](const std::vector<double>& rows, int64_t which) {
      std::vector<double> part;
      for (size_t row = 0; row < rows.size() / static_cast<size_t>(2 * width); ++row) {
        const auto begin = rows.begin() + static_cast<int64_t>(row) * 2 * width + which * width;
        part.insert(part.end(), begin, begin + width);
      }
      return part;
    };
    std::vector<double> dk = parts(doubles(d_rotated), 0), dv = parts(doubles(d_rotated), 1);
    const auto k = parts(doubles(kv), 0), v = parts(doubles(kv), 1);
    const auto back = [&](int64_t n, double first, double step, std::vector<double>& x) {
      rotary_reference(n, c.kv_heads, c.head_dim, frequencies, first, step, x.data(),
                       RotaryDirection::kBackward);
    };
    back(c.n, static_cast<double>(c.first_token), 1, dk);

    Guarded<BFloat16> there_kv(c.n * 2 * width, stream()), d_kv(c.n * 2 * width, stream());
    Guarded<float> there_d(c.n * 2 * width, stream());
    there_kv.put(kv), there_d.put(d_rotated);
    struct DeviceBand {
      Guarded<BFloat16> landmarks;
      Guarded<float> open, lse, d_landmarks, d_u, u;
      std::vector<float> d_before, d_u_before;
      std::vector<double> d_u_right;
    };
    std::vector<std::unique_ptr<DeviceBand>> bands;
    std::vector<PoolTarget> targets;
    std::vector<PoolGradient> gradients;
    for (size_t b = 0; b < c.strides.size(); ++b) {
      const int64_t stride = c.strides[b], rows = c.n / stride;
      bands.push_back(std::unique_ptr<DeviceBand>(
          new DeviceBand{Guarded<BFloat16>(rows * 2 * width, stream()),
                         Guarded<float>(pool_state_floats(c.kv_heads, c.head_dim), stream()),
                         Guarded<float>(rows * c.kv_heads, stream()),
                         Guarded<float>(rows * 2 * width, stream()),
                         Guarded<float>(width, stream()),
                         Guarded<float>(width, stream()),
                         normal_floats(rows * 2 * width, static_cast<unsigned>(10 + b), 3),
                         normal_floats(width, 20),
                         {}}));
      DeviceBand& band = *bands.back();
      const auto u = normal_floats(width, static_cast<unsigned>(30 + b));
      band.u.put(u);
      std::vector<double> d_kbar = parts(doubles(band.d_before), 0);
      const std::vector<double> d_vbar = parts(doubles(band.d_before), 1);
      back(rows, static_cast<double>(c.first_token) + static_cast<double>(stride - 1) / 2,
           static_cast<double>(stride), d_kbar);
      band.d_u_right.resize(static_cast<size_t>(width));
      landmark_pool_backward_reference(
          c.n, c.kv_heads, c.head_dim, stride, c.learned ? doubles(u).data() : nullptr, k.data(), v.data(),
          d_kbar.data(), d_vbar.data(), dk.data(), dv.data(), band.d_u_right.data());
      const float* there_u = c.learned ? band.u.data() : nullptr;
      targets.push_back({stride, there_u, band.landmarks.data(), c.first_token / stride, band.open.data(),
                         band.lse.data()});
      gradients.push_back({stride, there_u, band.landmarks.data(), band.lse.data(), band.d_landmarks.data(),
                           band.d_u.data()});
    }
    const RotateAndPool keys{c.kv_heads, c.head_dim, there_frequencies.data(), targets};
    Guarded<uint8_t> pool_workspace(rotate_and_pool_workspace(keys, c.n), stream());
    rotate_and_pool(stream(), keys, c.n, c.first_token, there_kv.data(), pool_workspace.data());
    const RotateAndPoolBackward back_keys{c.kv_heads, c.head_dim, there_frequencies.data(), gradients};
    Guarded<uint8_t> workspace(rotate_and_pool_backward_workspace(back_keys, c.n), stream());
    const auto run = [&] {
      for (const auto& band : bands)
        band->d_landmarks.put(band->d_before), band->d_u.put(band->d_u_before);
      workspace.poison(), d_kv.poison();
      rotate_and_pool_backward(stream(), back_keys, c.n, c.first_token, there_kv.data(), there_d.data(),
                               d_kv.data(), workspace.data());
      workspace.values();
      return d_kv.values();
    };
    const auto got = run();
    // Rounding of the result, of k that was turned and back, and of the landmarks, each within 2^-9 or so.
    EXPECT_LE(relative_error(parts(doubles(got), 0), dk), 1e-2);
    EXPECT_LE(relative_error(parts(doubles(got), 1), dv), 1e-2);
    for (const auto& band : bands) {
      const auto d_u = band->d_u.values();
      band->lse.values(), band->d_landmarks.values();
      double error = 0, size = 0;
      for (size_t at = 0; at < d_u.size(); ++at) {
        error += std::pow(
            static_cast<double>(d_u[at]) - static_cast<double>(band->d_u_before[at]) - band->d_u_right[at],
            2);
        size += std::pow(band->d_u_right[at], 2);
      }
      EXPECT_LE(std::sqrt(error), 1e-2 * std::sqrt(size));
    }
    if (!c.learned || c.strides.empty()) {  // then nothing but the result is rounded to bf16
      std::vector<double> right;
      for (int64_t i = 0; i < c.n; ++i)
        for (const auto* x : {&dk, &dv})
          right.insert(right.end(), x->begin() + i * width, x->begin() + (i + 1) * width);
      // A term of size 3 or so for each band and the turn of both; a = exp(-lse) carries lse's rounding.
      expect_near(got, right, kBf16Unit, [](size_t) { return 32 * (0x1p-22 + 16 * kFp32Unit); });
    }
    expect_same_bits(run(), got);
  }
}

}  // namespace
}  // namespace longhalo::testing
