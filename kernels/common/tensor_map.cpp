#include "kernels/common/tensor_map.hpp"

#include <cudaTypedefs.h>

#include "core/error.hpp"
#include "core/text.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

// The driver's function, found at run time: the program links no libcuda and so starts on hosts without one.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
        "looking for cuTensorMapEncodeTiled");
    check(result == cudaDriverEntryPointSuccess && found != nullptr,
          "the driver knows cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

// `box` [elements, 1, rows] of an array [width, middle, rows]; strides in bytes.
CUtensorMap make_map(CUtensorMapDataType type, const void* base, const cuuint64_t (&sizes)[3],
                     const cuuint64_t (&strides)[2], int box_width, int box_rows,
                     CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_width), 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encoder()(&map, type, 3, const_cast<void*>(base), sizes, strides, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS,
        text("TMA can reach ", sizes[2], " rows of ", sizes[1], " times ", sizes[0], " elements, ",
             strides[1], " bytes apart (CUresult ", static_cast<int>(result), ")"));
  return map;
}

cuuint64_t size(int64_t count) {
  return static_cast<cuuint64_t>(count);
}

}  // namespace

CUtensorMap head_rows_map(const BFloat16* base, int64_t rows, int64_t heads, int64_t width,
                          int64_t row_stride, int box_rows) {
  return make_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, {size(width), size(heads), size(rows)},
                  {size(2 * width), size(2 * row_stride)}, 64, box_rows, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap byte_rows_map(const int8_t* base, int64_t rows, int64_t width, int box_rows) {
  return make_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, base, {size(width), 1, size(rows)},
                  {size(width), size(width)}, 128, box_rows, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap result_rows_map(BFloat16* base, int64_t rows, int64_t width, int box_rows, int box_columns) {
  check(box_columns == 32 || box_columns == 64, "rows of a box are as long as a swizzle");
  return make_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, {size(width), 1, size(rows)},
                  {size(2 * width), size(2 * width)}, box_columns, box_rows,
                  box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace longhalo
