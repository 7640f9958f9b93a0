// int8 matrix products for Hopper (sm_90a): persistent blocks work through tiles of c. A producer warp loads
// tiles of a and W by TMA into a ring of shared-memory stages; two consumer warpgroups multiply them by
// wgmma, each 64 rows of the tile, scale the sums and hand them, by way of shared memory, to the copy engine,
// which writes them or adds them to c beside the next tile's products.
//
// Large products: tiles of 128 x 256, in clusters of two blocks that have the same columns; each loads half
// of W's tile for both. Products of few rows, as of decoding, are bound by reading W: narrow tiles, so that
// all multiprocessors read, many stages, one consumer, no clusters, and of a's tile only the rows there are.
#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "kernels/common/hopper.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/tensor_map.hpp"
#include "kernels/matmul/int8_matmul.hpp"

namespace longhalo {
namespace int8_product {

using hopper::Ring;

constexpr int kWarpgroup = 128;
constexpr int kDepth = 128;  // of the sum, in a stage
constexpr int kBand = 16;    // row tiles that blocks walk together, so that a and W are found in L2

// Of a block: consumers of 64 rows each, and columns.
template <int kConsumerCount, int kTileColumns, int kClusterBlocks>
struct Shape {
  static constexpr int kConsumers = kConsumerCount;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kCluster = kClusterBlocks;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kOutColumns = std::min(64, kColumns);  // that the copy engine writes at once
  static constexpr int kParts = kColumns / kOutColumns;
  static constexpr int kOutBuffers = std::min(2, kParts);  // by turns, so a tile begins with the first again
  static_assert(kParts % kOutBuffers == 0);
  static constexpr int kRowBytes = kRows * kDepth;
  static constexpr int kColumnBytes = kColumns * kDepth;
  static constexpr int kStages = 192 * 1024 / (kRowBytes + kColumnBytes);
};

struct Parameters {
  CUtensorMap a, w, c;
  const float* a_scales;
  const float* w_scales;
  int m, out;
  int loaded_rows;  // of a tile of a; what lies in the others' place is multiplied, and not written
  int steps;        // stages a tile
  int row_tiles, column_tiles;  // row tiles of whole clusters
};

template <class S>
struct SharedMemory {
  alignas(1024) uint8_t a[S::kStages][S::kRowBytes];
  alignas(1024) uint8_t w[S::kStages][S::kColumnBytes];
  alignas(1024) uint8_t out[S::kConsumers][S::kOutBuffers][64 * S::kOutColumns * sizeof(BFloat16)];
  float w_scales[S::kConsumers][S::kColumns];
  uint64_t full[S::kStages], empty[S::kStages];
};

// The tiles of a cluster: bands of kBand row tiles, in each column after column.
struct Tiles {
  const Parameters& p;
  int tile, row = 0, column = 0;

  __device__ explicit Tiles(const Parameters& parameters, int first) : p(parameters), tile(first) {
    locate();
  }
  __device__ bool any() const { return tile < p.row_tiles * p.column_tiles; }
  __device__ void next(int clusters) {
    tile += clusters;
    locate();
  }
  __device__ void locate() {
    const int band = tile / (kBand * p.column_tiles), inside = tile % (kBand * p.column_tiles);
    const int height = max(1, min(kBand, p.row_tiles - band * kBand));
    row = band * kBand + inside % height;
    column = inside / height;
  }
};

template <class S>
__device__ void produce(const Parameters& p, SharedMemory<S>& shared, int cluster, int clusters, int block) {
  Ring ring;
  for (Tiles tiles(p, cluster); tiles.any(); tiles.next(clusters)) {
    const int first_row = (tiles.row * S::kCluster + block) * S::kRows;
    const int first_column = tiles.column * S::kColumns;
    for (int step = 0; step < p.steps; ++step) {
      hopper::mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &shared.full[ring.stage];
      hopper::mbarrier_arrive_expect(full, p.loaded_rows * kDepth + S::kColumnBytes);
      hopper::tma_load(shared.a[ring.stage], &p.a, step * kDepth, 0, first_row, full);
      if constexpr (S::kCluster == 1) {
        hopper::tma_load(shared.w[ring.stage], &p.w, step * kDepth, 0, first_column, full);
      } else {
        constexpr int kShare = S::kColumns / S::kCluster;
        hopper::tma_load_multicast(shared.w[ring.stage] + block * kShare * kDepth, &p.w, step * kDepth, 0,
                                   first_column + block * kShare, full, (1 << S::kCluster) - 1);
      }
      ring.next<S::kStages>();
    }
  }
}

// One consumer warpgroup: 64 rows of every tile.
template <class S, bool kAdd>
struct Consumer {
  static constexpr int kScales = (S::kColumns + kWarpgroup - 1) / kWarpgroup;  // that a thread fetches
  const Parameters& p;
  SharedMemory<S>& shared;
  const int warpgroup, thread, warp, lane;
  int32_t d[S::kColumns / 2];
  Ring ring;
  float row_scale[2];
  float column_scale[kScales];

