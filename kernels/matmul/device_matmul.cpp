#include "kernels/matmul/device_matmul.hpp"

#include <cublasLt.h>

#include <algorithm>
#include <compare>
#include <limits>
#include <map>
#include <source_location>
#include <type_traits>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "device/device_buffer.hpp"
#include "device/nvtx.hpp"
#include "device/stream.hpp"
#include "kernels/elementwise/elementwise.hpp"
#include "kernels/matmul/int8_matmul.hpp"

namespace longhalo {
namespace {

constexpr int kCandidates = 8;
constexpr int kRounds = 3;            // how often each candidate is timed, after a first run
constexpr uint32_t kAlignment = 256;  // what the library takes for granted, and 16 what we promise

void check_cublas(cublasStatus_t status, std::string_view what,
                  const std::source_location& where = std::source_location::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const std::string said = text(what, ": ", cublasLtGetStatusString(status));
  const std::string place = text(where.file_name(), ":", where.line());
  switch (status) {
    case CUBLAS_STATUS_ALLOC_FAILED:
      throw UserError(text("out of memory in cuBLASLt: ", said), place,
                      "use more GPUs, a shorter document or a smaller run.token_tile");
    case CUBLAS_STATUS_NOT_INITIALIZED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
    case CUBLAS_STATUS_NOT_SUPPORTED:
      throw UserError(text("cuBLASLt cannot do this here: ", said), place,
                      "check that driver and CUDA libraries belong together and know this GPU; with "
                      "precision: fp8, try precision: bf16");
    default:
      throw InvariantError(text("no cuBLASLt call fails; ", said), where);
  }
}

template <auto kDestroy>
struct Destroy {
  template <class T>
  void operator()(T* handle) const noexcept {
    kDestroy(handle);  // fails for handles that are none, alone
  }
};
using Handle = std::unique_ptr<std::remove_pointer_t<cublasLtHandle_t>, Destroy<cublasLtDestroy>>;
using Description =
    std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>, Destroy<cublasLtMatmulDescDestroy>>;
using Layout =
    std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                                   Destroy<cublasLtMatmulPreferenceDestroy>>;

enum class Kind { kBf16, kBf16ToFp32, kFp8, kInputGradient, kWeightGradient };

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kBf16:
      return "bf16";
    case Kind::kBf16ToFp32:
      return "bf16 with fp32 result";
    case Kind::kFp8:
      return "fp8 e4m3 with a scale a row";
    case Kind::kInputGradient:
      return "bf16, the gradient of a";
    case Kind::kWeightGradient:
      return "bf16 with fp32 result, the gradient of W";
  }
  return "";
}

struct Shape {
  Kind kind;
  Accumulate accumulate;
  int64_t m, out, in;
  int64_t stride;      // from one row of m to the next of the gradients of c
  uint32_t alignment;  // of all operands, in bytes
  bool biased;
  auto operator<=>(const Shape&) const = default;

  // Of what the product writes.
  int64_t result_bytes() const {
    return kind == Kind::kWeightGradient  ? 4 * out * in
           : kind == Kind::kInputGradient ? 2 * m * in
           : kind == Kind::kBf16ToFp32    ? 4 * m * out
                                          : 2 * m * out;
  }
  std::string describe() const {
    return text("c [", m, ", ", out, "] ", accumulate == Accumulate::kAdd ? "+=" : "=", " a [", m, ", ", in,
                "] W [", out, ", ", in, "]^T, ", biased ? "and a bias, " : "", kind_name(kind));
  }
};

// The library's matrices are column-major, and a row-major matrix is to it the transposed one:
//     c = a W^T     is  c^T = W a^T:     left W, transposed, right a; both with the summed dimension in
//                                        neighbouring elements, as fp8 needs it
//     da = dc W     is  da^T = W^T dc^T:  left W, right dc, both as they lie
//     dW = dc^T a   is  dW^T = a^T dc:    left a, right dc, transposed
struct Operands {
  const void* left;
  const void* right;
  void* result;
  const float* left_scales = nullptr;
  const float* right_scales = nullptr;
  const BFloat16* bias = nullptr;
};

struct Plan {
  Description description;
  Layout left, right, result;
  cublasLtMatmulAlgo_t algorithm{};
  bool settled = false;  // measured, or not to be
  bool bias_apart =
      false;  // the library cannot add it to this shape: a kernel of our own does, after the product
};

