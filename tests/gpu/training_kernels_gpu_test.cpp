// The loss, the optimizer's step, norms, sums and conversions on the GPU against fp64.
#include <bit>
#include <limits>

#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/adamw/adamw_step.hpp"
#include "kernels/common/add_parts.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/elementwise/elementwise.hpp"

namespace longhalo::testing {
namespace {

class TrainingKernelsGpu : public GpuTest {};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Loss {
  std::vector<BFloat16> d_logits;
  double loss = 0, z_loss = 0;
};

Loss run_loss(cudaStream_t stream, int64_t n, int64_t vocabulary, const std::vector<float>& logits,
              const std::vector<int32_t>& labels, float z_loss, float scale, bool gradient = true) {
  const int64_t stride = (vocabulary + 7) / 8 * 8;
  Guarded<float> there(n * vocabulary, stream);
  Guarded<int32_t> there_labels(n, stream);
  Guarded<BFloat16> d(n * stride, stream);
  Guarded<double> sums(2, stream);
  Guarded<uint8_t> workspace(8 * n, stream);
  there.put(logits), there_labels.put(labels), sums.put(std::vector<double>{1, 2});  // added into
  cross_entropy_rows(stream, n, vocabulary, there.data(), there_labels.data(), z_loss, scale,
                     gradient ? d.data() : nullptr, stride, reinterpret_cast<DeviceLossSums*>(sums.data()),
                     workspace.data());
  workspace.values();
  const std::vector<double> after = sums.values();
  return {d.values(), after[0] - 1, after[1] - 2};
}

TEST_F(TrainingKernelsGpu, CrossEntropyOfATile) {
  for (int64_t vocabulary : {1, 7, 8, 259, 4096, 8193, 49'152}) {
    for (float shift : {0.0F, -300.0F, 80.0F}) {  // all logits far below 0, or above
      const int64_t n = 23, stride = (vocabulary + 7) / 8 * 8;
      SCOPED_TRACE(::testing::Message() << "V " << vocabulary << ", logits about " << shift);
      std::vector<float> logits = normal_floats(n * vocabulary, 3, 4);
      for (float& x : logits)
        x += shift;
      std::vector<int32_t> labels;
      for (int64_t i = 0; i < n; ++i)
        labels.push_back(i % 5 == 2 ? kIgnoredLabel : static_cast<int32_t>(i * 7919 % vocabulary));
      const double z = 1e-3, scale = 0.37;
      std::vector<double> right(static_cast<size_t>(n * stride)), size(right.size());
      double loss = 0, z_loss = 0, largest = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (labels[static_cast<size_t>(i)] == kIgnoredLabel) continue;
        const float* row = logits.data() + i * vocabulary;
        double top = row[0], sum = 0;
        for (int64_t c = 0; c < vocabulary; ++c)
          top = std::max(top, static_cast<double>(row[c]));
        for (int64_t c = 0; c < vocabulary; ++c)
          sum += std::exp(static_cast<double>(row[c]) - top);
        const double lse = top + std::log(sum);
        loss += lse - static_cast<double>(row[labels[static_cast<size_t>(i)]]);
        z_loss += z * lse * lse;
        largest = std::max(largest, std::abs(lse));
        for (int64_t c = 0; c < vocabulary; ++c) {
          const auto at = static_cast<size_t>(i * stride + c);
          const double weight = scale * (1 + 2 * z * lse);
          const double p = weight * std::exp(static_cast<double>(row[c]) - lse);
          right[at] = p - (c == labels[static_cast<size_t>(i)] ? scale : 0);
          // exp errs by 2 units and those of its argument, which carries the rounding of lse; the label's
          // difference of two such.
          size[at] = (std::abs(static_cast<double>(row[c]) - lse) + 2 * std::abs(lse) + 48) * std::abs(p) +
                     (c == labels[static_cast<size_t>(i)] ? 2 * scale : 0);
        }
      }
      const auto first = run_loss(stream(), n, vocabulary, logits, labels, 1e-3F, 0.37F);
      expect_near(first.d_logits, right, kBf16Unit, [&](size_t at) { return kFp32Unit * size[at]; });
      for (int64_t i = 0; i < n; ++i)
        for (int64_t c = vocabulary; c < stride; ++c)
          ASSERT_EQ(first.d_logits[static_cast<size_t>(i * stride + c)].bits, 0);
      // A sum of V exponentials of 12 spreads goes through at most V / 4096 + 30 additions of a thread and
      // between threads, each with an exponential.
      const double sums = (static_cast<double>(vocabulary) / 512 + 200 + 2 * largest) * kFp32Unit;
      EXPECT_NEAR(first.loss, loss, static_cast<double>(n) * (sums + 40 * kFp32Unit));
      EXPECT_NEAR(first.z_loss, z_loss,
                  static_cast<double>(n) * z * 2 * largest * sums + 4 * kFp32Unit * z_loss);
      const auto second = run_loss(stream(), n, vocabulary, logits, labels, 1e-3F, 0.37F);
      expect_same_bits(second.d_logits, first.d_logits);
      EXPECT_EQ(second.loss, first.loss);
      const auto alone = run_loss(stream(), n, vocabulary, logits, labels, 1e-3F, 0.37F, false);
      EXPECT_EQ(alone.loss, first.loss);
      EXPECT_EQ(alone.z_loss, first.z_loss);
    }
  }
}

TEST_F(TrainingKernelsGpu, CrossEntropyOfWhatIsNotFiniteIsNotFinite) {
  const int64_t n = 3, vocabulary = 1000;
  for (float bad : {kNan, kInfinity}) {
    for (int64_t place : {0, 517, 999}) {
      std::vector<float> logits = normal_floats(n * vocabulary, 3);
      logits[static_cast<size_t>(vocabulary + place)] = bad;
      EXPECT_FALSE(std::isfinite(run_loss(stream(), n, vocabulary, logits, {1, 2, 3}, 0, 1).loss));
      EXPECT_TRUE(std::isfinite(run_loss(stream(), n, vocabulary, logits, {1, kIgnoredLabel, 3}, 0, 1).loss));
    }
  }
}

TEST_F(TrainingKernelsGpu, AdamWStep) {
  for (int64_t n : {0, 1, 3, 4, 5, 1023, 4096, 100'001}) {
    for (int64_t offset : {0, 1}) {  // elements from an aligned place
      SCOPED_TRACE(::testing::Message() << "n " << n << ", offset " << offset);
      const auto g = normal_floats(n, 1), w = normal_floats(n, 2), m = normal_floats(n, 3);
      auto v = normal_floats(n, 4);
      for (float& x : v)
        x = x * x;
      const auto shifted = [&](const std::vector<float>& x) {
        std::vector<float> all(static_cast<size_t>(offset), 0.5F);
        all.insert(all.end(), x.begin(), x.end());
        return all;
      };
      Guarded<float> there_g(n + offset, stream()), there_w(n + offset, stream()),
          there_m(n + offset, stream()), there_v(n + offset, stream());
      Guarded<BFloat16> rounded(n + offset, stream());
      there_g.put(shifted(g)), there_w.put(shifted(w)), there_m.put(shifted(m)), there_v.put(shifted(v));
      AdamWStep step;
      step.learning_rate = 0.01, step.weight_decay = 0.1, step.step = 3, step.gradient_scale = 0.25;
      adamw_step(stream(), step, n, there_g.data() + offset, there_w.data() + offset, there_m.data() + offset,
                 there_v.data() + offset, rounded.data() + offset);
      const auto got_w = there_w.values(), got_m = there_m.values(), got_v = there_v.values();
      const auto got_rounded = rounded.values();
      for (int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<size_t>(i), there = static_cast<size_t>(i + offset);
        const double gradient = 0.25 * static_cast<double>(g[at]);
        const double new_m = 0.9 * static_cast<double>(m[at]) + 0.1 * gradient;
        const double new_v = 0.95 * static_cast<double>(v[at]) + 0.05 * gradient * gradient;
        const double along = new_m / (1 - std::pow(0.9, 3));
        const double size = std::sqrt(new_v / (1 - std::pow(0.95, 3))) + 1e-8;
        const double right =
            static_cast<double>(w[at]) - 0.01 * (along / size + 0.1 * static_cast<double>(w[at]));
        const double m_error = 8 * kFp32Unit * (std::abs(static_cast<double>(m[at])) + std::abs(gradient));
        ASSERT_NEAR(got_m[there], new_m, m_error);
        ASSERT_NEAR(got_v[there], new_v, 8 * kFp32Unit * new_v);
        ASSERT_NEAR(got_w[there], right,
                    4 * kFp32Unit * std::abs(static_cast<double>(w[at])) +
                        0.01 * (m_error / 0.2 / size + 16 * kFp32Unit * std::abs(along / size)));
        ASSERT_EQ(got_rounded[there].bits, to_bfloat16(got_w[there]).bits);
      }
    }
  }
}

TEST_F(TrainingKernelsGpu, SumsScalesAndConversions) {
  for (int64_t n : {0, 1, 7, 8, 9, 2048, 2049, 100'003}) {
    SCOPED_TRACE(::testing::Message() << "n " << n);
    const auto x = normal_floats(n, 1), y = normal_floats(n, 2);
    const auto b = normal_bf16(n, 3), c = normal_bf16(n, 4);
    Guarded<float> there_x(n, stream()), there_y(n, stream());
    Guarded<BFloat16> there_b(n, stream()), there_c(n, stream());
    there_x.put(x), there_b.put(b);
    const auto expect = [&](const auto& got, const auto& right) {
      ASSERT_EQ(got.size(), static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i)
        ASSERT_EQ(got[static_cast<size_t>(i)], right(static_cast<size_t>(i))) << i;
    };
    const auto wide = [](const std::vector<BFloat16>& from) {
      std::vector<float> floats;
      for (BFloat16 value : from)
        floats.push_back(to_float(value));
      return floats;
    };
    convert(stream(), n, there_x.data(), there_c.data());
    expect(wide(there_c.values()), [&](size_t i) { return to_float(to_bfloat16(x[i])); });
    convert(stream(), n, there_b.data(), there_y.data());
    expect(there_y.values(), [&](size_t i) { return to_float(b[i]); });
    there_y.put(y);
    add(stream(), n, there_x.data(), there_y.data());
    expect(there_y.values(), [&](size_t i) { return y[i] + x[i]; });
    there_y.put(y);
    add(stream(), n, there_b.data(), there_y.data());
    expect(there_y.values(), [&](size_t i) { return y[i] + to_float(b[i]); });
    there_c.put(c);
    add(stream(), n, there_b.data(), there_c.data());
    expect(wide(there_c.values()),
           [&](size_t i) { return to_float(to_bfloat16(to_float(c[i]) + to_float(b[i]))); });
    there_y.put(y);
    scale(stream(), n, 0.3F, there_y.data());
    expect(there_y.values(), [&](size_t i) { return y[i] * 0.3F; });
  }
}

TEST_F(TrainingKernelsGpu, ARowAddedToEachRow) {
  for (const auto& [n, width] : {std::pair<int64_t, int64_t>{0, 8}, {1, 8}, {3, 16}, {257, 72}, {5, 4096}}) {
    SCOPED_TRACE(::testing::Message() << n << " rows of " << width);
    const auto row = normal_bf16(width, 1), rows = normal_bf16(n * width, 2);
    Guarded<BFloat16> there_row(width, stream()), there(n * width, stream());
    there_row.put(row), there.put(rows);
    add_to_rows(stream(), n, width, there_row.data(), there.data());
    const std::vector<BFloat16> got = there.values();
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(to_float(got[i]),
                to_float(to_bfloat16(to_float(rows[i]) + to_float(row[i % static_cast<size_t>(width)]))))
          << i;
  }
}

TEST_F(TrainingKernelsGpu, SquaredNorm) {
  for (int64_t n : {0, 1, 7, 8, 9, 2049, 3'000'001}) {
    SCOPED_TRACE(::testing::Message() << "n " << n);
    std::vector<float> x = normal_floats(n, 1, 1e-3F);
    Guarded<float> there(n, stream());
    Guarded<double> norm(1, stream());
    Guarded<uint8_t> workspace(kSquaredNormBytes, stream());
    const auto run = [&] {
      there.put(x);
      workspace.poison(), norm.poison();
      squared_norm(stream(), n, there.data(), norm.data(), workspace.data());
      workspace.values();
      return norm.values()[0];
    };
    double right = 0;
    for (float value : x)
      right += static_cast<double>(value) * static_cast<double>(value);
    const double got = run();
    EXPECT_NEAR(got, right, 8 * kFp32Unit * right);  // eight squares in fp32
    EXPECT_EQ(run(), got);
    for (int64_t place : {int64_t{0}, n / 2, n - 1}) {
      if (n == 0) continue;
      for (float bad : {kNan, kInfinity}) {
        const float before = std::exchange(x[static_cast<size_t>(place)], bad);
        EXPECT_FALSE(std::isfinite(run()));
        x[static_cast<size_t>(place)] = before;
      }
    }
  }
}

TEST_F(TrainingKernelsGpu, SumsOfParts) {
  for (int64_t count : {0, 1, 15, 16, 17, 1000}) {
    for (int64_t width : {1, 31, 32, 33, 1000}) {
      const auto parts = normal_floats(count * width, 1), before = normal_floats(width, 2);
      Guarded<float> there(count * width, stream()), to(width, stream());
      there.put(parts), to.put(before);
      add_parts(stream(), there.data(), count, width, to.data());
      std::vector<double> right(before.size());
      for (int64_t part = 0; part < count; ++part)
        for (int64_t c = 0; c < width; ++c)
          right[static_cast<size_t>(c)] += static_cast<double>(parts[static_cast<size_t>(part * width + c)]);
      const auto got = to.values();
      for (size_t c = 0; c < right.size(); ++c)  // rounded, and added
        ASSERT_NEAR(got[c], static_cast<double>(before[c]) + right[c],
                    kFp32Unit * (2 * std::abs(right[c]) + std::abs(static_cast<double>(before[c]))))
            << count << " x " << width;
    }
  }
}

}  // namespace
}  // namespace longhalo::testing