  __device__ Consumer(const Parameters& parameters, SharedMemory<S>& memory, int group, int index)
      : p(parameters), shared(memory), warpgroup(group), thread(index), warp(index / 32), lane(index % 32) {}

  __device__ void release(int stage) const {
    if constexpr (S::kCluster == 1) {
      if (lane == 0) hopper::mbarrier_arrive(&shared.empty[stage]);
    } else {  // a stage is refilled for the whole cluster at once: each block hears of every reader
      if (lane < S::kCluster) hopper::mbarrier_arrive_at(&shared.empty[stage], lane);
    }
  }
  __device__ void wait_for_others() const { hopper::named_barrier_wait(1 + warpgroup, kWarpgroup); }

  // Long before they are needed.
  __device__ void fetch_scales(int first_row, int first_column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp * 16 + lane / 4 + 8 * half;
      row_scale[half] = row < p.m ? p.a_scales[row] : 0;
    }
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int column = thread + i * kWarpgroup;
      column_scale[i] =
          column < S::kColumns && first_column + column < p.out ? p.w_scales[first_column + column] : 0;
    }
  }

  __device__ void multiply() {
    int before = 0;  // the stage of the step before
    for (int step = 0; step < p.steps; ++step) {
      hopper::mbarrier_wait(&shared.full[ring.stage], ring.phase);
      const uint64_t a = hopper::wgmma_operand(shared.a[ring.stage] + warpgroup * 64 * kDepth, 0);
      const uint64_t w = hopper::wgmma_operand(shared.w[ring.stage], 0);
      hopper::wgmma_own(d);
      hopper::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDepth / 32; ++i)
        hopper::wgmma_ss(d, hopper::wgmma_advance(a, 32 * i), hopper::wgmma_advance(w, 32 * i), step + i);
      hopper::wgmma_commit();
      hopper::wgmma_wait<1>();
      if (step > 0) release(before);
      before = ring.stage;
      ring.next<S::kStages>();
    }
    hopper::wgmma_wait<0>();
    hopper::wgmma_own(d);
    release(before);
  }

  // Two neighbouring sums of row `half` of this thread, scaled, in bf16.
  __device__ uint32_t scaled(int at, int half, float2 scales) const {
    const int* const sums = d + 4 * at + 2 * half;
    return pack_bf16(__fmul_rn(__int2float_rn(sums[0]), __fmul_rn(row_scale[half], scales.x)),
                     __fmul_rn(__int2float_rn(sums[1]), __fmul_rn(row_scale[half], scales.y)));
  }

  __device__ void write(int first_row, int first_column) {
    float* const scales = shared.w_scales[warpgroup];
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      if (thread + i * kWarpgroup < S::kColumns) scales[thread + i * kWarpgroup] = column_scale[i];
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      uint8_t* const out = shared.out[warpgroup][part % S::kOutBuffers];
      if (thread == 0) hopper::bulk_wait_read<S::kOutBuffers - 1>();
      wait_for_others();
      // Lane l names row l % 16, and of two neighbouring pieces of 16 bytes the one l / 16, as TMA's swizzle
      // lays it.
      const int row = warp * 16 + lane % 16;
      constexpr int kLine = S::kOutColumns * sizeof(BFloat16);
      const uint32_t line = hopper::shared_address(out) + row * kLine;
      const int swizzle = kLine == 128 ? row % 8 : row / 2 % 4;
#pragma unroll
      for (int piece = 0; piece < S::kOutColumns / 8; piece += 2) {
        const int at = part * (S::kOutColumns / 8) + piece;
        const auto* const own = reinterpret_cast<const float2*>(scales + 2 * (lane % 4));
        const float2 left = own[4 * at], right = own[4 * (at + 1)];
        hopper::store_matrices(line + ((piece + lane / 16) ^ swizzle) * 16, scaled(at, 0, left),
                               scaled(at, 1, left), scaled(at + 1, 0, right), scaled(at + 1, 1, right));
      }
      hopper::async_proxy_fence();
      wait_for_others();
      if (thread == 0) {
        const int column = first_column + part * S::kOutColumns;
        kAdd ? hopper::tma_add(&p.c, column, 0, first_row, out)
             : hopper::tma_store(&p.c, column, 0, first_row, out);
        hopper::bulk_commit();
      }
    }
  }

  __device__ void run(int cluster, int clusters, int block) {
    for (Tiles tiles(p, cluster); tiles.any(); tiles.next(clusters)) {
      const int first_row = (tiles.row * S::kCluster + block) * S::kRows + warpgroup * 64;
      const int first_column = tiles.column * S::kColumns;
      fetch_scales(first_row, first_column);
      multiply();
      write(first_row, first_column);
    }
    if (thread == 0) hopper::bulk_wait_read();
  }
};

