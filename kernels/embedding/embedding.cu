#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/embedding/embedding.hpp"

namespace longhalo {
namespace {

template <RowFit kFit>
__global__ void __launch_bounds__(kMaxRowThreads)
    embedding_rows(int64_t n, int64_t hidden, int vectors, const int32_t* __restrict__ tokens,
                   const BFloat16* __restrict__ table, BFloat16* __restrict__ x) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> from(table + tokens[row] * hidden, vectors);
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    store_vector(x + row * hidden + at * kVectorWidth, from.get(slot, at));
  });
}

}  // namespace

void embedding(StreamHandle stream, int64_t n, int64_t hidden, const int32_t* tokens, const BFloat16* table,
               BFloat16* x) {
  if (n == 0) return;
  const NvtxRange range("embedding");
  const RowLaunch at = row_launch(n, hidden);
  check_aligned(table);
  check_aligned(x);
  const auto kernel = chosen(at, embedding_rows<RowFit::kReadAgain>, embedding_rows<RowFit::kKept>,
                             embedding_rows<RowFit::kFilled>);
  kernel<<<at.grid, at.block, 0, stream>>>(n, hidden, at.vectors, tokens, table, x);
  check_launch("embedding", stream);
}

}  // namespace longhalo
