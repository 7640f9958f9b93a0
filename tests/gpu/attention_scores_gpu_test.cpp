// Scores of unusual sizes, and rows that are not numbers: what the GPU's attention kernels take scores
// relative to. The Hopper and the portable kernel seek no maxima without need, and the Hopper kernel
// subtracts none where queries come in units of exponents and every row of a warp has its first maximum
// within 2^-32 and 2^32; here are those that need it, early, late, in all rows or in some. One body for all
// kernels, all against the fp64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

#include "attention_gpu_fixture.hpp"

namespace longhalo::testing {
namespace {

constexpr QueryUnits kBothUnits[] = {QueryUnits::kPlain, QueryUnits::kExponents};

class GpuAttentionScores : public AttentionKernelTest {
 protected:
  /// 150 queries (or the last few) that see 1500 keys, and landmarks behind them.
  static AttentionProblem problem(int64_t head_dim, QueryUnits units, int64_t group = 2) {
    AttentionProblem p;
    p.units = units;
    set_heads(p, 1, group, head_dim);
    set_queries(p, 2000, 150);
    add_band_of_history(p, {1, 0, 1500});
    add_band_of_history(p, {16, 1500, kUnlimited});
    return p;
  }
  static void expect_right_kernel(AttentionProblem& p) {
    round_to_bfloat16(p);
    expect_kernel_right(p, GetParam(), stream());
  }
};

// Multiplies keys [begin, end) of a band, as fractions of all its keys.
void stretch_keys(AttentionProblem& p, OwnedBand& band, double begin, double end, float factor) {
  const auto at = [&](double part) {
    return std::llround(part * static_cast<double>(band.count)) * p.kv_heads * p.head_dim;
  };
  for (int64_t i = at(begin); i < at(end); ++i)
    band.k[static_cast<size_t>(i)] *= factor;
}

// Adds `step` to the keys [begin, end) of a band along a direction of ones and minus ones.
void push_keys(AttentionProblem& p, OwnedBand& band, double begin, double end, float step) {
  const auto at = [&](double part) { return std::llround(part * static_cast<double>(band.count)); };
  const int64_t d = p.head_dim;
  for (int64_t i = at(begin) * p.kv_heads * d; i < at(end) * p.kv_heads * d; ++i)
    band.k[static_cast<size_t>(i)] += i % d % 3 == 0 ? -step : step;
}

// Queries along that direction, or against it where `against` says so of their rows, each with a little of
// its own. A key pushed by alignment(d, size) has scores of about +-size with them, in units of log2.
template <class Against>
void align_queries(AttentionProblem& p, const Against& against) {
  const int64_t d = p.head_dim, width = p.heads * d;
  for (int64_t row = 0; row < p.queries; ++row) {
    const float size = against(row) ? -p.query_factor() : p.query_factor();
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      float& q = p.q[static_cast<size_t>(i)];
      q = 0.25F * q + (i % d % 3 == 0 ? -size : size);
    }
  }
}

float alignment(int64_t head_dim, float size) {
  return size / (std::numbers::log2e_v<float> * std::sqrt(static_cast<float>(head_dim)));
}

TEST_P(GpuAttentionScores, StayFiniteAtAnySize) {
  for (QueryUnits units : kBothUnits) {
    for (float size : {1000.0F, 1e-20F}) {
      AttentionProblem p;
      p.units = units;
      set_heads(p, 1, 2, 64);
      set_queries(p, 0, 300);
      add_band_of_history(p, {1, 0, 150});
      add_band_of_history(p, {16, 150, kUnlimited});
      fill(p, 3);
      for (float& x : p.q)
        x *= size;  // scores of thousands: one key takes all, exp of the others underflows
      expect_right_kernel(p);
    }
  }
}

// Scores that grow along the keys: the running maximum moves at every key tile.
TEST_P(GpuAttentionScores, TheLargestMayComeFirstOrLast) {
  for (QueryUnits units : kBothUnits) {
    for (float slope : {0.02F, -0.02F}) {
      AttentionProblem p;
      p.units = units;
      set_heads(p, 1, 2, 128);
      set_queries(p, 2000, 150);
      add_band_of_history(p, {1, 0, 1500});
      fill(p, 4);
      std::fill(p.q.begin(), p.q.end(), p.query_factor());
      const auto d = static_cast<size_t>(p.head_dim);
      for (size_t at = 0; at < p.bands[0].k.size(); ++at)
        p.bands[0].k[at] = slope * static_cast<float>(at / d) / std::sqrt(static_cast<float>(d));
      expect_right_kernel(p);
    }
  }
}

// From far within 2^-32 and 2^32 to where some rows of a warp are and others are not.
TEST_P(GpuAttentionScores, OfTheModelsUnits) {
  for (int64_t d : {64, 128}) {
    for (float size : {0.1F, 1.0F, 4.0F, 8.0F, 12.0F}) {
      SCOPED_TRACE(::testing::Message() << "size " << size);
      AttentionProblem p = problem(d, QueryUnits::kExponents);
      fill(p, static_cast<unsigned>(d));
      for (float& x : p.q)
        x *= size;
      expect_right_kernel(p);
      if (HasFailure()) return;
    }
  }
}

// Sums pass 2^64 long after the first tile, or the first tile has weights that dwarf all others; also by a
// key or two alone, and by landmarks, which come last.
TEST_P(GpuAttentionScores, MayGrowMuchLater) {
  struct Stretch {
    size_t band;
    double begin, end;
  };
  for (const Stretch& where : {Stretch{0, 0.75, 1}, Stretch{0, 0.5, 0.625}, Stretch{0, 0.7, 0.701},
                               Stretch{0, 0, 0.5}, Stretch{1, 0, 1}}) {
    for (float factor : {12.0F, 40.0F, 400.0F}) {
      for (QueryUnits units : kBothUnits) {
        SCOPED_TRACE(::testing::Message() << "keys " << where.begin << " to " << where.end << " of band "
                                          << where.band << " times " << factor);
        AttentionProblem p = problem(factor == 12 ? 64 : 128, units);
        fill(p, 21);
        stretch_keys(p, p.bands[where.band], where.begin, where.end, factor);
        expect_right_kernel(p);
        if (HasFailure()) return;
      }
    }
  }
}

// All scores of a row are far above 0, or all far below: those of all rows alike, of every other, of a few.
// The first maxima are larger than `size` by some 4, so that some sizes have rows on both sides of -32
// and 32.
TEST_P(GpuAttentionScores, MayAllBeVeryLargeOrVerySmall) {
  for (float size : {-200.0F, -100.0F, -36.0F, -20.0F, 20.0F, 28.0F, 100.0F, 200.0F}) {
    for (int64_t period : {0, 1, 2, 64}) {  // of rows whose scores have the other sign
      SCOPED_TRACE(::testing::Message() << "scores 2^" << size << ", other rows: one of " << period);
      AttentionProblem p = problem(period == 2 ? 64 : 128, QueryUnits::kExponents);
      fill(p, 8);
      align_queries(p, [&](int64_t row) { return period > 0 && row % period == period / 2; });
      for (OwnedBand& band : p.bands)
        push_keys(p, band, 0, 1, alignment(p.head_dim, size));
      expect_right_kernel(p);
      if (HasFailure()) return;
    }
  }
}

// From one end to the other within a row: up by 2^60 to 2^400, or down.
TEST_P(GpuAttentionScores, MaySwing) {
  for (float size : {-200.0F, -30.0F, 30.0F, 200.0F}) {
    for (double turn : {0.1, 0.5, 0.9}) {
      SCOPED_TRACE(::testing::Message() << "scores 2^" << size << " up to " << turn);
      AttentionProblem p = problem(128, QueryUnits::kExponents);
      fill(p, 9);
      align_queries(p, [](int64_t row) { return row % 5 == 3; });
      push_keys(p, p.bands[0], 0, turn, alignment(p.head_dim, size));
      push_keys(p, p.bands[0], turn, 1, alignment(p.head_dim, -size));
      expect_right_kernel(p);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionScores, OfLandmarksMayHaveABias) {
  for (int64_t d : {64, 128}) {
    for (float size : {1.0F, 8.0F}) {
      for (bool landmarks_alone : {false, true}) {
        SCOPED_TRACE(::testing::Message() << "size " << size << (landmarks_alone ? ", landmarks alone" : ""));
        AttentionProblem p = problem(d, QueryUnits::kExponents, 6);
        if (landmarks_alone) {
          p.bands.clear();
          add_band_of_history(p, {4, 0, kUnlimited});
        }
        p.landmark_bias = {-3, 5, 0, 45, -45, -3};  // e^45 > 2^64
        fill(p, static_cast<unsigned>(d));
        for (float& x : p.q)
          x *= size;
        expect_right_kernel(p);
        if (HasFailure()) return;
      }
    }
  }
}

// Weights that no maximum makes 1 are rounded, and so must be what they are divided by.
TEST_P(GpuAttentionScores, OfOneKeyGiveItsValueToTheBit) {
  for (int64_t d : {64, 128}) {
    for (QueryUnits units : kBothUnits) {
      AttentionProblem p = problem(d, units);
      for (int64_t row = 0; row < p.queries; ++row)
        p.doc_start.push_back(p.first_query + row);
      fill(p, static_cast<unsigned>(d));
      round_to_bfloat16(p);
      GpuAttention there(p, stream());
      const GpuAnswer answer = there.run(GetParam());
      const OwnedBand& window = p.bands[0];
      for (int64_t row = 0; row < p.queries; ++row)
        for (int64_t c = 0; c < p.heads * d; ++c) {
          const int64_t key = p.first_query + row - window.first_key, group = p.heads / p.kv_heads;
          const auto at = static_cast<size_t>((key * p.kv_heads + c / d / group) * d + c % d);
          ASSERT_EQ(to_float(answer.out[static_cast<size_t>(row * p.heads * d + c)]), window.v[at])
              << "row " << row << ", column " << c;
        }
    }
  }
}

// A row that is not a number stays so, and the others of its tile and warp stay right: also those whose sums
// must grow meanwhile.
TEST_P(GpuAttentionScores, OfNaNOrInfinityLeaveOtherRowsRight) {
  const auto infinity = std::numeric_limits<float>::infinity();
  for (float wrong : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
    for (float factor : {1.0F, 40.0F}) {
      for (QueryUnits units : kBothUnits) {
        AttentionProblem p = problem(factor == 1 ? 128 : 64, units);
        fill(p, 33);
        stretch_keys(p, p.bands[0], 0.5, 1, factor);
        round_to_bfloat16(p);
        AttentionProblem spoiled = p;
        const int64_t row = p.queries / 3, width = p.heads * p.head_dim;
        spoiled.q[static_cast<size_t>(row * width + 5)] = wrong;  // of head 0
        SCOPED_TRACE(::testing::Message() << "row " << row << " with " << wrong << ", keys times " << factor);
        GpuAttention there(spoiled, stream());
        const GpuAnswer answer = there.run(GetParam());
        std::vector<int64_t> others(static_cast<size_t>(p.queries));
        std::iota(others.begin(), others.end(), 0);
        others.erase(others.begin() + row);
        expect_right(p, answer, others);
        if (std::isnan(wrong)) {
          EXPECT_TRUE(std::isnan(answer.lse[static_cast<size_t>(row)]));
          for (int64_t c = 0; c < p.head_dim; ++c)
            ASSERT_TRUE(std::isnan(to_float(answer.out[static_cast<size_t>(row * width + c)])));
        }
        if (HasFailure()) return;
      }
    }
  }
}

// More heads than a GPU has multiprocessors for, of three kinds again and again, alone and in pairs: what a
// block keeps of an item must not reach the next one, which is of another kind.
TEST_P(GpuAttentionScores, OfOneItemDoNotReachTheNext) {
  constexpr int64_t kKinds = 3, kWrongRow = 50;
  for (int64_t copies : {95, 96}) {
    for (QueryUnits units : kBothUnits) {
      AttentionProblem p = problem(copies == 95 ? 128 : 64, units, kKinds * copies);
      const int64_t d = p.head_dim;
      const int64_t wrong_row = std::min(kWrongRow, p.queries / 2);
      fill(p, 13);
      for (int64_t row = 0; row < p.queries; ++row)
        for (int64_t head = 0; head < p.heads; ++head)
          for (int64_t c = 0; c < d; ++c) {
            const auto at = [&](int64_t of_head) {
              return static_cast<size_t>((row * p.heads + of_head) * d + c);
            };
            if (head >= kKinds)
              p.q[at(head)] = p.q[at(head % kKinds)];
            else if (head == 1)
              p.q[at(head)] *= 40;
          }
      round_to_bfloat16(p);
      AttentionProblem spoiled = p;
      for (int64_t head = 0; head < p.heads; head += kKinds)
        spoiled.q[static_cast<size_t>((wrong_row * p.heads + head) * d)] =
            std::numeric_limits<float>::quiet_NaN();
      GpuAttention there(spoiled, stream());
      const GpuAnswer answer = there.run(GetParam());
      // Decode cuts keys by what 16 rows see together, which may belong to two queries: heads of one kind are
      // right there, but not alike to the bit.
      const bool alike = GetParam() != AttentionKernel::kDecode;
      for (int64_t row = 0; alike && row < p.queries; ++row)
        for (int64_t head = kKinds; head < p.heads; ++head)
          for (int64_t c = 0; c < d; ++c) {
            const auto at = [&](int64_t of_head) {
              return static_cast<size_t>((row * p.heads + of_head) * d + c);
            };
            ASSERT_EQ(answer.out[at(head)].bits, answer.out[at(head % kKinds)].bits)
                << "row " << row << ", head " << head;
          }
      expect_right(p, answer, {0, 1, wrong_row - 1, wrong_row + 1, p.queries - 1});
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuAttentionScores,
                         ::testing::Values(AttentionKernel::kHopper, AttentionKernel::kPortable,
                                           AttentionKernel::kDecode),
                         kernel_name);

}  // namespace
}  // namespace longhalo::testing