template <class T>
void set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t which, const T& value) {
  check_cublas(cublasLtMatmulDescSetAttribute(description, which, &value, sizeof value),
               "describing a matrix product");
}

template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t which, const T& value) {
  check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value),
               "stating preferences for a matrix product");
}

// Columns lie `stride` elements apart; 0: densely.
Layout layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride = 0) {
  cublasLtMatrixLayout_t made = nullptr;
  check_cublas(cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(columns), stride != 0 ? stride : rows),
               "describing a matrix");
  return Layout(made);
}

uint32_t common_alignment(const Operands& operands) {
  const auto bits = reinterpret_cast<uintptr_t>(operands.left) | reinterpret_cast<uintptr_t>(operands.right) |
                    reinterpret_cast<uintptr_t>(operands.result);
  check(bits % 16 == 0, "the operands of a matrix product are 16-byte aligned");
  return bits % kAlignment == 0 ? kAlignment : 16;
}

}  // namespace

struct DeviceMatmul::Plans {
  Plans(cudaStream_t work_stream, int64_t bytes, MatmulTuning how)
      : stream(work_stream), workspace(bytes, "the workspace of matrix products", work_stream), tuning(how) {
    cublasLtHandle_t made = nullptr;
    check_cublas(cublasLtCreate(&made), "starting cuBLASLt");
    handle.reset(made);
  }

  bool can_measure() const {
    if (tuning == MatmulTuning::kHeuristic) return false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    return capture == cudaStreamCaptureStatusNone;
  }

  void run(Kind kind, Accumulate accumulate, int64_t m, int64_t out, int64_t in, const Operands& operands,
           int64_t stride = 0) {
    check(m >= 0 && out > 0 && in > 0, "a matrix product has positive dimensions");
    if (m == 0) return;
    const Shape shape{
        kind, accumulate, m, out, in, stride, common_alignment(operands), operands.bias != nullptr};
    auto known = cache.find(shape);
    const bool measure = (known == cache.end() || !known->second.settled) && can_measure();
    if (known == cache.end() || measure)
      known = cache.insert_or_assign(shape, make(shape, operands, measure)).first;
    Plan& plan = known->second;
    if (!plan.bias_apart) {
      const cublasStatus_t status = multiply(shape, plan, plan.algorithm, operands, operands.result);
      if (status == CUBLAS_STATUS_SUCCESS) return;
      if (!shape.biased) check_cublas(status, shape.describe());
      plan.bias_apart = true;  // offered, and then refused
    }
    Operands plain = operands;
    plain.bias = nullptr;
    run(kind, accumulate, m, out, in, plain, stride);
    add_to_rows(stream, m, out, operands.bias, static_cast<BFloat16*>(operands.result));
  }

  // `to` is where the result goes: operands.result, or scratch while candidates are measured.
  cublasStatus_t multiply(const Shape& shape, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                          const Operands& operands, void* to) {
    if (shape.kind == Kind::kFp8) {
      set(plan.description.get(), CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.left_scales);
      set(plan.description.get(), CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.right_scales);
    }
    if (shape.biased)
      set(plan.description.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(operands.bias));
    const float one = 1, beta = shape.accumulate == Accumulate::kAdd ? 1 : 0;
    return cublasLtMatmul(handle.get(), plan.description.get(), &one, operands.left, plan.left.get(),
                          operands.right, plan.right.get(), &beta, operands.result, plan.result.get(), to,
                          plan.result.get(), &algorithm, workspace.data(),
                          static_cast<size_t>(workspace.bytes()), stream);
  }

