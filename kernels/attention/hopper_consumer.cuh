// The consumer warpgroups of a block of the Hopper attention kernel (attention_hopper.cu says what they do):
// the two products of each key tile, the softmax between them, and an item's results.
#pragma once

#include <cmath>
#include <numbers>

#include "kernels/attention/hopper_softmax.cuh"
#include "kernels/attention/hopper_tiles.cuh"
#include "kernels/common/hopper.cuh"
#include "kernels/common/mma.cuh"

namespace longhalo::hopper_attention {

// Byte offset of 16-byte piece `piece` of a row of 128 bytes, as TMA's 128-byte swizzle lays it.
inline __device__ int swizzled(int row, int piece) {
  return row * 128 + ((piece ^ row) % 8) * 16;
}

// One consumer warpgroup: what it computes and where it is in the rings.
template <class S>
struct Consumer {
  static constexpr int kDim = S::kDim;
  const Parameters& p;
  SharedMemory<S>& shared;
  const int warpgroup;  // 0 to kConsumers - 1
  const int warp, lane;
  float o[kDim / 2];
  uint32_t weights[32];
  Ring q, k, v, edge;

  __device__ Consumer(const Parameters& parameters, SharedMemory<S>& memory, int group, int thread)
      : p(parameters),
        shared(memory),
        warpgroup(uniform(group)),
        warp(uniform(thread / 32)),
        lane(thread % 32) {}

  __device__ int row() const { return 64 * warpgroup + 16 * warp + lane / 4; }  // and row() + 8

  __device__ void release(uint64_t* barrier) const {
    if (lane == 0) hopper::mbarrier_arrive(barrier);
  }
  // A stage of keys or values is refilled for the whole cluster at once: each block hears of every reader.
  __device__ void release_tile(uint64_t* barrier) const {
    if constexpr (S::kCluster == 1)
      release(barrier);
    else if (lane < S::kCluster)
      hopper::mbarrier_arrive_at(barrier, lane);
  }

  // Scores of keys `first` of the tile and those after it, as many as `s` holds.
  template <int kRegisters>
  __device__ void multiply_keys(float (&s)[kRegisters], int first) {
    const uint64_t a = hopper::wgmma_operand(shared.q[q.stage] + warpgroup * 64 * 128, 0);
    const uint64_t b = hopper::wgmma_operand(shared.k[k.stage] + (kRegisters == 64 ? 0 : first * 128), 0);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      hopper::wgmma_ss(s, hopper::wgmma_advance(a, i / 4 * S::kQueryTile * 128 + i % 4 * 32),
                       hopper::wgmma_advance(b, i / 4 * kKeyTile * 128 + i % 4 * 32), i > 0);
  }

  // The same scores of this warp's 16 rows alone, by mma.sync, without the other warps.
  template <int kRegisters>
  __device__ void multiply_keys_again(float (&s)[kRegisters], int first) const {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i)
      s[i] = 0;
    const int q_row = 64 * warpgroup + 16 * warp + lane % 16;
    const int k_row = first + lane % 8 + lane / 16 * 8;
#pragma unroll 1
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t a[4];
      load_matrices(a, hopper::shared_address(shared.q[q.stage] + i / 4 * S::kQueryTile * 128 +
                                              swizzled(q_row, i % 4 * 2 + lane / 16)));
      const uint32_t keys = hopper::shared_address(shared.k[k.stage] + i / 4 * kKeyTile * 128 +
                                                   swizzled(k_row, i % 4 * 2 + lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < kRegisters / 8; ++j) {
        uint32_t b[4];
        load_matrices(b, keys + 16 * j * 128);
        auto& left = reinterpret_cast<float(&)[4]>(s[8 * j]);
        auto& right = reinterpret_cast<float(&)[4]>(s[8 * j + 4]);
        multiply_add(left, a, b[0], b[1], left);
        multiply_add(right, a, b[2], b[3], right);
      }
    }
  }

