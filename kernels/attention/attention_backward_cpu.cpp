#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <numbers>
#include <thread>
#include <utility>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention_backward.hpp"
#include "kernels/attention/attention_checks.hpp"
#include "kernels/attention/attention_gradient_tile.hpp"

namespace longhalo {
namespace {

using Problem = AttentionGradient<float>;

int64_t round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}

// How the queries fall into tiles. Five arrays of rows x d floats (64 KiB each) stay in the L2 cache beside
// the key tile that all of these rows share.
struct Tiling {
  Tiling(const Problem& p, const AttentionGradientKernels& kernels)
      : block(kernels.row_block),
        group(p.forward.heads / p.forward.kv_heads),
        width(round_up(p.forward.head_dim, kernels.column_block)) {
    const int64_t room = std::max(block, 16384 / p.forward.head_dim / block * block);
    queries = std::min(p.forward.queries, std::max<int64_t>(1, room / group));
    rows = round_up(queries * group, block);
    tiles = (p.forward.queries + queries - 1) / queries;
  }
  int64_t block, group, width;
  int64_t queries = 0;  // of a tile
  int64_t rows = 0;     // of a tile, padded
  int64_t tiles = 0;
};

// One thread's memory.
struct Workspace {
  Workspace(const Tiling& tiling, int64_t d)
      : floats(tiling.rows * (3 * d + 2 * tiling.width + 4) +
                   kKeys * (2 * d + 2 * tiling.width + 2 * tiling.block),
               "a tile of attention's gradient"),
        ranges(2 * tiling.rows * kMaxBands, "the key ranges of a tile of attention's gradient") {
    float* at = floats.data();
    const auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
    for (float** x : {&scratch.q_lanes, &scratch.d_out_lanes, &scratch.dq_lanes})
      *x = take(tiling.rows * d);
    for (float** x : {&scratch.q_rows, &scratch.d_out_rows})
      *x = take(tiling.rows * tiling.width);
    for (float** x : {&scratch.p, &scratch.ds})
      *x = take(kKeys * tiling.block);
    for (float** x : {&scratch.dk, &scratch.dv})
      *x = take(kKeys * tiling.width);
    for (float** x : {&scratch.k, &scratch.v})
      *x = take(kKeys * d);
    for (float** x : {&scratch.lse, &scratch.inner, &scratch.d_bias, &bias})
      *x = take(tiling.rows);
    std::fill(floats.data(), floats.data() + floats.size(), 0.0F);
  }
  static constexpr int64_t kKeys = kGradientKeyTile + kGradientSpare;
  HostBuffer<float> floats;
  HostBuffer<int64_t> ranges;  // [bands][begin, end][rows]
  GradientScratch scratch{};
  float* bias = nullptr;
  std::vector<int64_t> turns;  // for each key tile of the tile of queries at work, in order
};

// Which rows of a band's keys query `query` (a row of q) sees.
KeyRange rows_seen(const Attention<float>& p, const BandKeys<float>& keys, int64_t query) {
  const KeyRange seen =
      visible_keys(keys.band, p.first_query + query, p.doc_start != nullptr ? p.doc_start[query] : 0);
  const KeyRange rows{std::max<int64_t>(seen.begin - keys.first_key, 0),
                      std::min(seen.end - keys.first_key, keys.count)};
  return rows.count() > 0 ? rows : KeyRange{0, 0};
}

// The key tiles of `keys` that some query of a tile sees: a range that holds them all.
KeyRange key_tiles_seen(const Problem& p, const Tiling& tiling, const BandKeys<float>& keys, int64_t tile) {
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t query = tile * tiling.queries;
       query < std::min((tile + 1) * tiling.queries, p.forward.queries); ++query) {
    const KeyRange seen = rows_seen(p.forward, keys, query);
    if (seen.count() == 0) continue;
    begin = std::min(begin, seen.begin);
    end = std::max(end, seen.end);
  }
  if (end == 0) return {0, 0};
  return {begin / kGradientKeyTile, (end + kGradientKeyTile - 1) / kGradientKeyTile};
}

