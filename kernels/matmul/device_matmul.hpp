// Matrix products on the GPU by cuBLASLt, with weights in the Hugging Face layout W [out, in]: c = a W^T.
//
// For every shape the library is asked once for its candidates, and the fastest, measured on the spot, is
// kept. The residual stream is added in the epilogue. bf16 in and out with fp32 sums; fp8 with a scale a row
// of a (token) and a row of W (output channel). int8 with the same scales has a kernel of its own, for the
// library makes no bf16 of such sums.
#pragma once

#include <cstdint>
#include <memory>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"
#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {

/// kMeasured: the first product of a shape times up to 8 candidates on its own operands (the host waits, for
/// about 30 products) and keeps the fastest; c is right after it all the same. Inside graph capture nothing
/// can be timed, so a shape that was not met before takes the library's first choice. kHeuristic: always that
/// one. NOTE: candidates add in different orders, so kMeasured promises the same bits within one DeviceMatmul
/// only.
enum class MatmulTuning { kMeasured, kHeuristic };

constexpr int64_t kMatmulWorkspaceBytes = int64_t{64} << 20;

class DeviceMatmul {
 public:
  /// Holds a workspace of `workspace_bytes` on the current device; all products must be queued on `stream`.
  explicit DeviceMatmul(StreamHandle stream, int64_t workspace_bytes = kMatmulWorkspaceBytes,
                        MatmulTuning tuning = MatmulTuning::kMeasured);
  ~DeviceMatmul();
  DeviceMatmul(const DeviceMatmul&) = delete;
  DeviceMatmul& operator=(const DeviceMatmul&) = delete;

  /// a [m, in], w [out, in], c [m, out], dense; kAdd adds to c (the library may round the product to bf16
  /// first). 16-byte aligned; in and out multiples of 8. c must not overlap a or w.
  void run(int64_t m, int64_t out, int64_t in, const BFloat16* a, const BFloat16* w, BFloat16* c,
           Accumulate accumulate = Accumulate::kOverwrite);
  /// The same with an fp32 result (logits); out may be odd.
  void run(int64_t m, int64_t out, int64_t in, const BFloat16* a, const BFloat16* w, float* c);
  /// fp8 operands, bf16 result; in and out multiples of 16. `bias` [out], 16-byte aligned, is added to each
  /// row of the product (which the library may have rounded to bf16) unless it is nullptr: the part of a's
  /// mean, where a has one. The tensor cores' fast accumulation is used: sums carry about 14 bits, well below
  /// what e4m3 loses. Throws UserError where the device (compute capability 9.0 and later have scales a row)
  /// or the library cannot do it.
  void run(int64_t m, int64_t out, int64_t in, const ConstFp8Rows& a, const ConstFp8Rows& w, BFloat16* c,
           Accumulate accumulate = Accumulate::kOverwrite, const BFloat16* bias = nullptr);

  /// int8 operands in the same rotated coordinates (int8.hpp), bf16 result (kAdd adds it to c in bf16); in a
  /// multiple of 64. Sums are exact. Throws UserError unless the device has compute capability 9.0.
  void run(int64_t m, int64_t out, int64_t in, const ConstInt8Rows& a, const ConstInt8Rows& w, BFloat16* c,
           Accumulate accumulate = Accumulate::kOverwrite);

  /// The gradients of c = a W^T from dc [m, out], whose rows are dc_stride elements apart (0: dense), in bf16
  /// with fp32 sums: da [m, in] = dc W, in bf16; and dw [out, in] = dc^T a, in fp32, which bf16 would lose
  /// the sums over many tiles in. in and the stride are multiples of 8, out and m may be odd; 16-byte
  /// aligned. da and dw must not overlap the others.
  void input_gradient(int64_t m, int64_t out, int64_t in, const BFloat16* dc, const BFloat16* w, BFloat16* da,
                      Accumulate accumulate = Accumulate::kOverwrite, int64_t dc_stride = 0);
  void weight_gradient(int64_t m, int64_t out, int64_t in, const BFloat16* dc, const BFloat16* a, float* dw,
                       Accumulate accumulate = Accumulate::kAdd, int64_t dc_stride = 0);

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

}  // namespace longhalo
