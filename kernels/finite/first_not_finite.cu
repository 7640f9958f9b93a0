#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/finite/first_not_finite.hpp"

namespace longhalo {
namespace {

using Unsigned = unsigned long long;  // what atomicMin takes
static_assert(sizeof(Unsigned) == sizeof(int64_t));

__global__ void set_to(int64_t value, int64_t* to) {
  *to = value;
}

template <RowFit kFit>
__global__ void __launch_bounds__(kMaxRowThreads)
    first_not_finite_rows(int64_t n, int64_t hidden, int vectors, const BFloat16* __restrict__ x,
                          int64_t* first_row) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> in(x + row * hidden, vectors);
  SumMax mine;
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
#pragma unroll
    for (float value : v)
      mine.sum += value * value;  // squares cannot cancel, so what is not finite stays so
  });
  const float squares = reduce_row(mine).sum;
  if (threadIdx.x == 0 && !isfinite(squares))
    atomicMin(reinterpret_cast<Unsigned*>(first_row), static_cast<Unsigned>(row));
}

}  // namespace

void first_not_finite(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, int64_t* first_row) {
  check(n >= 0, "the number of rows is not negative");
  const NvtxRange range("first not finite");
  set_to<<<1, 1, 0, stream>>>(n, first_row);
  check_launch("first not finite", stream);
  if (n == 0) return;
  const RowLaunch at = row_launch(n, hidden);
  check_aligned(x);
  const auto kernel = chosen(at, first_not_finite_rows<RowFit::kReadAgain>,
                             first_not_finite_rows<RowFit::kKept>, first_not_finite_rows<RowFit::kFilled>);
  kernel<<<at.grid, at.block, 0, stream>>>(n, hidden, at.vectors, x, first_row);
  check_launch("first not finite", stream);
}

}  // namespace longhalo