// Threads add to a key tile in the order of the query tiles, whoever comes first: each takes a number for
// every key tile it will meet when it takes its query tile (query tiles are taken in order), and adds when
// that number's turn has come. The thread with the oldest query tile never waits, so nothing locks up.
class KeyTileTurns {
 public:
  KeyTileTurns(const Problem& p, const Tiling& tiling) : kv_heads_(p.forward.kv_heads), tiles_(tiling.tiles) {
    int64_t key_tiles = 0;
    for (const BandKeys<float>& keys : p.forward.bands) {
      first_.push_back(key_tiles);
      key_tiles += (keys.count + kGradientKeyTile - 1) / kGradientKeyTile;
    }
    a_head_ = key_tiles;
    given_.resize(static_cast<size_t>(key_tiles * kv_heads_));
    done_ = std::vector<std::atomic<int64_t>>(given_.size());
    seen_.resize(static_cast<size_t>(tiling.tiles) * first_.size());
#pragma omp parallel for if (tiling.tiles > 1)
    for (int64_t tile = 0; tile < tiling.tiles; ++tile)
      for (size_t b = 0; b < first_.size(); ++b)
        seen_[static_cast<size_t>(tile) * first_.size() + b] =
            key_tiles_seen(p, tiling, p.forward.bands[b], tile);
  }

  const KeyRange& seen(int64_t tile, size_t band) const {
    return seen_[static_cast<size_t>(tile) * first_.size() + band];
  }

  /// Key tiles that a query tile meets, at most.
  size_t most() const {
    int64_t most = 0;
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      int64_t sum = 0;
      for (size_t b = 0; b < first_.size(); ++b)
        sum += seen(tile, b).count();
      most = std::max(most, sum);
    }
    return static_cast<size_t>(most);
  }

  /// The next (query tile, KV head), with its numbers; false when none is left.
  bool take(int64_t& tile, int64_t& kv_head, std::vector<int64_t>& turns) {
    const std::scoped_lock lock(mutex_);
    if (next_ == tiles_ * kv_heads_) return false;
    tile = next_ / kv_heads_, kv_head = next_ % kv_heads_;
    ++next_;
    turns.clear();
    for (size_t b = 0; b < first_.size(); ++b)
      for (int64_t x = seen(tile, b).begin; x < seen(tile, b).end; ++x)
        turns.push_back(given_[index(kv_head, b, x)]++);
    return true;
  }
  void wait(int64_t kv_head, size_t band, int64_t key_tile, int64_t turn) const {
    const std::atomic<int64_t>& done = done_[index(kv_head, band, key_tile)];
    while (done.load(std::memory_order_acquire) != turn)
      std::this_thread::yield();
  }
  void pass_on(int64_t kv_head, size_t band, int64_t key_tile, int64_t turn) {
    done_[index(kv_head, band, key_tile)].store(turn + 1, std::memory_order_release);
  }

 private:
  size_t index(int64_t kv_head, size_t band, int64_t key_tile) const {
    return static_cast<size_t>(kv_head * a_head_ + first_[band] + key_tile);
  }
  int64_t kv_heads_, tiles_;
  int64_t a_head_ = 0;          // key tiles of all bands
  std::vector<int64_t> first_;  // [bands] of the key tiles of all bands, a band's first
  std::vector<KeyRange> seen_;  // [tiles, bands]
  std::mutex mutex_;
  int64_t next_ = 0;
  std::vector<int64_t> given_;              // [H_kv, key tiles]
  std::vector<std::atomic<int64_t>> done_;  // [H_kv, key tiles]
};

struct TileRows {
  int64_t first_query, kv_head, used;  // used: rows (query, head of the group) that are a query's
};

