// Attention of a few queries over many keys (decode): bound by reading keys and values once, so nothing is
// staged and every warp of the card reads on its own, in 16-byte pieces, straight into the registers that the
// tensor cores take. Two small kernels:
//
// 1. The keys of all bands, cut into steps of 16, are divided among `splits` blocks for each KV head; the
// four
//    warps of a block take its steps in turn. The rows (query, head of the group), 16 at a time, are the rows
//    of one tensor-core tile, so that a key is read once for all heads of its group. A block merges its
//    warps.
// 2. The blocks' results, each a sum with the maximum that it is relative to, are merged in order.
//
// Which numbers share a product does not matter, only that both operands agree. That is what saves the
// transposes: a lane reads 8 neighbouring components of a key and uses them as rows 2t, 2t+1, 2t+8, 2t+9 of
// two products (mma.cuh names them), with the same components of q on the other side; and it reads 8
// neighbouring components of a value and uses them as column g of eight products.
//
// Both kernels have a fixed grid, so a captured graph serves every position. The order of all sums follows
// from the problem alone (and the number of multiprocessors): the same bits on every repeat.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "device/memory_pool.hpp"
#include "device/stream.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/attention/band_rows.cuh"
#include "kernels/common/mma.cuh"

namespace longhalo {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;  // rows of a tile: (query, head of the group) pairs
constexpr int kStep = 16;  // keys that a warp takes at once
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kMostSplits = 256;
constexpr int kLeastSteps = 8;  // of a block: with fewer, merging costs more than it saves
constexpr int kMergeThreads = 256;
constexpr float kLowest = -1e30F;  // below every score; finite, so that differences are never NaN
constexpr unsigned kAll = 0xffffffffU;

struct Parameters {
  BandRows band[kMaxBands];
  int bands;
  int queries, heads, kv_heads, group, row_tiles, splits;
  int64_t first_query;
  const int64_t* position;  // instead of first_query
  const int64_t* doc_start;
  const float* landmark_bias;
  float scale_log2;
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  float* lse;
  float* part_out;    // [H_kv * row_tiles, splits, 16, d]
  float2* part_sums;  // [H_kv * row_tiles, splits, 16] maximum in units of log2, sum of weights
};

// A band as the rows of a block see it.
struct Span {
  int begin, end;            // rows of the band that some see
  int full_begin, full_end;  // that all see
  int first_step;            // of all bands before
};

template <int kDim>
struct SharedMemory {
  Span span[kMaxBands + 1];  // the last one's first_step: steps of all bands
  RowRange seen[kMaxBands][kRows];
  float bias[kRows];
  float top[kWarps][kRows], sum[kWarps][kRows];
  float out[kWarps][kRows][kDim + 4];
};

struct Place {
  int band, row;
};

__device__ __forceinline__ Place place_of(int step, const Span* spans, int bands) {
  int band = 0;
  while (band + 1 < bands && step >= spans[band + 1].first_step)
    ++band;
  return {band, spans[band].begin + (step - spans[band].first_step) * kStep};
}

__device__ __forceinline__ uint4 read_or_zero(const __nv_bfloat16* from, bool there) {
  return there ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}

// Keys 8 * octet + g, components 32 b + 8 t and the seven behind it.
template <int kDim>
__device__ __forceinline__ void read_keys(uint4 (&to)[2][kDim / 32], const BandRows& band, int row, int end,
                                          int kv_head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int octet = 0; octet < 2; ++octet) {
    const int key = row + 8 * octet + lane / 4;
    const __nv_bfloat16* const from = band.k + key * band.row_stride + kv_head * kDim + 8 * (lane % 4);
#pragma unroll
    for (int b = 0; b < kDim / 32; ++b)
      to[octet][b] = read_or_zero(from + 32 * b, key < end);
  }
}

