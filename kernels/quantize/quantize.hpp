// bf16 rows to fp8 rows (e4m3), each scaled so that its largest magnitude is 448. A row of zeros has scale 0.
#pragma once

#include <cstdint>

#include "device/stream_handle.hpp"
#include "kernels/common/fp8.hpp"

namespace longhalo {

/// GPU. x [n, width] -> out; width a multiple of 8. Bytes: 3 * n * width.
void quantize_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x, const Fp8Rows& out);

}  // namespace longhalo