  Plan make(const Shape& shape, const Operands& operands, bool measure) {
    Plan plan;
    const cudaDataType_t in_type = shape.kind == Kind::kFp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    const bool wide = shape.kind == Kind::kBf16ToFp32 || shape.kind == Kind::kWeightGradient;
    const cudaDataType_t out_type = wide ? CUDA_R_32F : CUDA_R_16BF;
    cublasLtMatmulDesc_t made = nullptr;
    check_cublas(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "describing a matrix product");
    plan.description.reset(made);
    if (shape.kind == Kind::kFp8) {
      const auto mode = static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
      set(made, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode);
      set(made, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode);
      set(made, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.left_scales);
      set(made, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.right_scales);
      set(made, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
    }
    if (shape.biased) {
      set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
      set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(operands.bias));
    }
    switch (shape.kind) {
      case Kind::kInputGradient:
        plan.left = layout(in_type, shape.in, shape.out);
        plan.right = layout(in_type, shape.out, shape.m, shape.stride);
        plan.result = layout(out_type, shape.in, shape.m);
        break;
      case Kind::kWeightGradient:
        set(made, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_T);
        plan.left = layout(in_type, shape.in, shape.m);
        plan.right = layout(in_type, shape.out, shape.m, shape.stride);
        plan.result = layout(out_type, shape.in, shape.out);
        break;
      default:
        set(made, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
        plan.left = layout(in_type, shape.in, shape.out);
        plan.right = layout(in_type, shape.in, shape.m);
        plan.result = layout(out_type, shape.out, shape.m);
    }

    std::vector<cublasLtMatmulAlgo_t> candidates = ask(shape, plan);
    if (candidates.empty() && shape.biased) {
      plan.bias_apart = plan.settled = true;
      return plan;
    }
    if (candidates.empty()) refuse(shape);
    plan.algorithm = measure ? fastest(shape, plan, candidates, operands) : candidates.front();
    plan.settled = measure || tuning == MatmulTuning::kHeuristic;
    return plan;
  }

  std::vector<cublasLtMatmulAlgo_t> ask(const Shape& shape, const Plan& plan) const {
    cublasLtMatmulPreference_t made = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&made), "stating preferences for a matrix product");
    const Preference preference(made);
    set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace.bytes()));
    // Parts of a sum that was split are added in fp32, never in the type of the result.
    set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    for (const auto which :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      set(made, which, shape.alignment);
    cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle.get(), plan.description.get(), plan.left.get(), plan.right.get(), plan.result.get(),
        plan.result.get(), made, kCandidates, found, &count);
    std::vector<cublasLtMatmulAlgo_t> candidates;
    for (int at = 0; at < count; ++at)
      if (found[at].state == CUBLAS_STATUS_SUCCESS) candidates.push_back(found[at].algo);
    const bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (!none) check_cublas(status, shape.describe());
    return candidates;
  }

  [[noreturn]] static void refuse(const Shape& shape) {
    const DeviceInfo& info = current_device_info();
    throw UserError(text("cuBLASLt ", cublasLtGetVersion(), " has no way to compute ", shape.describe()),
                    text(info.name, ", compute capability ", info.major, ".", info.minor),
                    shape.kind == Kind::kFp8
                        ? "use precision: bf16 on this GPU (fp8 with a scale a row needs Hopper or later and "
                          "cuBLAS 12.9 or later)"
                        : "check that driver and CUDA libraries belong together and know this GPU");
  }

  // Adding to a result twice would be wrong, so those sums go to scratch; what overwrites may do so often.
  cublasLtMatmulAlgo_t fastest(const Shape& shape, const Plan& plan,
                               const std::vector<cublasLtMatmulAlgo_t>& candidates,
                               const Operands& operands) {
    if (candidates.size() == 1) return candidates.front();
    const NvtxRange range("choosing a matrix product");
    DeviceBuffer<uint8_t> scratch;
    if (shape.accumulate == Accumulate::kAdd) {
      try {
        scratch = DeviceBuffer<uint8_t>(shape.result_bytes(), "choosing a matrix product", stream);
      } catch (const UserError&) {
        return candidates.front();  // a job that fits without the scratch is not to fail for it
      }
    }
    void* const to = scratch.empty() ? operands.result : scratch.data();
    Event begin(Timing::kOn), end(Timing::kOn);
    std::vector<double> least(candidates.size(), std::numeric_limits<double>::infinity());
    for (int round = 0; round <= kRounds; ++round) {  // round 0 loads code and warms up
      for (size_t at = 0; at < candidates.size(); ++at) {
        if (round > 0 && least[at] < 0) continue;
        begin.record(stream);
        const cublasStatus_t status = multiply(shape, plan, candidates[at], operands, to);
        end.record(stream);
        end.synchronize();
        if (status != CUBLAS_STATUS_SUCCESS)
          least[at] = -1;  // the library offers what it then refuses now and then
        else if (round > 0)
          least[at] = std::min(least[at], seconds_between(begin, end));
      }
    }
    size_t best = 0;
    for (size_t at = 0; at < candidates.size(); ++at)
      if (least[at] >= 0 && (least[best] < 0 || least[at] < least[best])) best = at;
    return candidates[best];
  }

  cudaStream_t stream;
  DeviceBuffer<uint8_t> workspace;
  MatmulTuning tuning;
  Handle handle;
  std::map<Shape, Plan> cache;
};

DeviceMatmul::DeviceMatmul(StreamHandle stream, int64_t workspace_bytes, MatmulTuning tuning)
    : plans_(std::make_unique<Plans>(stream, workspace_bytes, tuning)) {}

DeviceMatmul::~DeviceMatmul() = default;

void DeviceMatmul::run(int64_t m, int64_t out, int64_t in, const BFloat16* a, const BFloat16* w, BFloat16* c,
                       Accumulate accumulate) {
  check(in % 8 == 0 && out % 8 == 0, "dimensions of a bf16 product are multiples of 8");
  const NvtxRange range("matmul bf16");
  plans_->run(Kind::kBf16, accumulate, m, out, in, {w, a, c});
}

void DeviceMatmul::run(int64_t m, int64_t out, int64_t in, const BFloat16* a, const BFloat16* w, float* c) {
  check(in % 8 == 0, "the summed dimension of a product is a multiple of 8");
  const NvtxRange range("matmul bf16 to fp32");
  plans_->run(Kind::kBf16ToFp32, Accumulate::kOverwrite, m, out, in, {w, a, c});
}

void DeviceMatmul::run(int64_t m, int64_t out, int64_t in, const ConstFp8Rows& a, const ConstFp8Rows& w,
                       BFloat16* c, Accumulate accumulate, const BFloat16* bias) {
  check(in % 16 == 0 && out % 16 == 0, "dimensions of an fp8 product are multiples of 16");
  const DeviceInfo& info = current_device_info();
  if (info.major * 10 + info.minor < 89)
    throw UserError(text(info.name, " has no fp8 matrix products"),
                    text("compute capability ", info.major, ".", info.minor, "; fp8 begins with 8.9"),
                    "use precision: bf16");
  const NvtxRange range("matmul fp8");
  plans_->run(Kind::kFp8, accumulate, m, out, in, {w.values, a.values, c, w.scales, a.scales, bias});
}

void DeviceMatmul::run(int64_t m, int64_t out, int64_t in, const ConstInt8Rows& a, const ConstInt8Rows& w,
                       BFloat16* c, Accumulate accumulate) {
  check(in % kHadamardBlock == 0, "the summed dimension of an int8 product is whole blocks of 64");
  const DeviceInfo& info = current_device_info();
  if (!info.is_hopper())
    throw UserError(text(info.name, " has no int8 matrix products of ours"),
                    text("compute capability ", info.major, ".", info.minor, "; they are made for 9.0"),
                    "use precision: bf16, or fp8 where the GPU has it");
  const NvtxRange range("matmul int8");
  int8_matmul_hopper(plans_->stream, m, out, in, a, w, c, accumulate);
}

void DeviceMatmul::input_gradient(int64_t m, int64_t out, int64_t in, const BFloat16* dc, const BFloat16* w,
                                  BFloat16* da, Accumulate accumulate, int64_t dc_stride) {
  const int64_t stride = dc_stride != 0 ? dc_stride : out;
  check(in % 8 == 0 && stride % 8 == 0 && stride >= out, "rows of a gradient's product are 16-byte aligned");
  const NvtxRange range("matmul input gradient");
  plans_->run(Kind::kInputGradient, accumulate, m, out, in, {w, dc, da}, stride);
}

void DeviceMatmul::weight_gradient(int64_t m, int64_t out, int64_t in, const BFloat16* dc, const BFloat16* a,
                                   float* dw, Accumulate accumulate, int64_t dc_stride) {
  const int64_t stride = dc_stride != 0 ? dc_stride : out;
  check(in % 8 == 0 && stride % 8 == 0 && stride >= out, "rows of a gradient's product are 16-byte aligned");
  const NvtxRange range("matmul weight gradient");
  plans_->run(Kind::kWeightGradient, accumulate, m, out, in, {a, dc, dw}, stride);
}

}  // namespace longhalo