// Of keys 2t, 2t+1, 2t+8, 2t+9 the components 64 j + 8 g and the seven behind it.
template <int kDim>
__device__ __forceinline__ void read_values(uint4 (&to)[4][kDim / 64], const BandRows& band, int row, int end,
                                            int kv_head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int one = 0; one < 4; ++one) {
    const int key = row + one / 2 * 8 + 2 * (lane % 4) + one % 2;
    const __nv_bfloat16* const from = band.v + key * band.row_stride + kv_head * kDim + 8 * (lane / 4);
#pragma unroll
    for (int j = 0; j < kDim / 64; ++j)
      to[one][j] = read_or_zero(from + 64 * j, key < end);
  }
}

__device__ __forceinline__ uint32_t word(const uint4& x, int at) {
  return at == 0 ? x.x : at == 1 ? x.y : at == 2 ? x.z : x.w;
}

// The queries as A operands, in the order of components that read_keys() gives.
template <int kDim>
__device__ __forceinline__ void read_queries(uint32_t (&a)[kDim / 16][4], const Parameters& p, int kv_head,
                                             int first_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half + lane / 4;
    const bool there = row < p.queries * p.group;
    const int64_t at = static_cast<int64_t>(row / p.group) * p.heads + kv_head * p.group + row % p.group;
    const __nv_bfloat16* const from = p.q + (there ? at * kDim : 0) + 8 * (lane % 4);
#pragma unroll
    for (int b = 0; b < kDim / 32; ++b) {
      const uint4 x = read_or_zero(from + 32 * b, there);
      a[2 * b][half] = x.x, a[2 * b][half + 2] = x.y;
      a[2 * b + 1][half] = x.z, a[2 * b + 1][half + 2] = x.w;
    }
  }
}

// What a lane holds of its warp's sums: of rows g and g + 8, components 64 j + 16 t + e (first of the pair)
// and 8 further (second) in out[8 j + e].
template <int kDim>
struct Rows {
  float out[kDim / 8][4];
  float top[2], sum[2];
};

// Takes 16 keys into the sums; -infinity marks what a row does not see.
template <int kDim>
__device__ __forceinline__ void add_keys(Rows<kDim>& rows, const float (&scores)[2][4],
                                         const uint4 (&values)[4][kDim / 64], float scale,
                                         const float (&bias)[2]) {
  bool grew = false;
  float now[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x = fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]),
                    fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
    x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
    x = fmaxf(x, __shfl_xor_sync(kAll, x, 2));
    now[half] = fmaxf(rows.top[half], fmaf(x, scale, bias[half]));
    grew = grew || now[half] > rows.top[half];
  }
  if (__any_sync(kAll, grew)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shrink = exp2_fast(rows.top[half] - now[half]);
      rows.top[half] = now[half];
      rows.sum[half] *= shrink;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        rows.out[n][2 * half] *= shrink, rows.out[n][2 * half + 1] *= shrink;
    }
  }
  uint32_t a[4];
#pragma unroll
  for (int octet = 0; octet < 2; ++octet) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = rows.top[half] - bias[half];
      const float low = exp2_fast(fmaf(scores[octet][2 * half], scale, -shift));
      const float high = exp2_fast(fmaf(scores[octet][2 * half + 1], scale, -shift));
      rows.sum[half] += low + high;
      a[2 * octet + half] = pack_bf16(low, high);
    }
  }
#pragma unroll
  for (int j = 0; j < kDim / 64; ++j) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned which = e % 2 == 0 ? 0x5410 : 0x7632;  // the low or the high halves of two words
      const uint32_t b0 = __byte_perm(word(values[0][j], e / 2), word(values[1][j], e / 2), which);
      const uint32_t b1 = __byte_perm(word(values[2][j], e / 2), word(values[3][j], e / 2), which);
      multiply_add(rows.out[8 * j + e], a, b0, b1, rows.out[8 * j + e]);
    }
  }
}

