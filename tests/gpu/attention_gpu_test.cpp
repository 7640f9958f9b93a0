// The GPU's attention kernels against the fp64 reference. One body for all of them; the decode kernel takes
// the last few queries of the same problems. What scores of unusual sizes do is in
// attention_scores_gpu_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "attention_gpu_fixture.hpp"

namespace longhalo::testing {
namespace {

class GpuAttentionKernel : public AttentionKernelTest {
 protected:
  /// Fills the problem, rounds it to bf16, runs and judges.
  static void expect_kernel(AttentionProblem& p, unsigned seed, KeyLayout layout = KeyLayout::kDense) {
    p.units = units_of(seed);
    fill(p, seed);
    round_to_bfloat16(p);
    expect_kernel_right(p, GetParam(), stream(), layout);
  }
};

void set_bias(AttentionProblem& p, std::mt19937& random) {
  p.landmark_bias.resize(static_cast<size_t>(p.heads));
  for (float& x : p.landmark_bias)
    x = -3.0F + static_cast<float>(random() % 100) / 25.0F;
}

int64_t pick(std::mt19937& random, const std::vector<int64_t>& from) {
  return from[random() % from.size()];
}

// Documents of odd lengths, some of one token, from a start at or before the first query.
std::vector<int64_t> documents(std::mt19937& random, int64_t first_query, int64_t n, int64_t longest) {
  std::vector<int64_t> starts;
  int64_t start = std::max<int64_t>(0, first_query - static_cast<int64_t>(random() % 40));
  int64_t next = first_query + 1 + static_cast<int64_t>(random() % 20);
  for (int64_t i = first_query; i < first_query + n; ++i) {
    if (i == next) {
      start = i;
      next = i + (random() % 3 == 0 ? 1 : 1 + static_cast<int64_t>(random()) % longest);
    }
    starts.push_back(start);
  }
  return starts;
}

// Bands of every kind: windows, dense, landmarks, pyramids, gaps between bands, strides from distance 0,
// finite reach, sinks (few keys, far away), bands that are empty or that nobody sees.
std::vector<Band> random_bands(std::mt19937& random, int64_t first_query) {
  const int64_t window = pick(random, {1, 2, 7, 63, 64, 65, 100, 128, 200, 300});
  const int64_t stride = pick(random, {2, 3, 8, 16, 50, 64, 100, 130, 200});
  // At a huge position an unlimited band would have millions of keys; a far one stands for it.
  const bool huge = first_query > 10'000;
  const int64_t unlimited = huge ? stride * 150 + window : kUnlimited;
  const std::vector<std::vector<Band>> choices{
      {{1, 0, window}},
      {{1, 0, huge ? 777 : kUnlimited}},
      {{1, 0, window}, {stride, window, unlimited}},
      {{1, 0, window}, {stride, window, unlimited}},
      {{stride, 0, unlimited}},
      {{1, 0, window}, {1, window + 3, window + 90}},
      {{1, 0, window}, {stride, window + 5, window + 5 * stride}},
      {{1, 3, 3 + window}, {2, window, 3 * window}, {stride, 2 * window, unlimited}},
      {{1, 0, window},
       {2, window, 2 * window + 2},
       {4, 2 * window, 4 * window + 4},
       {stride, 4 * window, unlimited}},
      {{1, 7, 7}, {stride, 2 * window, unlimited}}};
  return choices[random() % choices.size()];
}

TEST_P(GpuAttentionKernel, AgreesWithTheReferenceOnRandomProblems) {
  for (unsigned seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    AttentionProblem p;
    set_heads(p, pick(random, {1, 1, 2, 3}), pick(random, {1, 2, 3, 4, 5, 6, 7, 8}), pick(random, {64, 128}));
    const int64_t first_query = pick(random, {0, 0, 1, 63, 127, 128, 333, 1001, 10'000'000, 10'000'001});
    set_queries(p, first_query, pick(random, {1, 2, 3, 8, 9, 31, 64, 65, 127, 128, 129, 200, 257}));
    const std::vector<Band> bands = random_bands(random, p.first_query);
    for (const Band& band : bands)
      add_band_of_history(p, band, pick(random, {0, 0, 0, 1, 5, 70}), pick(random, {0, 0, 0, 1, 3, 66}));
    if (random() % 4 == 0) p.bands.back().count = 0;
    if (random() % 4 == 0) add_band(p, {1, 0, kUnlimited}, 0, 4);  // four sink tokens; near ones seen twice
    if (p.bands.size() > static_cast<size_t>(kMaxBands)) p.bands.pop_back();
    if (random() % 3 == 0) p.doc_start = documents(random, p.first_query, p.queries, 150);
    if (random() % 2 == 0) set_bias(p, random);
    expect_kernel(p, seed + 1000, static_cast<KeyLayout>(seed % 3));
    if (HasFailure()) return;
  }
}

TEST_P(GpuAttentionKernel, QueryCountsAndWindowsAtAndBesideTheEdgesOfTiles) {
  unsigned seed = 1;
  for (int64_t n : {1, 63, 64, 65, 127, 128, 129, 257, 1009}) {
    for (int64_t window : {1, 7, 100, 128, 300, 4096}) {
      AttentionProblem p;
      set_heads(p, 1, 2, seed % 2 == 0 ? 64 : 128);
      set_queries(p, n == 1 ? 4500 : 0, n);
      add_band_of_history(p, {1, 0, window});
      add_band_of_history(p, {std::min<int64_t>(window, 48), window, kUnlimited});
      expect_kernel(p, seed++);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionKernel, StridesOfLandmarks) {
  unsigned seed = 1;
  for (int64_t stride : {2, 3, 64, 100, 127, 128, 129, 300, 2048}) {
    for (int64_t first_query : {0, 5001, 10'000'000}) {
      if (first_query > 10'000 && stride < 300) continue;  // hundreds of thousands of landmarks
      AttentionProblem p;
      set_heads(p, 2, 2, seed % 2 == 0 ? 64 : 128);
      set_queries(p, first_query, 199);
      add_band_of_history(p, {1, 0, stride});
      add_band_of_history(p, {stride, stride, kUnlimited});
      p.landmark_bias = {-3, 0, 1.5F, -0.25F};
      p.units = units_of(seed);
      fill(p, seed++);
      round_to_bfloat16(p);
      GpuAttention there(p, stream());
      std::vector<int64_t> rows;
      for (int64_t row = 0; row<p.queries; row += first_query> 10'000 ? 23 : 1)
        rows.push_back(row);
      expect_right(p, there.run(GetParam()), rows);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionKernel, GroupsOfOneToEightHeads) {
  for (int64_t d : {64, 128}) {
    for (int64_t group = 1; group <= 8; ++group) {
      AttentionProblem p;
      set_heads(p, 9 - group, group, d);
      set_queries(p, 77, 133);
      add_band_of_history(p, {1, 0, 96});
      add_band_of_history(p, {32, 96, kUnlimited});
      std::mt19937 random(static_cast<unsigned>(group));
      set_bias(p, random);
      expect_kernel(p, static_cast<unsigned>(d + group), KeyLayout::kInterleaved);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionKernel, PyramidsOfFourBands) {
  for (int64_t first_query : {0, 20'000, 10'000'000}) {
    AttentionProblem p;
    set_heads(p, 1, 3, 128);
    set_queries(p, first_query, 259);
    add_band_of_history(p, {1, 0, 500});
    add_band_of_history(p, {16, 500, 3000});
    add_band_of_history(p, {100, 3000, 12'345});
    add_band_of_history(p, {2048, 12'345, 2'000'000});
    expect_kernel(p, 11);
  }
}

TEST_P(GpuAttentionKernel, PackedDocuments) {
  for (int64_t longest : {1, 2, 40, 400, 5000}) {
    AttentionProblem p;
    set_heads(p, 1, 2, 64);
    set_queries(p, 1000, 777);
    add_band_of_history(p, {1, 0, 256});
    add_band_of_history(p, {32, 256, kUnlimited});
    std::mt19937 random(static_cast<unsigned>(longest));
    p.doc_start = documents(random, p.first_query, p.queries, longest);
    expect_kernel(p, static_cast<unsigned>(longest));
    if (HasFailure()) return;
  }
}

TEST_P(GpuAttentionKernel, KeyArraysThatBeginLateAndEndEarly) {
  for (int64_t missing : {1, 64, 129, 300}) {
    AttentionProblem p;
    set_heads(p, 1, 4, 128);
    set_queries(p, 3000, 300);
    add_band_of_history(p, {1, 0, 400}, missing, missing);
    add_band_of_history(p, {8, 400, kUnlimited}, missing, missing / 8);
    expect_kernel(p, static_cast<unsigned>(missing), KeyLayout::kPadded);
    if (HasFailure()) return;
  }
}

TEST_P(GpuAttentionKernel, RowsThatSeeNothingGiveZero) {
  for (int64_t n : {3, 40, 300}) {
    AttentionProblem p;
    p.units = n == 40 ? QueryUnits::kPlain : QueryUnits::kExponents;
    set_heads(p, 1, 2, 64);
    set_queries(p, 0, n);
    add_band_of_history(p, {1, 30, 35});
    add_band(p, {8, 0, kUnlimited}, 0, 0);
    fill(p, 7);
    round_to_bfloat16(p);
    GpuAttention there(p, stream());
    const GpuAnswer answer = there.run(GetParam());
    expect_right(p, answer);
    for (int64_t row = 0; row < p.queries && p.first_query + row < 30; ++row) {
      for (int64_t at = row * 128; at < (row + 1) * 128; ++at)
        ASSERT_EQ(to_float(answer.out[static_cast<size_t>(at)]), 0.0F) << p.text() << " row " << row;
      for (int64_t h : {0, 1})
        ASSERT_EQ(answer.lse[static_cast<size_t>(h * p.queries + row)],
                  -std::numeric_limits<float>::infinity());
    }
  }
}

// With equal scores each key weighs the same. Key g of the window has a one at component g mod 64, a landmark
// at 64 + g mod 64, so out times the number of keys says exactly how many keys of each kind a row used, and
// exp(lse) how many in all: one key too many or too few anywhere shows.
TEST_P(GpuAttentionKernel, EveryRowUsesExactlyTheKeysThatItSees) {
  for (int64_t window : {130, 301, 1024}) {
    AttentionProblem p;
    p.units = window == 301 ? QueryUnits::kPlain : QueryUnits::kExponents;
    set_heads(p, 1, 2, 128);
    set_queries(p, 2000, 1511);
    add_band_of_history(p, {1, 0, window});
    add_band_of_history(p, {64, window, kUnlimited});
    fill(p, 1);
    round_to_bfloat16(p);
    std::fill(p.q.begin(), p.q.end(), 0.0F);
    for (size_t b = 0; b < 2; ++b) {
      OwnedBand& band = p.bands[b];
      std::fill(band.v.begin(), band.v.end(), 0.0F);
      for (int64_t r = 0; r < band.count; ++r)
        band.v[static_cast<size_t>(r * 128 + (band.first_key + r) % 64) + 64 * b] = 1;
    }
    GpuAttention there(p, stream());
    const GpuAnswer answer = there.run(GetParam());
    for (int64_t row = 0; row < p.queries; ++row) {
      const int64_t i = p.first_query + row;
      std::vector<int64_t> uses(128, 0);
      int64_t all = 0;
      for (size_t b = 0; b < 2; ++b) {
        const KeyRange seen = visible_keys(p.bands[b].band, i);
        all += seen.count();
        for (int64_t g = seen.begin; g < seen.end; ++g)
          ++uses[static_cast<size_t>(g % 64) + 64 * b];
      }
      for (int64_t h : {0, 1}) {
        ASSERT_NEAR(answer.lse[static_cast<size_t>(h * p.queries + row)], std::log(static_cast<double>(all)),
                    1e-5)
            << "row " << row;
        for (int64_t c = 0; c < 128; ++c) {  // counts of at most 17: bf16's error is below 0.07
          const float mean = to_float(answer.out[static_cast<size_t>((row * 2 + h) * 128 + c)]);
          ASSERT_NEAR(mean * static_cast<float>(all), static_cast<float>(uses[static_cast<size_t>(c)]), 0.1F)
              << "row " << row << " component " << c;
        }
      }
    }
  }
}

TEST_P(GpuAttentionKernel, TheLayoutOfTheKeysAndAnLseThatNobodyWantsChangeNothing) {
  AttentionProblem p;
  p.units = QueryUnits::kExponents;
  set_heads(p, 2, 4, 128);
  set_queries(p, 500, 200);
  add_band_of_history(p, {1, 0, 320});
  add_band_of_history(p, {32, 320, kUnlimited});
  fill(p, 5);
  round_to_bfloat16(p);
  GpuAttention dense(p, stream()), interleaved(p, stream(), KeyLayout::kInterleaved),
      padded(p, stream(), KeyLayout::kPadded);
  const GpuAnswer answer = dense.run(GetParam());
  EXPECT_TRUE(same_bits(answer, interleaved.run(GetParam())));
  EXPECT_TRUE(same_bits(answer, padded.run(GetParam())));
  GpuAnswer without = dense.run(GetParam(), WantLse::kNo);
  without.lse = answer.lse;
  EXPECT_TRUE(same_bits(answer, without));
  expect_right(p, answer);
}

TEST_P(GpuAttentionKernel, ALongerSequenceOnASampleOfItsRows) {
  for (int64_t d : {64, 128}) {
    for (QueryUnits units : {QueryUnits::kPlain, QueryUnits::kExponents}) {
      AttentionProblem p;
      p.units = units;
      set_heads(p, 2, 4, d);
      set_queries(p, 0, 4096);
      add_band_of_history(p, {1, 0, 1024});
      add_band_of_history(p, {64, 1024, kUnlimited});
      p.landmark_bias.assign(8, -1.0F);
      fill(p, static_cast<unsigned>(d));
      round_to_bfloat16(p);
      GpuAttention there(p, stream());
      const GpuAnswer first = there.run(GetParam());
      for (int repeat = 0; repeat < 5; ++repeat)
        ASSERT_TRUE(same_bits(first, there.run(GetParam()))) << "repeat " << repeat;
      std::mt19937 random(9);
      std::vector<int64_t> rows{0, p.queries - 1};
      for (int i = 0; i < 150; ++i)
        rows.push_back(static_cast<int64_t>(random()) % p.queries);
      expect_right(p, first, rows);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuAttentionKernel,
                         ::testing::Values(AttentionKernel::kHopper, AttentionKernel::kPortable,
                                           AttentionKernel::kDecode),
                         kernel_name);

}  // namespace
}  // namespace longhalo::testing
