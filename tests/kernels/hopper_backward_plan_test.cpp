// How the Hopper kernel of attention's gradient deals a problem out, on the host: which tiles of keys count
// as whole, against each tile's queries counted one by one.
#include "kernels/attention/hopper_backward_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace longhalo::hopper_backward {
namespace {

struct Case {
  Band band;
  int64_t first_query, queries, first_key, keys;
};

// Rows of q, from `begin` on and before `end`, that see some key of [first, first + kKeyTile).
int64_t queries_of(const Band& band, int64_t first, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    const KeyRange seen = visible_keys(band, i);
    count += seen.begin < seen.end && seen.begin < first + kKeyTile && seen.end > first;
  }
  return count;
}

TEST(HopperBackwardPlan, WholeTilesHaveAllTheirQueries) {
  const std::vector<Case> cases = {
      {{1, 0, 512}, 0, 4000, 0, 4000},       {{1, 0, 512}, 3000, 2000, 2489, 2511},
      {{1, 0, 512}, 3001, 1999, 2500, 2500}, {{1, 0, 500}, 777, 3000, 277, 3500},
      {{1, 100, 700}, 1000, 2500, 0, 3500},  {{4, 512, 2048}, 2500, 9000, 100, 2700},
      {{3, 2, 900}, 1234, 4321, 0, 1851},    {{1, 0, 512}, 100, 300, 0, 400},
      {{16, 0, 64}, 0, 9000, 0, 562}};
  int some = 0;
  for (const Case& one : cases) {
    std::vector<BandKeys<BFloat16>> bands(1);
    bands[0].band = one.band, bands[0].first_key = one.first_key, bands[0].count = one.keys;
    const std::vector<BandGradient<BFloat16>> to(1);
    AttentionGradient<BFloat16> gradient;
    gradient.forward.queries = one.queries, gradient.forward.first_query = one.first_query;
    gradient.forward.heads = 4, gradient.forward.kv_heads = 2, gradient.forward.head_dim = 64;
    gradient.forward.bands = bands, gradient.d_bands = to;
    const Plan plan = plan_of(gradient);
    ASSERT_EQ(plan.bands.size(), 1U);
    const BandPlan& band = plan.bands[0];
    const int64_t last_query = one.first_query + one.queries;
    std::vector<bool> whole;
    for (int64_t tile = 0; tile < band.tiles; ++tile) {
      const int64_t first = band.keys.first_key + tile * kKeyTile;
      const int64_t beyond = (first + kKeyTile) * one.band.stride + one.band.far;
      whole.push_back(queries_of(one.band, first, one.first_query, last_query) ==
                      queries_of(one.band, first, 0, std::max(beyond, last_query)));
    }
    const auto begin = std::find(whole.begin(), whole.end(), true);
    const auto end = std::find(begin, whole.end(), false);
    SCOPED_TRACE(::testing::Message() << "stride " << one.band.stride << ", first query " << one.first_query);
    EXPECT_EQ(band.whole_end - band.whole, end - begin);
    if (begin != end) {
      EXPECT_EQ(band.whole, begin - whole.begin());
    }
    some += begin != end;
  }
  EXPECT_GE(some, 6);
}

TEST(HopperBackwardPlan, BandsWithoutAnEndHaveNone) {
  std::vector<BandKeys<BFloat16>> bands(2);
  bands[0].count = 3000;
  bands[1].band = {1, 0, 5000}, bands[1].count = 3000;  // all that there is
  const std::vector<BandGradient<BFloat16>> to(2);
  AttentionGradient<BFloat16> gradient;
  gradient.forward.queries = 3000;
  gradient.forward.heads = gradient.forward.kv_heads = 1, gradient.forward.head_dim = 64;
  gradient.forward.bands = bands, gradient.d_bands = to;
  const Plan plan = plan_of(gradient);
  ASSERT_EQ(plan.bands.size(), 2U);
  for (const BandPlan& one : plan.bands)
    EXPECT_EQ(one.whole, one.whole_end);
}

}  // namespace
}  // namespace longhalo::hopper_backward