// Fills shared.span, .seen and .bias.
template <int kDim>
__device__ __forceinline__ void look_around(const Parameters& p, SharedMemory<kDim>& shared, int kv_head,
                                            int first_row) {
  const int thread = static_cast<int>(threadIdx.x), row = first_row + thread % kRows;
  const int rows = min(p.queries * p.group - first_row, kRows);
  const int64_t first_query = p.position != nullptr ? *p.position : p.first_query;
  if (thread < p.bands * kRows) {
    const int query = row / p.group;
    shared.seen[thread / kRows][thread % kRows] =
        thread % kRows < rows ? visible_rows(p.band[thread / kRows], first_query + query,
                                             p.doc_start != nullptr ? p.doc_start[query] : 0)
                              : RowRange{0, 0};
  }
  if (thread < kRows)
    shared.bias[thread] =
        p.landmark_bias != nullptr && thread < rows
            ? p.landmark_bias[kv_head * p.group + row % p.group] * std::numbers::log2e_v<float>
            : 0;
  __syncthreads();
  if (thread == 0) {
    int steps = 0;
    for (int b = 0; b < p.bands; ++b) {
      const RowRange first = shared.seen[b][0], last = shared.seen[b][rows - 1];
      shared.span[b] = {first.begin, last.end, last.begin, first.end, steps};
      steps += (last.end - first.begin + kStep - 1) / kStep;
    }
    shared.span[p.bands].first_step = steps;
  }
  __syncthreads();
}

template <int kDim>
__device__ __forceinline__ void write_result(const Parameters& p, int kv_head, int row, int component,
                                             float out, float top, float sum) {
  const int query = row / p.group, head = kv_head * p.group + row % p.group;
  const float share = sum == 0 ? 0 : 1 / sum;
  p.out[(static_cast<int64_t>(query) * p.heads + head) * kDim + component] = __float2bfloat16(out * share);
  if (p.lse != nullptr && component == 0)
    p.lse[static_cast<int64_t>(head) * p.queries + query] =
        sum == 0 ? -INFINITY : (top + log2f(sum)) * std::numbers::ln2_v<float>;
}

// Merges the block's warps, in order, and writes what is then known: the result, or this block's part of it.
template <int kDim>
__device__ __forceinline__ void merge_warps(const Parameters& p, const Rows<kDim>& rows,
                                            SharedMemory<kDim>& shared, int kv_head, int first_row) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 8 * half + lane / 4;
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    if (lane % 4 == 0) shared.top[warp][row] = rows.top[half], shared.sum[warp][row] = sum;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float* const to = &shared.out[warp][row][n / 8 * 64 + 16 * (lane % 4) + n % 8];
      to[0] = rows.out[n][2 * half], to[8] = rows.out[n][2 * half + 1];
    }
  }
  __syncthreads();
  const int rows_here = min(p.queries * p.group - first_row, kRows);
  const int64_t block = static_cast<int64_t>(blockIdx.y) * p.splits + blockIdx.x;
  for (int at = thread; at < rows_here * kDim; at += kThreads) {
    const int row = at / kDim, component = at % kDim;
    float top = kLowest;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      top = fmaxf(top, shared.top[w][row]);
    float out = 0, sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_fast(shared.top[w][row] - top);
      out = fmaf(weight, shared.out[w][row][component], out);
      sum = fmaf(weight, shared.sum[w][row], sum);
    }
    if (p.splits == 1) {
      write_result<kDim>(p, kv_head, first_row + row, component, out, top, sum);
    } else {
      p.part_out[(block * kRows + row) * kDim + component] = out;
      if (component == 0) p.part_sums[block * kRows + row] = make_float2(top, sum);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ Parameters p) {
  __shared__ SharedMemory<kDim> shared;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int kv_head = static_cast<int>(blockIdx.y) / p.row_tiles;
  const int first_row = static_cast<int>(blockIdx.y) % p.row_tiles * kRows;
  uint32_t q[kDim / 16][4];
  read_queries<kDim>(q, p, kv_head, first_row);
  look_around(p, shared, kv_head, first_row);

  const int64_t steps = shared.span[p.bands].first_step;
  const int end = static_cast<int>((blockIdx.x + 1) * steps / p.splits);
  int step = static_cast<int>(blockIdx.x * steps / p.splits) + warp;

  Rows<kDim> rows;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n)
    rows.out[n][0] = rows.out[n][1] = rows.out[n][2] = rows.out[n][3] = 0;
  rows.top[0] = rows.top[1] = kLowest, rows.sum[0] = rows.sum[1] = 0;

  uint4 keys[2][kDim / 32], values[4][kDim / 64];
  Place at{0, 0};
  if (step < end) {
    at = place_of(step, shared.span, p.bands);
    read_keys<kDim>(keys, p.band[at.band], at.row, shared.span[at.band].end, kv_head);
  }
  for (; step < end; step += kWarps) {
    const Span span = shared.span[at.band];
    read_values<kDim>(values, p.band[at.band], at.row, span.end, kv_head);
    float scores[2][4];
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      scores[octet][0] = scores[octet][1] = scores[octet][2] = scores[octet][3] = 0;
#pragma unroll
      for (int b = 0; b < kDim / 32; ++b) {
        const uint4 k = keys[octet][b];
        multiply_add(scores[octet], q[2 * b], k.x, k.y, scores[octet]);
        multiply_add(scores[octet], q[2 * b + 1], k.z, k.w, scores[octet]);
      }
    }
    const Place here = at;
    if (step + kWarps < end) {  // the next keys fly while these are worked on
      at = place_of(step + kWarps, shared.span, p.bands);
      read_keys<kDim>(keys, p.band[at.band], at.row, shared.span[at.band].end, kv_head);
    }
    const bool masked = here.row < span.full_begin || here.row + kStep > span.full_end;
    const bool strided = p.band[here.band].band.stride > 1;
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = strided ? shared.bias[8 * half + lane / 4] : 0;
      if (!masked) continue;
      const RowRange seen = shared.seen[here.band][8 * half + lane / 4];
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = here.row + 8 * octet + 2 * (lane % 4) + c;
          if (key < seen.begin || key >= seen.end) scores[octet][2 * half + c] = -INFINITY;
        }
      }
    }
    add_keys(rows, scores, values, p.scale_log2, bias);
  }
  merge_warps(p, rows, shared, kv_head, first_row);
}

