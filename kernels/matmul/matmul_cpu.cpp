#include <cblas.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "kernels/matmul/blas_room.hpp"
#include "kernels/matmul/gemv_simd.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {
namespace {

// OpenBLAS takes 32-bit dimensions; rows are handed over in portions that fit with room to spare.
constexpr int64_t kRowsACall = int64_t{1} << 24;

// Outputs of a matrix-vector product that one thread takes at a time.
constexpr int64_t kColumnsAPart = 64;

void check_shape(int64_t m, int64_t out, int64_t in) {
  check(m >= 0 && out >= 1 && in >= 1, "a matrix product has a positive shape");
  check(out <= std::numeric_limits<blasint>::max() && in <= std::numeric_limits<blasint>::max(),
        "a weight's sides fit OpenBLAS's integers");
}

// OpenBLAS asks again without end where its buffers, one a thread and one a call, find no room: so it takes
// them here, after it has been seen that there is.
void give_openblas_its_buffers(int threads) {
  std::vector<void*> rooms;
  const auto take = [] {
    return ::mmap(nullptr, kBlasBufferBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  };
  void* room = take();
  for (; room != MAP_FAILED && rooms.size() < static_cast<size_t>(threads); room = take())
    rooms.push_back(room);
  const bool is_enough = room != MAP_FAILED;
  if (is_enough) rooms.push_back(room);
  for (void* one : rooms)
    ::munmap(one, kBlasBufferBytes);
  if (!is_enough)
    throw UserError(text("out of host memory: ", threads + 1, " buffers of ", kBlasBufferBytes,
                         " bytes for OpenBLAS could not be had"),
                    "this process",
                    "raise the limit of a process's memory (ulimit -v), or set run.threads: 1");
  openblas_set_num_threads(threads);
  constexpr blasint kSide = 128;  // smaller products take no buffer
  std::vector<float> a(static_cast<size_t>(kSide) * kSide), b(a), c(a);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, kSide, kSide, kSide, 1.0F, a.data(), kSide, b.data(),
              kSide, 0.0F, c.data(), kSide);
}

}  // namespace

void matmul(int64_t m, int64_t out, int64_t in, const float* a, const float* w, float* c,
            Accumulate accumulate) {
  check_shape(m, out, in);
  const float beta = accumulate == Accumulate::kAdd ? 1.0F : 0.0F;
  const auto columns = static_cast<blasint>(out), depth = static_cast<blasint>(in);
  if (m <= kMaxGemvRows) {
    const GemvKernels& kernels = LONGHALO_SIMD(gemv_kernels);
    const bool add = accumulate == Accumulate::kAdd;
    const int64_t parts = (out + kColumnsAPart - 1) / kColumnsAPart;
#pragma omp parallel for schedule(static) if (parts > 1)
    for (int64_t part = 0; part < parts; ++part)
      kernels.columns(m, out, in, part * kColumnsAPart, std::min(out, (part + 1) * kColumnsAPart), a, w, c,
                      add);
    return;
  }
  for (int64_t row = 0; row < m; row += kRowsACall) {
    const auto rows = static_cast<blasint>(std::min(kRowsACall, m - row));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, columns, depth, 1.0F, a + row * in, depth, w,
                depth, beta, c + row * out, columns);
  }
}

void matmul_input_gradient(int64_t m, int64_t out, int64_t in, const float* dc, const float* w, float* da,
                           Accumulate accumulate) {
  check_shape(m, out, in);
  const float beta = accumulate == Accumulate::kAdd ? 1.0F : 0.0F;
  const auto columns = static_cast<blasint>(in), depth = static_cast<blasint>(out);
  for (int64_t row = 0; row < m; row += kRowsACall) {
    const auto rows = static_cast<blasint>(std::min(kRowsACall, m - row));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, depth, 1.0F, dc + row * out, depth,
                w, columns, beta, da + row * in, columns);
  }
}

void matmul_weight_gradient(int64_t m, int64_t out, int64_t in, const float* dc, const float* a, float* dw,
                            Accumulate accumulate) {
  check_shape(m, out, in);
  if (m == 0 && accumulate == Accumulate::kOverwrite) std::fill_n(dw, out * in, 0.0F);
  const auto rows = static_cast<blasint>(out), columns = static_cast<blasint>(in);
  for (int64_t row = 0; row < m; row += kRowsACall) {
    const float beta = accumulate == Accumulate::kAdd || row > 0 ? 1.0F : 0.0F;
    const auto depth = static_cast<blasint>(std::min(kRowsACall, m - row));
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, rows, columns, depth, 1.0F, dc + row * out, rows,
                a + row * in, columns, beta, dw, columns);
  }
}

void set_kernel_threads(int threads) {
  check(threads >= 1, "a rank has at least one thread");
  omp_set_num_threads(threads);
  static std::atomic<int> most_threads{0};
  if (threads <= most_threads) return openblas_set_num_threads(threads);
  give_openblas_its_buffers(threads);
  most_threads = threads;
}

int kernel_threads() {
  return omp_get_max_threads();
}

}  // namespace longhalo
