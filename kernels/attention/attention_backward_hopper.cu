// The gradient of attention over bands for Hopper (sm_90a). docs/performance.md says what each choice is
// worth.
//
// A block owns 128 keys of one KV head, with the sums of dk and dv in registers, and steps through the query
// tiles that see them, for every head of the group: nothing is summed across blocks but dq. Warp 0 of the
// first warpgroup deals items and loads queries by TMA, warp 1 keys, warp 2 d_out. Each of two consumer
// warpgroups owns 64 of the keys. A step is, on a tile of 64 queries, five products by wgmma:
//     S^T = K Q^T,   dP^T = V dO^T,   dV += P^T dO,   dK += dS^T Q,   dQ = dS K
// with P^T and dS^T as registers; dQ, half of its columns a warpgroup, needs the dS of both, through shared
// memory. It lags one step behind, so that the warpgroups need not keep step: one multiplies while the other
// computes exponentials. dQ goes to fp32 sums in memory in the order of the registers that it comes from, and
// a last kernel rounds these to dq.
#include <algorithm>
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/attention/hopper_backward_consumer.cuh"
#include "kernels/attention/hopper_backward_plan.hpp"
#include "kernels/attention/hopper_backward_producers.cuh"
#include "kernels/common/hopper.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/tensor_map.hpp"

namespace longhalo {
namespace hopper_backward {

template <class S>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedMemory<S>*>(raw);
  if (threadIdx.x == 0) {
    hopper::mbarrier_init(&shared.dealt_full, 1);
    hopper::mbarrier_init(&shared.dealt_empty, 32);
    hopper::mbarrier_init(&shared.keys_full, 1);
    hopper::mbarrier_init(&shared.keys_empty, kConsumerWarps * 32);
    for (int i = 0; i < S::kQueryStages; ++i) {
      hopper::mbarrier_init(&shared.q_full[i], 32);                    // the lanes of a warp
      hopper::mbarrier_init(&shared.q_empty[i], kConsumerWarps + 32);  // and the lanes that load d_out
    }
    for (int i = 0; i < S::kOutStages; ++i) {
      hopper::mbarrier_init(&shared.out_full[i], 1);
      hopper::mbarrier_init(&shared.out_empty[i], kConsumerWarps);
    }
    for (uint64_t& barrier : shared.scored)
      hopper::mbarrier_init(&barrier, kConsumerWarps);
    hopper::mbarrier_init_fence();
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kWarpgroup) {
    hopper::give_up_registers<kProducerRegisters>();
    if (thread < 32)
      produce_queries<S>(p, shared, thread);
    else if (thread < 64)
      produce_keys<S>(p, shared, thread - 32);
    else if (thread < 96)
      produce_d_out<S>(p, shared, thread - 64);
  } else {
    hopper::take_registers<kConsumerRegisters>();
    Consumer<S>(p, shared, (thread - kWarpgroup) / kWarpgroup, thread % kWarpgroup).run();
  }
#endif
}

// The sums of one query tile and head, times the scale, to rows of dq.
template <int kDim>
__global__ void __launch_bounds__(kConsumers* kWarpgroup)
    round_dq_kernel(const float* sums, int queries, int heads, float scale, __nv_bfloat16* dq) {
  constexpr int kColumns = kDim / kConsumers, kRow = kDim + 8;
  __shared__ __align__(16) __nv_bfloat16 tile[kQueryTile][kRow];
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int half = static_cast<int>(threadIdx.x) / kWarpgroup, lane = thread % 32;
  const float4* from =
      reinterpret_cast<const float4*>(sums + (static_cast<int64_t>(blockIdx.x) * kConsumers + half) *
                                                 (kQueryTile * kColumns)) +
      (thread / 32) * (kColumns / 8 * 32) + lane;
  const int row = thread / 32 * 16 + lane / 4, column = half * kColumns + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    const float4 x = from[i * 32];
    *reinterpret_cast<uint32_t*>(&tile[row][column + 8 * i]) = pack_bf16(x.x * scale, x.y * scale);
    *reinterpret_cast<uint32_t*>(&tile[row + 8][column + 8 * i]) = pack_bf16(x.z * scale, x.w * scale);
  }
  __syncthreads();
  const int head = static_cast<int>(blockIdx.x) % heads;
  const int first = static_cast<int>(blockIdx.x) / heads * kQueryTile;
  constexpr int kPieces = kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kQueryTile * kPieces; i += kConsumers * kWarpgroup) {
    const int r = i / kPieces, piece = i % kPieces;
    if (first + r >= queries) return;
    *reinterpret_cast<uint4*>(dq + (static_cast<int64_t>(first + r) * heads + head) * kDim + piece * 8) =
        *reinterpret_cast<const uint4*>(&tile[r][piece * 8]);
  }
}

