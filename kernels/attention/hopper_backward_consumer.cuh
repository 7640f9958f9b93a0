// The consumer warpgroups of a block of the Hopper kernel of attention's gradient
// (attention_backward_hopper.cu says what they do): the five products of each step, what lies between, and dk
// and dv at an item's end.
#pragma once

#include <numbers>

#include "kernels/attention/hopper_backward_tiles.cuh"
#include "kernels/common/hopper.cuh"
#include "kernels/common/mma.cuh"

namespace longhalo::hopper_backward {

// One consumer warpgroup. Its rows are keys, its columns queries: register 4 j + r of a thread holds key
// row() + 8 (r / 2), query 8 j + 2 (lane % 4) + r % 2.
template <class S>
struct Consumer {
  static constexpr int kDim = S::kDim;
  static constexpr int kDqColumns = kDim / kConsumers;
  const Parameters& p;
  SharedMemory<S>& shared;
  const int warpgroup, warp, lane;
  float dk[kDim / 2], dv[kDim / 2];
  float s[32], dp[32];
  float narrow_dq[kDim == 128 ? 1 : kDqColumns / 2];
  uint32_t weights[16], gradients[16];
  Ring q, out, buffer;  // the step whose scores are made next, or were
  int previous = 0;     // the buffer of the step before
  uint32_t previous_phase = 0;

  __device__ Consumer(const Parameters& parameters, SharedMemory<S>& memory, int group, int thread)
      : p(parameters),
        shared(memory),
        warpgroup(uniform(group)),
        warp(uniform(thread / 32)),
        lane(thread % 32) {}

  __device__ int row() const { return 64 * warpgroup + 16 * warp + lane / 4; }  // and row() + 8
  __device__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(barrier);
  }

  __device__ void multiply_transposed(float (&to)[32], const uint8_t* keys, const uint8_t* queries) const {
    const uint64_t a = hopper::wgmma_operand(keys + warpgroup * 64 * 128, 0);
    const uint64_t b = hopper::wgmma_operand(queries, 0);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      hopper::wgmma_ss(to, hopper::wgmma_advance(a, i / 4 * kKeyTile * 128 + i % 4 * 32),
                       hopper::wgmma_advance(b, i / 4 * kQueryTile * 128 + i % 4 * 32), i > 0);
  }
  __device__ void add_product(float (&to)[kDim / 2], const uint32_t (&left)[16], const uint8_t* queries,
                              bool first) const {
    const uint64_t b = hopper::wgmma_operand(queries, kQueryTile * 128);
#pragma unroll
    for (int i = 0; i < kQueryTile / 16; ++i) {
      const uint32_t a[4] = {left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3]};
      hopper::wgmma_rs(to, a, hopper::wgmma_advance(b, i * 16 * 128), i > 0 || !first);
    }
  }

  __device__ void start_scores() {
    multiply_transposed(s, shared.k, shared.q[q.stage]);
    hopper::wgmma_commit();
  }
  __device__ void start_weight_gradients() {
    multiply_transposed(dp, shared.v, shared.d_out[out.stage]);
    hopper::wgmma_commit();
  }
  // dQ takes the registers of dP, which is not there yet.
  __device__ auto& dq() {
    if constexpr (kDim == 128)
      return dp;
    else
      return narrow_dq;
  }
  __device__ void start_dq() {
    const uint64_t a = hopper::wgmma_operand(shared.d_scores[previous], 0);
    const uint64_t b = hopper::wgmma_operand(
        kDim == 128 ? shared.k + warpgroup * kKeyTile * 128 : shared.k + warpgroup * kDqColumns * 2, 0);
#pragma unroll
    for (int i = 0; i < kKeyTile / 16; ++i)
      hopper::wgmma_ss_rows(dq(), hopper::wgmma_advance(a, i * 16 * 128),
                            hopper::wgmma_advance(b, i * 16 * 128), i > 0);
    hopper::wgmma_commit();
  }
  // dq of this warp to shared memory, from where send_dq() adds it to the sums, behind a fence, if it is of
  // any step.
  __device__ void store_dq() {
    hopper::bulk_wait_read();
    __syncwarp();
    float4* const own = reinterpret_cast<float4*>(shared.dq[4 * warpgroup + warp]) + lane;
#pragma unroll
    for (int i = 0; i < kDqColumns / 8; ++i)
      own[32 * i] = make_float4(dq()[4 * i], dq()[4 * i + 1], dq()[4 * i + 2], dq()[4 * i + 3]);
  }
  __device__ void send_dq(bool is_there, const Place& of) {
    constexpr int kFloats = kQueryTile * kDqColumns / 4;  // of a warp
    __syncwarp();
    const int64_t tile = static_cast<int64_t>(of.query_tile) * p.heads + of.head;
    hopper::bulk_add(p.dq + ((tile * kConsumers + warpgroup) * 4 + warp) * kFloats,
                     shared.dq[4 * warpgroup + warp], kFloats * static_cast<int>(sizeof(float)),
                     lane == 0 && is_there);
    hopper::bulk_commit();
  }

  // Weights to zero where a query does not see a key. The gradients of these scores are zero with them.
  __device__ void mask() {
    const short4* seen = reinterpret_cast<const short4*>(shared.seen[q.stage]) + lane % 4;
    const int key = row();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const short4 two = seen[4 * j];  // of two queries: the first key that is seen, and how many
      const unsigned from[2] = {static_cast<unsigned>(key - two.x), static_cast<unsigned>(key - two.z)};
      const unsigned count[2] = {static_cast<unsigned>(two.y), static_cast<unsigned>(two.w)};
#pragma unroll
      for (int r = 0; r < 4; ++r)
        s[4 * j + r] = from[r % 2] + r / 2 * 8 < count[r % 2] ? s[4 * j + r] : 0;
    }
  }
  // What belongs to this thread's queries 8 j and 8 j + 1.
  __device__ void load_columns(const float* from, float2 (&to)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      to[j] = reinterpret_cast<const float2*>(from)[4 * j + lane % 4];
  }
  __device__ void scores_to_weights(const float2 (&lse)[8], float bias) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float offset[2] = {bias - lse[j].x, bias - lse[j].y};
