// Descriptions of arrays for the tensor memory accelerator (TMA) of Hopper GPUs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/bfloat16.hpp"

namespace longhalo {

/// Rows of heads: element (row, head, c) of a bf16 array lies at base + row * row_stride + head * width + c.
/// The copy engine reads boxes of [box_rows, 1 head, 64 elements], swizzled by 128 bytes; rows out of [0,
/// rows) read as zeros. rows >= 1; row_stride in elements, a multiple of 8; base aligned to 16 bytes. Throws
/// InvariantError.
CUtensorMap head_rows_map(const BFloat16* base, int64_t rows, int64_t heads, int64_t width,
                          int64_t row_stride, int box_rows);

/// Dense rows of `width` bytes, a multiple of 16. The copy engine reads boxes of [box_rows, 1, 128 bytes],
/// swizzled by 128 bytes; what is out of the array reads as zeros. rows >= 1; base aligned to 16 bytes.
/// Throws InvariantError.
CUtensorMap byte_rows_map(const int8_t* base, int64_t rows, int64_t width, int box_rows);

/// Dense rows of `width` bf16 numbers, a multiple of 8, that the copy engine writes in boxes of [box_rows, 1,
/// box_columns], 32 or 64 columns, from shared memory that is swizzled by as many bytes. The rest as above.
CUtensorMap result_rows_map(BFloat16* base, int64_t rows, int64_t width, int box_rows, int box_columns);

}  // namespace longhalo