  __device__ void multiply_values(bool first) {
    const uint64_t b = hopper::wgmma_operand(shared.v[v.stage], kKeyTile * 128);
#pragma unroll
    for (int i = 0; i < kKeyTile / 16; ++i) {
      const uint32_t a[4] = {weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]};
      hopper::wgmma_rs(o, a, hopper::wgmma_advance(b, i * 16 * 128), i > 0 || !first);
    }
  }

  // What this warpgroup sees of a tile.
  __device__ int look(bool at_edge) const {
    if (!at_edge) return kAllSee;
    hopper::mbarrier_wait(&shared.edge_full[edge.stage], edge.phase);
    return uniform(shared.edge[edge.stage].view[warpgroup]);
  }
  __device__ void edge_done(bool at_edge) {
    if (!at_edge) return;
    hopper::mbarrier_arrive(&shared.edge_empty[edge.stage]);  // every lane has read it
    edge.template next<S::kEdgeStages>();
  }

  // Masks the scores of keys `first` of the tile and those after it.
  template <int kRegisters>
  __device__ void mask(float (&s)[kRegisters], int view, int first) const {
    if (!(view & (kMaskFirst | kMaskSecond))) return;
    int begin[2], end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const short2 seen = shared.edge[edge.stage].seen[row() + 8 * half];
      begin[half] = seen.x - first, end[half] = seen.y - first;
    }
    if constexpr (kRegisters == kHalfTile / 2) {
      mask_scores<0>(s, begin, end, lane);
    } else {
      if (view & kMaskFirst) mask_scores<0>(s, begin, end, lane);
      if (view & kMaskSecond) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          begin[half] -= kHalfTile, end[half] -= kHalfTile;
        mask_scores<kHalfTile / 2>(s, begin, end, lane);
      }
    }
  }

  __device__ void pack_weights(const float (&s)[64], int) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }
  __device__ void pack_weights(const float (&s)[32], int first) {
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]), weights[16 + i] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        weights[i] = 0, weights[16 + i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    }
  }

  // The results of the item in `stage`, the output in its queries' place.
  __device__ void write(const Softmax& softmax, int stage) {
    const Item& item = shared.item[stage];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(softmax.sum[half]);
      factor[half] = sum == 0 ? 0 : __fdividef(1.0F, sum + softmax.rounding[half]);
      const int query = item.first_query + row() + 8 * half;
      if (p.lse != nullptr && lane % 4 == 0 && query < p.queries)
        p.lse[static_cast<int64_t>(item.head) * p.queries + query] =
            sum == 0 ? -INFINITY : (softmax.top[half] + log2f(sum)) * std::numbers::ln2_v<float>;
    }
    const int line = 64 * warpgroup + 16 * warp + lane % 16;
    const uint32_t to = hopper::shared_address(shared.q[stage]) + swizzled(line, lane / 16);
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 2)
      hopper::store_matrices((to ^ j % 8 * 16) + j / 8 * S::kQueryTile * 128,
                             pack_bf16(o[4 * j] * factor[0], o[4 * j + 1] * factor[0]),
                             pack_bf16(o[4 * j + 2] * factor[1], o[4 * j + 3] * factor[1]),
                             pack_bf16(o[4 * j + 4] * factor[0], o[4 * j + 5] * factor[0]),
                             pack_bf16(o[4 * j + 6] * factor[1], o[4 * j + 7] * factor[1]));
    hopper::async_proxy_fence();
    hopper::mbarrier_arrive(&shared.out_full[stage]);
  }

  __device__ float bias_of(int head) const {
    return p.landmark_bias == nullptr ? 0 : p.landmark_bias[head] * std::numbers::log2e_v<float>;
  }

  // The warpgroups take turns at issuing products: 1 + w is the barrier that opens warpgroup w's turn.
  __device__ void wait_for_turn() {
    hopper::named_barrier_wait(1 + warpgroup, 2 * kWarpgroup);
  }
  __device__ void end_turn() {
    hopper::named_barrier_arrive(1 + (warpgroup + 1) % S::kConsumers, 2 * kWarpgroup);
  }

  // In this warpgroup's turn, starts S = Q K^T of a tile and O += P V of the tile before it, and waits for S.
  template <int kRegisters>
  __device__ void start_products(float (&s)[kRegisters], int first, bool first_of_item) {
    hopper::mbarrier_wait(&shared.v_full[v.stage], v.phase);
    hopper::mbarrier_wait(&shared.k_full[k.stage], k.phase);
    wait_for_turn();
    hopper::wgmma_own(s);
    hopper::wgmma_own(o);
    hopper::wgmma_fence();
    multiply_keys(s, first);
    hopper::wgmma_commit();
    multiply_values(first_of_item);
    hopper::wgmma_commit();
    end_turn();
    hopper::wgmma_wait<1>();
    hopper::wgmma_own(s);
  }

  __device__ void keys_done() {
    release_tile(&shared.k_empty[k.stage]);
    k.template next<S::kKeyStages>();
  }

  __device__ void wait_for_output() {
    hopper::wgmma_wait<0>();
    hopper::wgmma_own(o);
    release_tile(&shared.v_empty[v.stage]);
    v.template next<S::kValueStages>();
  }

  __device__ void rescale_output(const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i)
      o[i] *= rescale[i / 2 % 2];
  }

  __device__ void run() {
    if (warpgroup == S::kConsumers - 1) end_turn();  // opens the first turn of warpgroup 0

    // The first product has no other to run beside.
    Items items(p);
    Cursor at;
    Softmax softmax;
    softmax.reset();
    float rescale[2];
    hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
    const Item* item = &shared.item[q.stage];
    at.start(p, *item);
    float bias = bias_of(item->head);
    bool anchored;  // whether there was a tile of the item of which every row of this warpgroup saw a key
    {
      float s[64];
      const bool at_edge = at.edge(*item);
      const int view = look(at_edge);
      anchored = view & kAllSee;
      hopper::mbarrier_wait(&shared.k_full[k.stage], k.phase);
      hopper::wgmma_own(s);
      hopper::wgmma_fence();
      multiply_keys(s, 0);
      hopper::wgmma_commit();
      hopper::wgmma_wait<0>();
      hopper::wgmma_own(s);
      mask(s, view, 0);
      const float band_bias = bias * p.band[at.band].bias_unit;
      raise_maxima(s, softmax, p.scale_log2, band_bias, rescale);
      soften<Relative::kToRaised, true>(s, softmax, p.scale_log2, band_bias);
      keys_done();
      edge_done(at_edge);
      pack_weights(s, 0);
    }
    bool first_of_item = true;  // of the weights that are yet to be multiplied with V
    int last = q.stage;         // of the item whose output comes next

    // A tile, or half of it, after which more rows have a maximum; perhaps the first of an item. Whether O
    // must be rescaled.
    const auto anchoring_step = [&]<int kKeys>(int view, int first) {
      float s[kKeys / 2];
      start_products(s, first, first_of_item);
      const float band_bias = bias * p.band[at.band].bias_unit;
      mask(s, view, first);
      const bool grown = raise_maxima(s, softmax, p.scale_log2, band_bias, rescale);
      soften<Relative::kToRaised, true>(s, softmax, p.scale_log2, band_bias);
      keys_done();
      wait_for_output();
      pack_weights(s, first);
      return grown;
    };

    while (true) {
      // Tiles that every query sees, as long as they come, or one of any kind.
      int tiles = anchored ? at.full_tiles_ahead(*item) : 0;
      at.tile -= tiles;
      int view = kAllSee;
      bool fresh = false, at_edge = false;
      if (tiles == 0) {
        fresh = !at.next(p, *item);
        last = q.stage;
        if (fresh) {
          anchored = false;
          q.template next<S::kQueryStages>();
          items.next();
          if (!items.any()) break;
          hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
          item = &shared.item[q.stage];
          at.start(p, *item);
          bias = bias_of(item->head);
        }
        at_edge = at.edge(*item);
        view = look(at_edge);
        tiles = anchored;  // 1 or 0
      }
      const float band_bias = bias * p.band[at.band].bias_unit;
      bool plain = p.scale_log2 == 1 && band_bias == 0 && softmax.tops_are_zero();
      for (; tiles > 0; --tiles) {
        float s[64];
        start_products(s, 0, first_of_item);
        first_of_item = false;
        int masked = view;
        asm volatile("" : "+r"(masked));  // else the compiler makes two loops, and the second runs cold
        mask(s, masked, 0);
        bool grown = false;
        if (!(plain ? soften<Relative::kToNothing, false>(s, softmax, 1, 0)
                    : soften<Relative::kToTop, false>(s, softmax, p.scale_log2, band_bias))) {
          multiply_keys_again(s, 0);
          mask(s, view, 0);
          grown = raise_maxima(s, softmax, p.scale_log2, band_bias, rescale);
          soften<Relative::kToRaised, false>(s, softmax, p.scale_log2, band_bias);
          plain = false;
        }
        keys_done();
        wait_for_output();
        if (grown) rescale_output(rescale);
        pack_weights(s, 0);
      }
      if (!anchored) {
        const Softmax before = softmax;
        if (fresh) softmax.reset();
        const int first = view & kSecondHalf ? kHalfTile : 0;
        const bool grown = view & (kFirstHalf | kSecondHalf)
                               ? anchoring_step.template operator()<64>(view, first)
                               : anchoring_step.template operator()<128>(view, 0);
        first_of_item = fresh;
        if (fresh)
          write(before, last);
        else if (grown)
          rescale_output(rescale);
        anchored = view & kAllSee;
      }
      edge_done(at_edge);
    }

    // The last output has no other product to run beside.
    hopper::mbarrier_wait(&shared.v_full[v.stage], v.phase);
    wait_for_turn();
    hopper::wgmma_own(o);
    hopper::wgmma_fence();
    multiply_values(first_of_item);
    hopper::wgmma_commit();
    if (warpgroup < S::kConsumers - 1) end_turn();  // the last turn opens no other
    wait_for_output();
    write(softmax, last);
  }
};

}  // namespace longhalo::hopper_attention
