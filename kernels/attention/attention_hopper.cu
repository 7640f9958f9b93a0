// Attention over bands for Hopper (sm_90a): one persistent block a multiprocessor works through (query tile,
// head) items. docs/performance.md says what each choice is worth.
//
// A block has two roles. Of the first warpgroup, warp 0 loads queries and keys by TMA, warp 1 values, into
// rings of shared-memory stages; warp 2 stores results. Each consumer warpgroup owns 64 queries: S = Q K^T
// and O += P V by wgmma, P in registers. The product S of one key tile runs while the softmax of the one
// before is still to be multiplied with V, and the warpgroups take turns at the tensor cores, so that one
// computes exponentials while another multiplies. This goes on across items: the next item's first product is
// started before the last one's output is written.
//
// Of each band only the key tiles that some query of the tile sees are visited. What queries see of those
// that not all see warp 0 finds out ahead. All tiles go through one loop but an item's first, until every row
// has seen a key; of these a warpgroup multiplies half where its queries see no more. What runs once an item
// runs from cold instruction caches, so there is little of it.
//
// Scores are in units of log2. What they are taken relative to may be far from a row's maximum: where 0 will
// do, it is 0, and where besides the queries hold the scale (kExponentScale), weights are the scores'
// exponentials and nothing else. Maxima are looked for only in an item's first tiles, and where weights grow
// too large; O is rescaled only then.
// NOTE: a row of NaN has its warp make every tile again, by the slow products of multiply_keys_again().
#include <algorithm>
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/attention/hopper_consumer.cuh"
#include "kernels/attention/hopper_producers.cuh"
#include "kernels/attention/hopper_tiles.cuh"
#include "kernels/common/hopper.cuh"
#include "kernels/common/tensor_map.hpp"

namespace longhalo {
namespace hopper_attention {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) hopper_kernel(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedMemory<S>*>(raw);
  constexpr int kConsumerWarps = 4 * S::kConsumers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kQueryStages; ++i) {
      hopper::mbarrier_init(&shared.q_full[i], 32);  // the lanes of a warp
      hopper::mbarrier_init(&shared.q_empty[i], 2);  // the warps that load values and store results
      hopper::mbarrier_init(&shared.out_full[i], 32 * kConsumerWarps);
    }
    for (int i = 0; i < S::kKeyStages; ++i) {
      hopper::mbarrier_init(&shared.k_full[i], 1);
      hopper::mbarrier_init(&shared.k_empty[i], kConsumerWarps * S::kCluster);
    }
    for (int i = 0; i < S::kValueStages; ++i) {
      hopper::mbarrier_init(&shared.v_full[i], 1);
      hopper::mbarrier_init(&shared.v_empty[i], kConsumerWarps * S::kCluster);
    }
    for (int i = 0; i < S::kEdgeStages; ++i) {
      hopper::mbarrier_init(&shared.edge_full[i], 32);
      hopper::mbarrier_init(&shared.edge_empty[i], 32 * kConsumerWarps);
    }
    hopper::mbarrier_init_fence();
  }
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    hopper::give_up_registers<S::kProducerRegisters>();
    const int block = S::kCluster > 1 ? hopper::cluster_block() : 0;
    if (threadIdx.x < 32)
      produce_keys<S>(p, shared, static_cast<int>(threadIdx.x), block);
    else if (threadIdx.x < 64)
      produce_values<S>(p, shared, static_cast<int>(threadIdx.x) - 32, block);
    else if (threadIdx.x < 96)
      store_output<S>(p, shared, static_cast<int>(threadIdx.x) - 64);
  } else {
    hopper::take_registers<S::kConsumerRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    Consumer<S>(p, shared, thread / kWarpgroup, thread % kWarpgroup).run();
  }
  // No block leaves while another may still write to its shared memory.
  __syncthreads();
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
#endif
}

template <class S>
void launch(StreamHandle stream, const Attention<BFloat16>& a) {
  constexpr int kDim = S::kDim;
  check(a.queries < kRowLimit, "the queries of one launch fit 30 bits");
  Parameters p;
  p.bands = static_cast<int>(a.bands.size());
  p.queries = static_cast<int>(a.queries);
  p.heads = static_cast<int>(a.heads);
  p.group = static_cast<int>(a.heads / a.kv_heads);
  p.query_tiles = (p.queries + S::kQueryTile - 1) / S::kQueryTile;
  check(static_cast<int64_t>(p.query_tiles) * p.heads < kRowLimit, "the tiles of one launch fit 30 bits");
  p.first_query = a.first_query;
  p.doc_start = a.doc_start;
  p.landmark_bias = a.landmark_bias;
  p.scale_log2 = a.scale * std::numbers::log2e_v<float>;
  p.lse = a.lse;
  p.q = head_rows_map(a.q, a.queries, a.heads, kDim, a.heads * kDim, S::kQueryTile);
  p.out = head_rows_map(a.out, a.queries, a.heads, kDim, a.heads * kDim, S::kQueryTile);
  constexpr int kBoxRows = kKeyTile / S::kCluster;
  p.fallback_band = -1;
  for (int i = 0; i < p.bands; ++i) {
    const BandKeys<BFloat16>& keys = a.bands[static_cast<size_t>(i)];
    check(keys.count < kRowLimit, "the keys of a band fit 30 bits");
    p.band[i] = {keys.band, keys.first_key, static_cast<int>(keys.count), keys.band.stride > 1 ? 1.0F : 0.0F};
    if (keys.count == 0) continue;
    const int64_t stride = keys.row_stride > 0 ? keys.row_stride : a.kv_heads * kDim;
    p.k[i] = head_rows_map(keys.k, keys.count, a.kv_heads, kDim, stride, kBoxRows);
    p.v[i] = head_rows_map(keys.v, keys.count, a.kv_heads, kDim, stride, kBoxRows);
    p.fallback_band = i;
  }
  if (p.fallback_band < 0) {  // no keys at all: any readable rows will do, they are masked
    p.fallback_band = 0;
    p.k[0] = p.v[0] = head_rows_map(a.q, a.queries, a.heads, kDim, a.heads * kDim, kBoxRows);
  }
  constexpr int kSharedBytes = sizeof(SharedMemory<S>);
  static_assert(kSharedBytes <= 227 * 1024);
  static const cudaError_t opted_in =
      cudaFuncSetAttribute(hopper_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(opted_in, "asking for shared memory");

  cudaLaunchConfig_t config{};
  config.gridDim =
      std::min(p.query_tiles * p.heads, current_device_info().multiprocessors / S::kCluster * S::kCluster);
  config.blockDim = S::kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {S::kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, hopper_kernel<S>, p), "launching attention_hopper");
  check_launch("attention_hopper", stream);
}

template <int kDim>
void launch_shape(StreamHandle stream, const Attention<BFloat16>& a) {
  const bool pairs = a.heads / a.kv_heads % 2 == 0;
  pairs ? launch<Shape<kDim, 2>>(stream, a) : launch<Shape<kDim, 1>>(stream, a);
}

}  // namespace hopper_attention

void attention_hopper(StreamHandle stream, const Attention<BFloat16>& problem) {
  problem.head_dim == 128 ? hopper_attention::launch_shape<128>(stream, problem)
                          : hopper_attention::launch_shape<64>(stream, problem);
}

}  // namespace longhalo