void load_rows(const Problem& gradient, const Tiling& tiling, const TileRows& rows, Workspace& work) {
  const Attention<float>& p = gradient.forward;
  const GradientScratch& s = work.scratch;
  const int64_t d = p.head_dim, block = tiling.block;
  const float scale = p.scale * std::numbers::log2e_v<float>;
  std::fill(s.dq_lanes, s.dq_lanes + tiling.rows * d, 0.0F);
  std::fill(s.d_bias, s.d_bias + tiling.rows, 0.0F);
  for (int64_t r = 0; r < tiling.rows; ++r) {
    const int64_t query = rows.first_query + r / tiling.group,
                  head = rows.kv_head * tiling.group + r % tiling.group;
    float* q_rows = s.q_rows + r * tiling.width;
    float* d_out_rows = s.d_out_rows + r * tiling.width;
    float* q_lanes = s.q_lanes + r / block * block * d + r % block;
    float* d_out_lanes = s.d_out_lanes + r / block * block * d + r % block;
    const bool blind =
        r >= rows.used || p.lse[head * p.queries + query] == -std::numeric_limits<float>::infinity();
    work.bias[r] =
        blind || p.landmark_bias == nullptr ? 0.0F : p.landmark_bias[head] * std::numbers::log2e_v<float>;
    if (blind) {
      std::fill_n(q_rows, d, 0.0F);
      std::fill_n(d_out_rows, d, 0.0F);
      for (int64_t c = 0; c < d; ++c)
        q_lanes[c * block] = d_out_lanes[c * block] = 0;
      s.lse[r] = std::numeric_limits<float>::infinity();
      s.inner[r] = 0;
      continue;
    }
    const int64_t at = (query * p.heads + head) * d;
    std::copy_n(p.q + at, d, q_rows);
    std::copy_n(gradient.d_out + at, d, d_out_rows);
    double inner = 0;
    for (int64_t c = 0; c < d; ++c) {
      q_lanes[c * block] = q_rows[c] * scale;
      d_out_lanes[c * block] = d_out_rows[c];
      inner += static_cast<double>(p.out[at + c]) * static_cast<double>(d_out_rows[c]);
    }
    s.inner[r] = static_cast<float>(inner);
    s.lse[r] = static_cast<float>(static_cast<double>(p.lse[head * p.queries + query]) * std::numbers::log2e);
  }
}

void load_ranges(const Problem& gradient, const Tiling& tiling, const TileRows& rows, Workspace& work) {
  for (size_t b = 0; b < gradient.forward.bands.size(); ++b) {
    int64_t* begin = work.ranges.data() + 2 * tiling.rows * static_cast<int64_t>(b);
    for (int64_t r = 0; r < tiling.rows; ++r) {
      const int64_t query =
          rows.first_query + std::min(r, rows.used - 1) / tiling.group;  // padding repeats the last
      const KeyRange seen = rows_seen(gradient.forward, gradient.forward.bands[b], query);
      begin[r] = seen.begin;
      begin[tiling.rows + r] = seen.end;
    }
  }
}

void store_dq(const Problem& gradient, const Tiling& tiling, const TileRows& rows, const Workspace& work) {
  const Attention<float>& p = gradient.forward;
  for (int64_t r = 0; r < rows.used; ++r) {
    const int64_t query = rows.first_query + r / tiling.group,
                  head = rows.kv_head * tiling.group + r % tiling.group;
    const float* from =
        work.scratch.dq_lanes + r / tiling.block * tiling.block * p.head_dim + r % tiling.block;
    float* to = gradient.dq + (query * p.heads + head) * p.head_dim;
    for (int64_t c = 0; c < p.head_dim; ++c)
      to[c] = from[c * tiling.block] * p.scale;
  }
}

// to[j] += factor * from[j] for `count` keys.
void add_keys(int64_t count, int64_t d, int64_t width, float factor, const float* from, float* to,
              int64_t row_stride) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t c = 0; c < d; ++c)
      to[j * row_stride + c] += factor * from[j * width + c];
}

