// Attention over bands: window, landmarks and further scales in ONE softmax (bands.hpp says who sees what).
//
// For every query i and head h, with the keys of all bands that i sees:
//     score = scale * (q[i,h] . k[g, h / group]) + (stride > 1 ? landmark_bias[h] : 0)
//     out[i,h] = sum softmax(score) * v,   lse[h,i] = log sum exp(score)
// q and k are already rotated. A query that sees nothing gets out 0 and lse -infinity.
// Cost: 4 * head_dim FLOPs for each visible (query, key) pair and query head.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <type_traits>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"
#include "kernels/attention/bands.hpp"

namespace longhalo {

/// Keys and values of one band. Row r of k and v is global key first_key + r (a token position for stride 1,
/// a segment index otherwise). Keys outside [first_key, first_key + count) are taken as not existing.
template <class T>
struct BandKeys {
  Band band;
  const T* k = nullptr;  // [count, H_kv, d]
  const T* v = nullptr;  // [count, H_kv, d]
  int64_t first_key = 0;
  int64_t count = 0;
  int64_t row_stride = 0;  // elements from one row to the next of k and of v; 0: dense, H_kv * d. GPU only
};

/// What a kernel on T accumulates in.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;

/// The scale for queries that were multiplied with exponent_factor(d): a weight is 2^(q . k + bias * log2 e).
/// What kernels multiply scores with, scale * log2(e) in fp32, is exactly 1 then.
inline constexpr float kExponentScale = std::numbers::ln2_v<float>;
static_assert(kExponentScale * std::numbers::log2e_v<float> == 1.0F);

/// d^-1/2 * log2(e).
inline float exponent_factor(int64_t head_dim) {
  return static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(head_dim)));
}

template <class T>
struct Attention {
  int64_t heads = 0;         // H, a multiple of H_kv
  int64_t kv_heads = 0;      // H_kv
  int64_t head_dim = 0;      // d; the CPU takes any multiple of 8 up to 256, the GPU 64 and 128
  Accumulator<T> scale = 0;  // usually d^-1/2, or kExponentScale

  int64_t queries = 0;                            // n
  int64_t first_query = 0;                        // global position of row 0 of q
  const T* q = nullptr;                           // [n, H, d]
  std::span<const BandKeys<T>> bands;             // 1 to kMaxBands
  const Accumulator<T>* landmark_bias = nullptr;  // [H], or nullptr for 0
  const int64_t* doc_start = nullptr;  // [n] global position of each query's document start, or nullptr for 0

  T* out = nullptr;               // [n, H, d]; must not overlap q, k or v
  Accumulator<T>* lse = nullptr;  // [H, n], or nullptr when not wanted

  /// GPU, at most kGpuDecodeQueries queries: when set (device memory), it stands for first_query and is read
  /// when the kernel runs, so that a captured graph serves every decode step. A band's `count` is then the
  /// rows that exist at most; which of them a query sees follows from the band and the position alone.
  const int64_t* position = nullptr;
};

/// The CPU kernel, fp32: tiled over queries and keys with an online softmax, OpenMP over (tile, KV head).
/// Bitwise the same on every repeat and for every number of threads. Temporary memory is a constant a thread.
void attention_forward(const Attention<float>& problem);

/// Up to this many queries the GPU splits the keys over its multiprocessors instead of the queries.
inline constexpr int64_t kGpuDecodeQueries = 8;

/// Which GPU kernel: automatic is the fastest that the device has.
enum class AttentionKernel { kAutomatic, kHopper, kPortable, kDecode };

/// The GPU kernel: bf16 in and out, fp32 sums and lse. All pointers are device memory, 16-byte aligned, but
/// `bands` itself; row strides are multiples of 8. Queued on `stream`; the host does not wait. Bitwise the
/// same on every repeat. kHopper needs compute capability 9.0, kDecode at most kGpuDecodeQueries queries.
void attention_forward(StreamHandle stream, const Attention<BFloat16>& problem,
                       AttentionKernel kernel = AttentionKernel::kAutomatic);

/// The definition, key by key, in fp64. Slow; the tests' judge.
void attention_reference(const Attention<double>& problem);

/// Visible (query, key) pairs of ONE head over all bands: the useful work is 4 * d * H * this.
/// Keys outside a band's [first_key, first_key + count) do not count.
template <class T>
int64_t visible_pairs(const Attention<T>& problem);

}  // namespace longhalo
