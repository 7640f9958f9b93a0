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

}  // namespace

CUtensorMap head_rows_map(const BFloat16* base, int64_t rows, int64_t heads, int64_t width,
                          int64_t row_stride, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(width) * sizeof(BFloat16),
                                 static_cast<cuuint64_t>(row_stride) * sizeof(BFloat16)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<BFloat16*>(base), sizes, strides, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS,
        text("TMA can read ", rows, " rows of ", heads, " heads of ", width, " with a row stride of ",
             row_stride, " (CUresult ", static_cast<int>(result), ")"));
  return map;
}

CUtensorMap byte_rows_map(const void* base, int64_t rows, int64_t width, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), 1, static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(width)};
  const cuuint32_t box[3] = {128, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS,
        text("TMA can read ", rows, " rows of ", width, " bytes (CUresult ", static_cast<int>(result), ")"));
  return map;
}

}  // namespace longhalo
