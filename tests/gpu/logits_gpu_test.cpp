// Log-probabilities of labels and the most likely token, on rows that begin anywhere in memory.
#include <limits>

#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/logits/logits.hpp"

namespace longhalo::testing {
namespace {

class LogitsGpu : public GpuTest {
 protected:
  static int32_t argmax_of(const std::vector<float>& logits, int64_t shift) {
    Guarded<float> x(static_cast<int64_t>(logits.size()) + shift, stream());
    Guarded<int32_t> index(1, stream());
    std::vector<float> shifted(static_cast<size_t>(shift), 1e30F);
    shifted.insert(shifted.end(), logits.begin(), logits.end());
    x.put(shifted);
    argmax(stream(), static_cast<int64_t>(logits.size()), x.data() + shift, index.data());
    return index.values()[0];
  }
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_F(LogitsGpu, LabelLogProbabilities) {
  for (int64_t vocabulary : {1, 2, 3, 7, 1025, 4099, 50257, 49152, 128256}) {
    for (int64_t n : {0, 1, 5}) {
      SCOPED_TRACE(::testing::Message() << "n " << n << ", vocabulary " << vocabulary);
      auto logits = normal_floats(n * vocabulary, 1, 8);
      for (float& x : logits)
        x += 100;                                            // far from 0: only differences count
      if (n == 5 && vocabulary > 2) logits[1] = -kInfinity;  // a token that cannot come
      std::vector<int32_t> labels;
      std::vector<double> right;
      for (int64_t i = 0; i < n; ++i) {
        const float* row = logits.data() + i * vocabulary;
        labels.push_back(static_cast<int32_t>((i * 7919) % vocabulary));
        const double top = *std::max_element(row, row + vocabulary);
        double sum = 0;
        for (int64_t c = 0; c < vocabulary; ++c)
          sum += std::exp(row[c] - top);
        right.push_back(row[labels.back()] - top - std::log(sum));
      }
      Guarded<float> x(n * vocabulary, stream()), out(n, stream());
      Guarded<int32_t> label(n, stream());
      x.put(logits), label.put(labels);
      label_log_probabilities(stream(), n, vocabulary, x.data(), label.data(), out.data());
      const auto got = out.values();
      // Each term errs by its argument's rounding and by exp's, together 6 |x| + 4 units, where |x| < 20 or
      // the term does not count; the chain is at most vocabulary / 1024 + 4 additions and rescalings in a
      // thread and 10 merges of three roundings. All relative to the sum, so absolute in its logarithm.
      const double chain = 2 * (static_cast<double>(vocabulary) / 1024 + 4) + 30;
      expect_near(got, right, kFp32Unit, [&](size_t) { return kFp32Unit * (6 * 20 + 4 + chain); });
      out.poison();
      label_log_probabilities(stream(), n, vocabulary, x.data(), label.data(), out.data());
      expect_same_bits(out.values(), got);
    }
  }
}

TEST_F(LogitsGpu, ArgmaxTakesTheFirstOfEqualsWhereverTheRowBegins) {
  for (int64_t vocabulary : {1, 5, 33, 1000, 4097, 128256}) {
    for (int64_t shift : {0, 1, 3}) {
      for (int64_t at : {int64_t{0}, vocabulary / 2, vocabulary - 1}) {
        std::vector<float> logits(static_cast<size_t>(vocabulary), -2);
        for (int64_t c = at; c < vocabulary; c += 3)
          logits[static_cast<size_t>(c)] = -1;
        EXPECT_EQ(argmax_of(logits, shift), at) << "vocabulary " << vocabulary << ", shift " << shift;
      }
    }
  }
}

TEST_F(LogitsGpu, ArgmaxOfRandomLogitsIsTheHosts) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const auto logits = normal_floats(128'256, seed);
    EXPECT_EQ(argmax_of(logits, seed % 4),
              static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
}

TEST_F(LogitsGpu, ArgmaxOfInfinitiesAndOfNan) {
  EXPECT_EQ(argmax_of(std::vector<float>(4099, -kInfinity), 0), 0);
  for (int64_t at : {0, 2048, 4098}) {
    std::vector<float> logits(4099, 1);
    logits[static_cast<size_t>(at)] = kInfinity;
    EXPECT_EQ(argmax_of(logits, 1), at);
    logits[static_cast<size_t>(at)] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(argmax_of(logits, 1), -1);
  }
}

}  // namespace
}  // namespace longhalo::testing