// One block a row; groups of kDim threads take the splits in turn.
template <int kDim>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Parameters p) {
  constexpr int kGroups = kMergeThreads / kDim;
  __shared__ float weights[kMostSplits], sums[kGroups], outs[kGroups][kDim];
  const int thread = static_cast<int>(threadIdx.x), group = thread / kDim, component = thread % kDim;
  const int rows = p.queries * p.group;
  const int kv_head = static_cast<int>(blockIdx.x) / rows, row = static_cast<int>(blockIdx.x) % rows;
  const int64_t first = (static_cast<int64_t>(kv_head) * p.row_tiles + row / kRows) * p.splits;
  const auto part = [&](int split) { return (first + split) * kRows + row % kRows; };
  float top = kLowest;
  for (int split = 0; split < p.splits; ++split)
    top = fmaxf(top, p.part_sums[part(split)].x);
  for (int split = thread; split < p.splits; split += kMergeThreads)
    weights[split] = exp2_fast(p.part_sums[part(split)].x - top);
  __syncthreads();
  float out = 0, sum = 0;
#pragma unroll 8
  for (int split = group; split < p.splits; split += kGroups) {
    out = fmaf(weights[split], p.part_out[part(split) * kDim + component], out);
    sum = fmaf(weights[split], p.part_sums[part(split)].y, sum);
  }
  outs[group][component] = out;
  if (component == 0) sums[group] = sum;
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g)
    out += outs[g][component], sum += sums[g];
  write_result<kDim>(p, kv_head, row, component, out, top, sum);
}

// While it lives, this thread may do what stream capture forbids; nothing of it is captured.
class CaptureLooksAway {
 public:
  CaptureLooksAway() { exchange(); }
  ~CaptureLooksAway() { exchange(); }
  CaptureLooksAway(const CaptureLooksAway&) = delete;
  CaptureLooksAway& operator=(const CaptureLooksAway&) = delete;