template <class S, bool kAdd>
__global__ void __launch_bounds__(S::kThreads, 1) int8_kernel(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedMemory<S>*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      hopper::mbarrier_init(&shared.full[i], 1);
      hopper::mbarrier_init(&shared.empty[i],
                            4 * S::kConsumers * S::kCluster);  // a lane of each reading warp
    }
    hopper::mbarrier_init_fence();
  }
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
  __syncthreads();
  const int block = S::kCluster > 1 ? hopper::cluster_block() : 0;
  const int cluster = static_cast<int>(blockIdx.x) / S::kCluster,
            clusters = static_cast<int>(gridDim.x) / S::kCluster;
  if (threadIdx.x < kWarpgroup) {
    hopper::give_up_registers<40>();
    if (threadIdx.x == 0) produce<S>(p, shared, cluster, clusters, block);
  } else {
    hopper::take_registers<232>();
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    Consumer<S, kAdd>(p, shared, thread / kWarpgroup, thread % kWarpgroup).run(cluster, clusters, block);
  }
  // No block leaves while another may still write to its shared memory.
  __syncthreads();
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
#endif
}

template <class S, bool kAdd>
void launch(StreamHandle stream, Parameters p) {
  constexpr int kSharedBytes = sizeof(SharedMemory<S>);
  static_assert(kSharedBytes <= 227 * 1024);
  static const cudaError_t opted_in =
      cudaFuncSetAttribute(int8_kernel<S, kAdd>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(opted_in, "asking for shared memory");
  cudaLaunchConfig_t config{};
  config.gridDim =
      std::min(p.row_tiles * p.column_tiles, current_device_info().multiprocessors / S::kCluster) *
      S::kCluster;
  config.blockDim = S::kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {S::kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, int8_kernel<S, kAdd>, p), "launching int8_matmul");
  check_launch("int8_matmul", stream);
}

inline int64_t ceil_of(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

template <class S>
void launch_shape(StreamHandle stream, int64_t m, int64_t out, int64_t in, const ConstInt8Rows& a,
                  const ConstInt8Rows& w, BFloat16* c, Accumulate accumulate) {
  const int64_t row_tiles = ceil_of(m, S::kRows * S::kCluster), column_tiles = ceil_of(out, S::kColumns);
  check(m < (1 << 30) && out < (1 << 30) && row_tiles * column_tiles < (1 << 30),
        "the tiles of one launch fit 30 bits");
  Parameters p;
  p.loaded_rows = static_cast<int>(std::min<int64_t>(S::kRows, ceil_of(m, 8) * 8));
  p.a = byte_rows_map(a.values, m, in, p.loaded_rows);
  p.w = byte_rows_map(w.values, out, in, S::kColumns / S::kCluster);
  p.a_scales = a.scales;
  p.w_scales = w.scales;
  p.c = result_rows_map(c, m, out, 64, S::kOutColumns);
  p.m = static_cast<int>(m);
  p.out = static_cast<int>(out);
  p.steps = static_cast<int>(ceil_of(in, kDepth));
  p.row_tiles = static_cast<int>(row_tiles);
  p.column_tiles = static_cast<int>(column_tiles);
  accumulate == Accumulate::kAdd ? launch<S, true>(stream, p) : launch<S, false>(stream, p);
}

}  // namespace int8_product

void int8_matmul_hopper(StreamHandle stream, int64_t m, int64_t out, int64_t in, const ConstInt8Rows& a,
                        const ConstInt8Rows& w, BFloat16* c, Accumulate accumulate) {
  using namespace int8_product;
  check(m >= 0 && out > 0 && out % 8 == 0 && in > 0 && in % 16 == 0 && in <= kLongestInt8Sum,
        "an int8 product has outputs in multiples of 8 and inputs in multiples of 16, and its sums fit 32 "
        "bits");
  if (m == 0) return;
  using Wide = Shape<2, 256, 2>;
  const int64_t wide_blocks =
      ceil_of(m, Wide::kRows * Wide::kCluster) * ceil_of(out, Wide::kColumns) * Wide::kCluster;
  if (m <= 64)
    launch_shape<Shape<1, 32, 1>>(stream, m, out, in, a, w, c, accumulate);
  else if (wide_blocks < current_device_info().multiprocessors / 2)
    launch_shape<Shape<2, 64, 1>>(stream, m, out, in, a, w, c, accumulate);
  else
    launch_shape<Wide>(stream, m, out, in, a, w, c, accumulate);
}

}  // namespace longhalo
