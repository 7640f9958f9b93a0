#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/quantised_rows.cuh"
#include "kernels/common/rows.cuh"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace longhalo {
namespace {

template <RowFit kFit>
__global__ void __launch_bounds__(kMaxRowThreads)
    rmsnorm_rows(int64_t n, int64_t hidden, int vectors, const BFloat16* x, const float* __restrict__ weight,
                 float epsilon, BFloat16* out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> in(x + row * hidden, vectors);
  SumMax mine;
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
#pragma unroll
    for (float value : v)
      mine.sum += value * value;
  });
  const float factor = rsqrtf(reduce_row(mine).sum / static_cast<float>(hidden) + epsilon);
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8], w[8];
    unpack(in.get(slot, at), v);
    load_vector(weight + at * kVectorWidth, w);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = v[i] * factor * w[i];
    store_vector(out + row * hidden + at * kVectorWidth, pack(v));
  });
}

// The norm's factor is the same for a whole row, so it goes into the scale alone: what is quantised is x *
// weight, and the sum of squares and the largest magnitude are found in one pass. A mean is one of normed
// rows, so it comes off when the factor is known, and the scale allows for the largest of it.
template <RowFit kFit, class Rows>
__global__ void __launch_bounds__(kMaxRowThreads)
    rmsnorm_quantised_rows(int64_t n, int64_t hidden, int vectors, const BFloat16* x,
                           const float* __restrict__ weight, float epsilon, Rows out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> in(x + row * hidden, vectors);
  const Outlier outlier = outlier_of_thread(out);
  const float strength = outlier.is_one() ? weight[outlier.column] : 0;
  float kept[kHeldVectors<kFit>][8];
  SumMax mine;
  const auto fill = [&](int slot, int at, bool inside) {
    float v[8] = {}, w[8] = {};
    if (inside) {
      unpack(in.get(slot, at), v);
      load_vector(weight + at * kVectorWidth, w);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mine.sum += v[i] * v[i];
      kept[slot][i] = v[i] * w[i];
    }
    rotate(out, kept[slot]);
  };
  for_each_vector_of_warps<kFit>(vectors, [&](int slot, int at, bool inside) {
    fill(slot, at, inside);
#pragma unroll
    for (float value : kept[slot])
      mine.max = larger(out, mine.max, value);
  });
  const SumMax all = reduce_row(found(mine));
  const float factor = rsqrtf(all.sum / static_cast<float>(hidden) + epsilon), unit = 1 / factor;
  const RowScale scale = row_scale(out, largest_centred(out, all.max, unit));
  const int64_t first = row * stored_width(out, hidden);
  const float strong = outlier.is_one() ? to_float_device(x[row * hidden + outlier.column]) * strength : 0;
  for_each_vector_of_warps<kFit>(vectors, [&](int slot, int at, bool inside) {
    if constexpr (kFit == RowFit::kReadAgain) fill(slot, at, inside);
    if (!inside) return;
    centre(out, at * kVectorWidth, kept[slot], unit);
    store(out, first + at * kVectorWidth, kept[slot], scale.inverse);
  });
  store_outlier(out, first + hidden, outlier, fmaf(-unit, outlier.mean, strong), scale.inverse);
  if (threadIdx.x == 0) out.scales[row] = scale.scale * factor;
}

}  // namespace

void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, BFloat16* out) {
  if (n == 0) return;
  const NvtxRange range("rmsnorm");
  const RowLaunch at = row_launch(n, hidden);
  for (const void* data :
       {static_cast<const void*>(x), static_cast<const void*>(weight), static_cast<const void*>(out)})
    check_aligned(data);
  const auto kernel = chosen(at, rmsnorm_rows<RowFit::kReadAgain>, rmsnorm_rows<RowFit::kKept>,
                             rmsnorm_rows<RowFit::kFilled>);
  kernel<<<at.grid, at.block, 0, stream>>>(n, hidden, at.vectors, x, weight, epsilon, out);
  check_launch("rmsnorm", stream);
}

namespace {

template <class Rows>
void rmsnorm_quantised(const char* name, StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x,
                       const float* weight, float epsilon, const Rows& out) {
  if (n == 0) return;
  const NvtxRange range(name);
  const RowLaunch at = row_launch(n, hidden);
  check_aligned(x);
  check_aligned(weight);
  check_rows(hidden, out, at);
  const auto kernel =
      chosen(at, rmsnorm_quantised_rows<RowFit::kReadAgain, Rows>,
             rmsnorm_quantised_rows<RowFit::kKept, Rows>, rmsnorm_quantised_rows<RowFit::kFilled, Rows>);
  kernel<<<at.grid, at.block, 0, stream>>>(n, hidden, at.vectors, x, weight, epsilon, out);
  check_launch(name, stream);
}

}  // namespace

void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, const Fp8Rows& out) {
  rmsnorm_quantised("rmsnorm to fp8", stream, n, hidden, x, weight, epsilon, out);
}

void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, const Int8Rows& out) {
  rmsnorm_quantised("rmsnorm to int8", stream, n, hidden, x, weight, epsilon, out);
}

}  // namespace longhalo