#pragma unroll
      for (int r = 0; r < 4; ++r)
        s[4 * j + r] = exp2_fast(fmaf(s[4 * j + r], p.scale_log2, offset[r % 2]));
    }
  }
  __device__ void weights_to_gradients(const float2 (&delta)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        dp[4 * j + r] = s[4 * j + r] * (dp[4 * j + r] - (r % 2 == 0 ? delta[j].x : delta[j].y));
  }
  static __device__ void pack(const float (&from)[32], uint32_t (&to)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      to[i] = pack_bf16(from[2 * i], from[2 * i + 1]);
  }
  // gradients to rows [key, 64 queries] of 128 bytes, swizzled as TMA would.
  __device__ void store_gradients() const {
    const int key = 64 * warpgroup + 16 * warp + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t line = hopper::shared_address(shared.d_scores[buffer.stage]) + key * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      hopper::store_matrices(line + ((j + lane / 16) ^ (key % 8)) * 16, gradients[2 * j],
                             gradients[2 * j + 1], gradients[2 * j + 2], gradients[2 * j + 3]);
  }

  __device__ void add_bias(const Item& item, int head, float sum) const {
    const BandPart& part = p.band[item.band];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    const int64_t line = part.first_bias + item.tile + (part.sliced ? item.block * part.tiles : 0);
    if (lane == 0) p.bias[((line * kConsumerWarps) + 4 * warpgroup + warp) * p.heads + head] = sum;
  }

  __device__ void write(const Item& item) const {
    const BandPart& part = p.band[item.band];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = item.tile * kKeyTile + row() + 8 * half;
      if (key >= part.rows.count) continue;
      const int64_t at_key =
          item.block * part.block_stride + key * part.row_stride + item.kv_head * kDim + 2 * (lane % 4);
      float* const to_k = part.dk + at_key;
      float* const to_v = part.dv + at_key;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float k[2] = {dk[4 * j + 2 * half] * p.scale, dk[4 * j + 2 * half + 1] * p.scale};
        const float v[2] = {dv[4 * j + 2 * half], dv[4 * j + 2 * half + 1]};
        if (part.sliced) {
          *reinterpret_cast<float2*>(to_k + 8 * j) = make_float2(k[0], k[1]);
          *reinterpret_cast<float2*>(to_v + 8 * j) = make_float2(v[0], v[1]);
        } else {  // nobody else adds here
          hopper::add_to_global(to_k + 8 * j, k[0], k[1]);
          hopper::add_to_global(to_v + 8 * j, v[0], v[1]);
        }
      }
    }
  }

  // The warpgroups take turns at the tensor cores: 1 + w is the barrier that opens warpgroup w's turn. Else
  // both would soon compute exponentials at the same time. A turn has all five products of a step, so that
  // the last of them does not wait for the other warpgroup's.
  __device__ void wait_for_turn() const {
    hopper::named_barrier_wait(1 + warpgroup, 2 * kWarpgroup);
  }
  __device__ void end_turn() const {
    hopper::named_barrier_arrive(1 + (warpgroup + 1) % kConsumers, 2 * kWarpgroup);
  }

  // Starts dv += P^T dO and dk += dS^T Q of the step.
  __device__ void start_key_gradients(bool first) {
    hopper::wgmma_own(s);
    hopper::wgmma_own(dv);
    hopper::wgmma_own(dk);
    hopper::wgmma_fence();
    add_product(dv, weights, shared.d_out[out.stage], first);
    add_product(dk, gradients, shared.q[q.stage], first);
    hopper::wgmma_commit();
  }
  // Waits for them, or for all but the scores of the next step.
  template <int kPending>
  __device__ void finish_key_gradients(uint64_t* query_read, uint64_t* out_read) {
    hopper::wgmma_wait<kPending>();
    hopper::wgmma_own(dv);
    hopper::wgmma_own(dk);
    arrive(query_read);
    arrive(out_read);
  }
  // dQ of the step before. There is none before an item's first; what is multiplied then goes nowhere.
  __device__ void make_dq(bool first) {
    if (!first) hopper::mbarrier_wait(&shared.scored[previous], previous_phase);
    start_dq();
    hopper::wgmma_wait<0>();
    hopper::wgmma_own(dq());
    store_dq();
  }
  __device__ void end_step() {
    arrive(&shared.scored[buffer.stage]);
    previous = buffer.stage, previous_phase = buffer.phase;
    buffer.template next<S::kBuffers>();
  }

  __device__ void run() {
    if (warpgroup == kConsumers - 1) end_turn();  // opens the first turn of warpgroup 0
    uint32_t keys_phase = 0;
    for (;; keys_phase ^= 1) {
      hopper::mbarrier_wait(&shared.keys_full, keys_phase);
      const Item item{uniform(shared.item.band), uniform(shared.item.tile), uniform(shared.item.kv_head),
                      uniform(shared.item.block)};
      if (item.band == kNoBand) break;
      const bool has_bias = uniform(p.band[item.band].rows.band.stride > 1);
      float bias = 0, bias_sum = 0;
      hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
      hopper::mbarrier_wait(&shared.out_full[out.stage], out.phase);
      hopper::wgmma_own(s);
      hopper::wgmma_own(dp);
      hopper::wgmma_fence();
      start_scores();
      start_weight_gradients();
      Place before{0, 0}, stored{0, 0};  // of the last step, and of the dq that waits to be sent
      bool first = true, is_stored = false;
      while (true) {
        const Step step = shared.step[q.stage];
        const int flags = uniform(step.flags);
        const Place here{uniform(step.query_tile), uniform(step.head)};
        if (has_bias && p.landmark_bias != nullptr && (first || here.head != before.head))
          bias = p.landmark_bias[here.head] * std::numbers::log2e_v<float>;
        float2 of_query[8];
        load_columns(shared.lse_log2[q.stage], of_query);
        hopper::wgmma_wait<1>();
        hopper::wgmma_own(s);
        scores_to_weights(of_query, bias);
        if (flags & kEdge) mask();
        load_columns(shared.delta[q.stage], of_query);
        hopper::wgmma_wait<0>();
        hopper::wgmma_own(dp);
        weights_to_gradients(of_query);
        if (has_bias) {
#pragma unroll
          for (int i = 0; i < 8; ++i)
            bias_sum += (dp[i] + dp[8 + i]) + (dp[16 + i] + dp[24 + i]);
          if (flags & kHeadDone) {
            if (p.bias != nullptr) add_bias(item, here.head, bias_sum);
            bias_sum = 0;
          }
        }
        pack(s, weights);
        pack(dp, gradients);
        store_gradients();
        hopper::async_proxy_fence();  // of dq too
        send_dq(is_stored, stored);
        wait_for_turn();
        start_key_gradients(first);
        uint64_t* const query_read = &shared.q_empty[q.stage];
        uint64_t* const out_read = &shared.out_empty[out.stage];
        q.template next<S::kQueryStages>();
        out.template next<S::kOutStages>();
        if (flags & kItemDone) {
          finish_key_gradients<0>(query_read, out_read);
          make_dq(first);
          end_turn();
          hopper::async_proxy_fence();
          send_dq(!first, before);
          before = here;
          end_step();
          break;
        }
        hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
        start_scores();
        finish_key_gradients<1>(query_read, out_read);
        make_dq(first);
        end_step();
        static_assert(S::kOutStages > 1,
                      "d_out of the next step must come while the other warpgroup reads this one's");
        hopper::mbarrier_wait(&shared.out_full[out.stage], out.phase);
        hopper::wgmma_own(dp);
        hopper::wgmma_fence();
        start_weight_gradients();
        end_turn();
        is_stored = !first, stored = before;
        before = here;
        first = false;
      }
      make_dq(false);
      hopper::async_proxy_fence();
      send_dq(true, before);
      hopper::mbarrier_arrive(&shared.keys_empty);  // every lane has read the item
      write(item);
    }
    if (warpgroup == 0) wait_for_turn();  // closes the last turn
    hopper::bulk_wait();
  }
};

}  // namespace longhalo::hopper_backward