template <int kDim>
void launch(StreamHandle stream, const AttentionGradient<BFloat16>& gradient, const float* lse_log2,
            const float* delta, float* workspace) {
  using S = Shape<kDim>;
  const Attention<BFloat16>& a = gradient.forward;
  const Plan plan = plan_of(gradient);
  check(a.queries < kRowLimit, "the queries of one launch fit 30 bits");
  Parameters p;
  p.queries = static_cast<int>(a.queries);
  p.padded_queries = static_cast<int>(attention_backward_padded(a.queries));
  p.query_tiles = (p.queries + kQueryTile - 1) / kQueryTile;
  p.heads = static_cast<int>(a.heads), p.kv_heads = static_cast<int>(a.kv_heads);
  p.group = p.heads / p.kv_heads;
  p.first_query = a.first_query, p.doc_start = a.doc_start;
  p.lse_log2 = lse_log2, p.delta = delta, p.landmark_bias = a.landmark_bias;
  p.scale = a.scale, p.scale_log2 = a.scale * std::numbers::log2e_v<float>;
  p.dq = workspace;
  p.bias = plan.bias_lines == 0 ? nullptr : workspace + plan.dq + plan.partials;
  p.dealt = reinterpret_cast<unsigned*>(workspace + plan.dq + plan.partials + plan.bias);
  p.rounds = p.dealt + 1;
  p.q = head_rows_map(a.q, a.queries, a.heads, kDim, a.heads * kDim, kQueryTile);
  p.d_out = head_rows_map(gradient.d_out, a.queries, a.heads, kDim, a.heads * kDim, kQueryTile);
  p.bands = static_cast<int>(plan.bands.size());
  p.blocks = static_cast<int>(plan.blocks), p.block_tiles = static_cast<int>(plan.block_tiles);
  p.unsliced_bands = p.whole_tiles = 0;
  int64_t unsliced_tiles = 0, bias_line = 0;
  float* partials = workspace + plan.dq;
  for (int i = 0; i < p.bands; ++i) {
    const BandPlan& one = plan.bands[static_cast<size_t>(i)];
    const int64_t width = a.kv_heads * kDim, floats = one.keys.count * width;
    check(one.keys.count < kRowLimit, "the keys of a band fit 30 bits");
    BandPart& part = p.band[i];
    part.rows = band_rows(one.keys, width);
    part.k = head_rows_map(one.keys.k, one.keys.count, a.kv_heads, kDim, one.keys.row_stride, kKeyTile);
    part.v = head_rows_map(one.keys.v, one.keys.count, a.kv_heads, kDim, one.keys.row_stride, kKeyTile);
    part.tiles = static_cast<int>(one.tiles);
    part.sliced = one.sliced;
    part.whole = static_cast<int>(one.whole), part.whole_end = static_cast<int>(one.whole_end);
    if (!one.sliced) {
      ++p.unsliced_bands;
      unsliced_tiles += part.tiles;
      p.whole_tiles += part.whole_tiles();
    }
    part.first_bias = static_cast<int>(bias_line);
    if (one.keys.band.stride > 1) bias_line += one.tiles * (one.sliced ? plan.blocks : 1);
    part.dk = one.sliced ? partials : one.to.dk;
    part.dv = one.sliced ? partials + floats : one.to.dv;
    part.row_stride = one.sliced ? width : one.to.row_stride;
    part.block_stride = one.sliced ? 2 * floats : 0;
    partials += plan.blocks * part.block_stride;
  }
  int64_t items = unsliced_tiles * p.kv_heads;
  check(items < kRowLimit, "the tiles of one launch fit 30 bits");
  p.round_items = p.whole_tiles * p.kv_heads, p.unsliced_items = static_cast<int>(items);
  for (int block = 0; block < p.blocks; ++block)
    for (int i = p.unsliced_bands; i < p.bands; ++i)
      items += static_cast<int64_t>(tiles_begun(p, p.band[i], block)) * p.kv_heads;
  check(items < kRowLimit, "the tiles of one launch fit 30 bits");
  p.items = static_cast<int>(items);

  check_cuda(
      cudaMemsetAsync(workspace + plan.dq, 0, static_cast<size_t>(plan.partials) * sizeof(float), stream),
      "clearing sums of blocks");
  check_cuda(cudaMemsetAsync(p.dealt, 0, static_cast<size_t>(Plan::kCounters) * sizeof(float), stream),
             "clearing counters");
  check_cuda(cudaMemsetAsync(p.dq, 0, static_cast<size_t>(plan.dq) * sizeof(float), stream), "clearing dq");
  if (p.bias != nullptr)
    check_cuda(cudaMemsetAsync(p.bias, 0, static_cast<size_t>(plan.bias) * sizeof(float), stream),
               "clearing sums of the landmark bias");
  constexpr int kSharedBytes = sizeof(SharedMemory<S>);
  static_assert(kSharedBytes <= 227 * 1024);
  static const cudaError_t opted_in =
      cudaFuncSetAttribute(backward_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(opted_in, "asking for shared memory");
  if (p.items > 0) {
    const int blocks = std::min(p.items, current_device_info().multiprocessors);
    backward_kernel<S><<<blocks, kThreads, kSharedBytes, stream>>>(p);
    check_launch("attention_backward_hopper", stream);
  }
  const int64_t rounding_blocks = static_cast<int64_t>(p.query_tiles) * p.heads;
  check(rounding_blocks <= INT32_MAX, "a grid has less than 2^31 blocks");
  round_dq_kernel<kDim><<<static_cast<unsigned>(rounding_blocks), kConsumers * kWarpgroup, 0, stream>>>(
      p.dq, p.queries, p.heads, p.scale, reinterpret_cast<__nv_bfloat16*>(gradient.dq));
  check_launch("attention_backward_hopper: dq", stream);
  for (int i = 0; i < p.bands; ++i) {
    const BandPlan& one = plan.bands[static_cast<size_t>(i)];
    if (one.sliced)
      add_key_partials(stream, {p.band[i].dk, plan.blocks, one.keys.count, a.kv_heads * kDim, one.to.dk,
                                one.to.dv, one.to.row_stride});
  }
  if (p.bias != nullptr)
    add_bias_partials(stream, p.bias, plan.bias_lines, a.heads, gradient.d_landmark_bias);
}

}  // namespace hopper_backward

int64_t attention_backward_hopper_floats(const AttentionGradient<BFloat16>& gradient) {
  return hopper_backward::plan_of(gradient).floats();
}

void attention_backward_hopper(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                               const float* lse_log2, const float* delta, float* workspace) {
  gradient.forward.head_dim == 128
      ? hopper_backward::launch<128>(stream, gradient, lse_log2, delta, workspace)
      : hopper_backward::launch<64>(stream, gradient, lse_log2, delta, workspace);
}

}  // namespace longhalo
