// visible_keys() and visible_pairs() against the condition of the design, key by key.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace longhalo::testing {
namespace {

bool sees(const Band& b, int64_t i, int64_t g, int64_t doc_start) {
  const int64_t first = g * b.stride, last = first + b.stride - 1;
  return first <= i - b.near && last > i - b.far && last <= i && first >= doc_start;
}

const Band kBands[] = {
    {1, 0, 1},           {1, 0, 7},           {1, 0, kUnlimited}, {1, 3, 9},   {1, 5, 5},
    {1, 9, 4},           {2, 0, 12},          {3, 0, 1},          {3, 4, 20},  {8, 0, 9},
    {8, 8, 8},           {8, 16, kUnlimited}, {5, 1, 3},          {16, 2, 40}, {1, kUnlimited, kUnlimited},
    {4, 100, kUnlimited}};

TEST(Bands, VisibleKeysIsTheDefinition) {
  for (const Band& band : kBands) {
    for (int64_t i = 0; i < 90; ++i) {
      for (int64_t doc_start : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, i / 2, i}) {
        if (doc_start > i) continue;
        const KeyRange range = visible_keys(band, i, doc_start);
        for (int64_t g = 0; g < 100; ++g)
          ASSERT_EQ(g >= range.begin && g < range.end, sees(band, i, g, doc_start))
              << "band {" << band.stride << ", " << band.near << ", " << band.far << "} query " << i
              << " key " << g << " document from " << doc_start;
      }
    }
  }
}

TEST(Bands, BothEndsGrowWithTheQuery) {
  for (const Band& band : kBands) {
    for (int64_t doc_start : {0, 5, 33}) {
      for (int64_t i = doc_start + 1; i < 200; ++i) {
        const KeyRange before = visible_keys(band, i - 1, doc_start), now = visible_keys(band, i, doc_start);
        if (before.count() == 0 || now.count() == 0) continue;
        ASSERT_GE(now.begin, before.begin);
        ASSERT_GE(now.end, before.end);
      }
    }
  }
}

TEST(Bands, HugePositions) {
  const int64_t i = int64_t{1} << 40;
  const KeyRange window = visible_keys({1, 0, 2048}, i);
  EXPECT_EQ(window.begin, i - 2047);
  EXPECT_EQ(window.end, i + 1);
  const KeyRange landmarks = visible_keys({256, 2048, kUnlimited}, i, i - 100000);
  EXPECT_EQ(landmarks.begin, (i - 100000 + 255) / 256);
  EXPECT_EQ(landmarks.end, (i - 2048) / 256 + 1);
}

TEST(Bands, VisiblePairsCountsThem) {
  for (const Band& band : kBands) {
    for (int64_t first_query : {0, 20}) {
      Attention<float> p;
      const float dummy = 0;
      const BandKeys<float> keys[] = {{band, &dummy, &dummy, 3, 40}, {{1, 0, 5}, &dummy, &dummy, 0, 30}};
      p.heads = p.kv_heads = 1, p.head_dim = 8, p.queries = 50, p.first_query = first_query, p.bands = keys;
      std::vector<int64_t> doc_start;
      for (int64_t i = 0; i < 50; ++i)
        doc_start.push_back(std::max<int64_t>(0, first_query + i / 11 * 11 - 2));
      for (bool packed : {false, true}) {
        const int64_t* documents = packed ? doc_start.data() : nullptr;
        p.doc_start = documents;
        int64_t pairs = 0;
        for (int64_t i = 0; i < 50; ++i)
          for (const BandKeys<float>& k : keys)
            for (int64_t g = k.first_key; g < k.first_key + k.count; ++g)
              pairs += sees(k.band, first_query + i, g, documents != nullptr ? documents[i] : 0) ? 1 : 0;
        ASSERT_EQ(visible_pairs(p), pairs);
      }
    }
  }
}

}  // namespace
}  // namespace longhalo::testing