// One query tile of one KV head, whose rows are loaded, against all the key tiles that it sees.
void work_on_keys(const Problem& gradient, const Tiling& tiling, const AttentionGradientKernels& kernels,
                  KeyTileTurns& turns, int64_t tile, const TileRows& rows, Workspace& work) {
  const Attention<float>& p = gradient.forward;
  const int64_t d = p.head_dim, stride = p.kv_heads * d;
  const GradientTile queries{tiling.rows, d, tiling.width, work.scratch};
  size_t number = 0;
  for (size_t b = 0; b < p.bands.size(); ++b) {
    const BandKeys<float>& band = p.bands[b];
    const int64_t* begin = work.ranges.data() + 2 * tiling.rows * static_cast<int64_t>(b);
    const bool strided = band.band.stride > 1;
    GradientKeys keys{band.k + rows.kv_head * d,
                      band.v + rows.kv_head * d,
                      stride,
                      0,
                      0,
                      begin,
                      begin + tiling.rows,
                      strided && p.landmark_bias != nullptr ? work.bias : nullptr,
                      strided && gradient.d_landmark_bias != nullptr};
    for (int64_t x = turns.seen(tile, b).begin; x < turns.seen(tile, b).end; ++x) {
      keys.first = x * kGradientKeyTile;
      keys.count = std::min(kGradientKeyTile, band.count - keys.first);
      kernels.run(queries, keys);
      const int64_t turn = work.turns[number++], at = keys.first * stride + rows.kv_head * d;
      turns.wait(rows.kv_head, b, x, turn);
      add_keys(keys.count, d, tiling.width, p.scale, work.scratch.dk, gradient.d_bands[b].dk + at, stride);
      add_keys(keys.count, d, tiling.width, 1, work.scratch.dv, gradient.d_bands[b].dv + at, stride);
      turns.pass_on(rows.kv_head, b, x, turn);
    }
  }
}

}  // namespace

void attention_backward(const AttentionGradient<float>& gradient) {
  const Attention<float>& p = gradient.forward;
  check_attention_gradient(gradient);
  check(p.queries == 0 || p.lse != nullptr, "attention's gradient needs the forward pass's lse");
  if (p.queries == 0) return;
  const AttentionGradientKernels& kernels = LONGHALO_SIMD(attention_gradient);
  const Tiling tiling(gradient, kernels);
  KeyTileTurns turns(gradient, tiling);
  const bool biased = gradient.d_landmark_bias != nullptr;
  std::vector<double> d_bias(biased ? static_cast<size_t>(tiling.tiles * p.heads) : 0);  // [tiles, H]
  const int threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), tiling.tiles * p.kv_heads));
  // Made here and not inside: an exception (no memory left) must not leave a parallel region.
  std::vector<Workspace> workspaces;
  for (int i = 0; i < threads; ++i) {
    workspaces.emplace_back(tiling, p.head_dim);
    workspaces.back().turns.reserve(turns.most());
  }
#pragma omp parallel num_threads(threads)
  {
    Workspace& work = workspaces[static_cast<size_t>(omp_get_thread_num())];
    int64_t tile = 0, kv_head = 0;
    while (turns.take(tile, kv_head, work.turns)) {
      const int64_t first = tile * tiling.queries;
      const TileRows rows{first, kv_head, std::min(tiling.queries, p.queries - first) * tiling.group};
      load_rows(gradient, tiling, rows, work);
      load_ranges(gradient, tiling, rows, work);
      work_on_keys(gradient, tiling, kernels, turns, tile, rows, work);
      store_dq(gradient, tiling, rows, work);
      for (int64_t r = 0; biased && r < rows.used; ++r)
        d_bias[static_cast<size_t>(tile * p.heads + kv_head * tiling.group + r % tiling.group)] +=
            static_cast<double>(work.scratch.d_bias[r]);
    }
  }
  for (int64_t h = 0; biased && h < p.heads; ++h) {
    double sum = 0;
    for (int64_t tile = 0; tile < tiling.tiles; ++tile)
      sum += d_bias[static_cast<size_t>(tile * p.heads + h)];
    gradient.d_landmark_bias[h] += static_cast<float>(sum);
  }
}

}  // namespace longhalo