 private:
  void exchange() noexcept {
    log_cuda_failure(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Memory for the parts of one launch, which the launches of a stream use one after the other. It has one
// size, is made at the stream's first launch and kept as long as the process. That launch may be captured
// into a graph, where memory that belongs to no graph must come from another stream. NOTE: a graph keeps
// using the memory of the stream in which it was captured: replay it there, or order it against that stream's
// own launches.
float* workspace(StreamHandle stream, int64_t floats) {
  static std::mutex mutex;
  static auto* known = new std::map<std::pair<int, StreamHandle>, float*>;
  const int device = current_device_info().index;
  const std::lock_guard lock(mutex);
  float*& memory = (*known)[{device, stream}];
  if (memory == nullptr) {
    const CaptureLooksAway looks_away;
    const Stream own;
    memory = static_cast<float*>(memory_pool().allocate(floats * static_cast<int64_t>(sizeof(float)),
                                                        "the parts of decode attention", own));
    own.synchronize();
  }
  return memory;
}

// Keys of a band that the queries see together, at most.
int64_t most_keys(const Attention<BFloat16>& problem, const BandKeys<BFloat16>& keys) {
  if (problem.position != nullptr) {
    const int64_t far = std::min(keys.band.far, keys.count * keys.band.stride);
    return std::min(keys.count, (far + problem.queries) / keys.band.stride + 2);
  }
  const KeyRange first = visible_keys(keys.band, problem.first_query);
  const KeyRange last = visible_keys(keys.band, problem.first_query + problem.queries - 1);
  return KeyRange{std::max(first.begin, keys.first_key), std::min(last.end, keys.first_key + keys.count)}
      .count();
}

template <int kDim>
void launch(StreamHandle stream, const Parameters& p) {
  const dim3 grid(static_cast<unsigned>(p.splits), static_cast<unsigned>(p.kv_heads * p.row_tiles));
  decode_kernel<kDim><<<grid, kThreads, 0, stream>>>(p);
  check_launch("attention (decode)", stream);
  if (p.splits == 1) return;
  merge_kernel<kDim><<<static_cast<unsigned>(p.heads * p.queries), kMergeThreads, 0, stream>>>(p);
  check_launch("attention (decode, merge)", stream);
}

}  // namespace

void attention_gpu_decode(StreamHandle stream, const Attention<BFloat16>& problem) {
  check(problem.scale > 0, "the scale of attention scores is positive");
  Parameters p{};
  p.bands = static_cast<int>(problem.bands.size());
  int64_t steps = 0;
  for (size_t b = 0; b < problem.bands.size(); ++b) {
    p.band[b] = band_rows(problem.bands[b], problem.kv_heads * problem.head_dim);
    steps += (most_keys(problem, problem.bands[b]) + kStep - 1) / kStep;
  }
  p.queries = static_cast<int>(problem.queries), p.heads = static_cast<int>(problem.heads);
  p.kv_heads = static_cast<int>(problem.kv_heads), p.group = p.heads / p.kv_heads;
  p.row_tiles = (p.queries * p.group + kRows - 1) / kRows;
  const int64_t tiles = int64_t{p.kv_heads} * p.row_tiles;
  check(tiles <= 65'535, "decode takes up to 65535 tiles of 16 rows");
  // One wave: as many blocks as the card holds at once.
  const int64_t places = int64_t{kBlocksPerMultiprocessor} * current_device_info().multiprocessors;
  p.splits = static_cast<int>(
      std::clamp<int64_t>(std::min(places / tiles, (steps + kLeastSteps - 1) / kLeastSteps), 1, kMostSplits));
  p.first_query = problem.first_query, p.position = problem.position;
  p.doc_start = problem.doc_start, p.landmark_bias = problem.landmark_bias;
  p.scale_log2 = problem.scale * std::numbers::log2e_v<float>;
  p.q = reinterpret_cast<const __nv_bfloat16*>(problem.q);
  p.out = reinterpret_cast<__nv_bfloat16*>(problem.out);
  p.lse = problem.lse;
  if (p.splits > 1) {
    constexpr int64_t kMostDim = 128;
    const int64_t rows = places * kRows;  // splits * tiles is at most places
    float* const memory = workspace(stream, rows * (kMostDim + 2));
    p.part_out = memory;
    p.part_sums = reinterpret_cast<float2*>(memory + rows * kMostDim);
  }
  problem.head_dim == 128 ? launch<128>(stream, p) : launch<64>(stream, p);
}

}  // namespace longhalo
