// What must hold of attention bit for bit: nothing of the future (or of another document, or of keys that do
// not exist yet) leaks, whatever it is; repeats and numbers of threads change nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention_problem.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class AttentionExactly : public WithIsa {};

AttentionProblem window_and_landmarks(int64_t n, int64_t group, int64_t d) {
  AttentionProblem p;
  p.heads = 2 * group, p.kv_heads = 2, p.head_dim = d, p.queries = n, p.first_query = 37;
  p.landmark_bias.assign(static_cast<size_t>(p.heads), -1.5F);
  add_band_of_history(p, {1, 0, 48});
  add_band_of_history(p, {8, 48, kUnlimited});
  fill(p, 11);
  return p;
}

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

// Overwrites every key and value that starts at token `from` or later.
void overwrite_from(AttentionProblem& p, int64_t from, float number) {
  for (OwnedBand& band : p.bands) {
    for (int64_t r = 0; r < band.count; ++r) {
      // A summary changes as soon as one of its tokens does.
      if ((band.first_key + r + 1) * band.band.stride - 1 < from) continue;
      const auto begin = static_cast<std::ptrdiff_t>(r * p.kv_heads * p.head_dim);
      std::fill_n(band.k.begin() + begin, p.kv_heads * p.head_dim, number);
      std::fill_n(band.v.begin() + begin, p.kv_heads * p.head_dim, number);
    }
  }
}

TEST_P(AttentionExactly, TheFutureChangesNothingWhateverItIs) {
  for (int64_t n : {8, 150}) {  // decode's path and the tiles'
    for (int64_t group : {1, 3, 5}) {
      const AttentionProblem p = window_and_landmarks(n, group, 64);
      const AttentionAnswer before = run_kernel(p);
      for (float number : {-7.0F, 1e30F, -3e38F, std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()}) {
        for (int64_t row = 1; row < n; row += n < 100 ? 1 : 13) {
          AttentionProblem changed = p;
          overwrite_from(changed, p.first_query + row, number);
          std::fill(changed.q.begin() + row * p.heads * p.head_dim, changed.q.end(), number);
          const AttentionAnswer after = run_kernel(changed);
          ASSERT_TRUE(same_bits(after.out.data(), before.out.data(), row * p.heads * p.head_dim))
              << p.text() << ", token " << row << " on is " << number;
          for (int64_t h = 0; h < p.heads; ++h)
            ASSERT_TRUE(same_bits(after.lse.data() + h * n, before.lse.data() + h * n, row));
        }
      }
    }
  }
}

TEST_P(AttentionExactly, KeysOutOfTheWindowChangeNothing) {
  AttentionProblem p = window_and_landmarks(100, 3, 64);
  p.bands.resize(1);
  p.bands[0].band.far = 20;
  const AttentionAnswer before = run_kernel(p);
  // Query row 60 and later see keys from position 37 + 60 - 19 on.
  const int64_t row = 60, oldest = p.first_query + row - 19;
  OwnedBand& band = p.bands[0];
  const int64_t count = (oldest - band.first_key) * p.kv_heads * p.head_dim;
  for (float number : {1e30F, std::numeric_limits<float>::quiet_NaN()}) {
    std::fill_n(band.k.begin(), count, number);
    std::fill_n(band.v.begin(), count, number);
    const AttentionAnswer after = run_kernel(p);
    const int64_t from = row * p.heads * p.head_dim;
    EXPECT_TRUE(same_bits(after.out.data() + from, before.out.data() + from,
                          static_cast<int64_t>(before.out.size()) - from));
  }
}

TEST_P(AttentionExactly, OtherDocumentsChangeNothing) {
  AttentionProblem p = window_and_landmarks(120, 2, 64);
  const int64_t start = p.first_query + 50;
  for (int64_t i = 0; i < p.queries; ++i)
    p.doc_start.push_back(p.first_query + i < start ? 0 : start);
  const AttentionAnswer before = run_kernel(p);
  for (float number : {1e30F, std::numeric_limits<float>::quiet_NaN()}) {
    for (OwnedBand& band : p.bands) {
      // Keys that begin before the second document: tokens and summaries of the first, or of both.
      const int64_t count = (start + band.band.stride - 1) / band.band.stride - band.first_key;
      std::fill_n(band.k.begin(), count * p.kv_heads * p.head_dim, number);
      std::fill_n(band.v.begin(), count * p.kv_heads * p.head_dim, number);
    }
    const AttentionAnswer after = run_kernel(p);
    const int64_t from = 50 * p.heads * p.head_dim;
    EXPECT_TRUE(same_bits(after.out.data() + from, before.out.data() + from,
                          static_cast<int64_t>(before.out.size()) - from));
  }
}

TEST_P(AttentionExactly, RepeatsAndThreadsGiveTheSameBits) {
  for (int64_t n : {1, 7, 400}) {
    for (int64_t group : {1, 3}) {
      const AttentionProblem p = window_and_landmarks(n, group, 64);
      const AttentionAnswer first = run_kernel(p);
      with_threads([&](int threads) {
        for (int repeat = 0; repeat < 2; ++repeat) {
          const AttentionAnswer again = run_kernel(p);
          EXPECT_TRUE(same_bits(again.out.data(), first.out.data(), static_cast<int64_t>(first.out.size())))
              << threads << " threads";
          EXPECT_TRUE(same_bits(again.lse.data(), first.lse.data(), static_cast<int64_t>(first.lse.size())));
        }
      });
    }
  }
}

// A decode step over many keys is split among threads: still the same bits.
TEST_P(AttentionExactly, SplitDecodeGivesTheSameBits) {
  AttentionProblem p;
  p.heads = 6, p.kv_heads = 2, p.head_dim = 64, p.queries = 2, p.first_query = 20000;
  add_band_of_history(p, {1, 0, 9000});
  fill(p, 5);
  const AttentionAnswer first = run_kernel(p);
  with_threads([&](int threads) {
    const AttentionAnswer again = run_kernel(p);
    EXPECT_TRUE(same_bits(again.out.data(), first.out.data(), static_cast<int64_t>(first.out.size())))
        << threads;
    EXPECT_TRUE(same_bits(again.lse.data(), first.lse.data(), static_cast<int64_t>(first.lse.size())));
  });
}

// A NaN that a query does see must not vanish: it is how a broken run is noticed.
TEST_P(AttentionExactly, NanOfTheVisiblePastIsSeen) {
  for (int64_t n : {3, 60}) {
    AttentionProblem p = window_and_landmarks(n, 3, 64);
    p.q[5] = std::numeric_limits<float>::quiet_NaN();
    const AttentionAnswer answer = run_kernel(p);
    EXPECT_TRUE(std::isnan(answer.out[0]));
    EXPECT_TRUE(std::isnan(answer.lse[0]));
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionExactly, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing
