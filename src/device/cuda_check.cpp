#include "device/cuda_check.hpp"

#include <cstdlib>
#include <string>

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

bool sync_launches() {
  static const bool on = [] {
    const char* value = std::getenv("LONGHALO_SYNC_LAUNCHES");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return on;
}

std::string where_text(const std::source_location& where) {
  return text(where.file_name(), ":", where.line());
}

}  // namespace

void check_cuda(cudaError_t code, std::string_view what, const std::source_location& where) {
  if (code == cudaSuccess) return;
  const std::string said = text(what, ": ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")");
  switch (code) {
    case cudaErrorMemoryAllocation:
      cudaGetLastError();  // not sticky: the device goes on
      throw UserError(text("out of GPU memory: ", said), where_text(where),
                      "use more GPUs, a shorter document or a smaller run.token_tile, and see that no other "
                      "program holds memory of this GPU (nvidia-smi)");
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorDevicesUnavailable:
      throw UserError(text("no usable GPU: ", said), where_text(where),
                      "check nvidia-smi and the driver's version, or run with run.device: cpu");
    default:
      throw InvariantError(text("no CUDA call fails; ", said), where);
  }
}

void check_launch(std::string_view kernel, cudaStream_t stream, const std::source_location& where) {
  check_cuda(cudaGetLastError(), text("launching ", kernel), where);
  if (!sync_launches()) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing", where);
  if (capture == cudaStreamCaptureStatusNone)
    check_cuda(cudaStreamSynchronize(stream), text("running ", kernel), where);
}

void wait_for_stream(cudaStream_t stream, const char* what, const std::source_location& where) {
  const Waiting waiting(what);
  check_cuda(cudaStreamSynchronize(stream), what, where);
}

void log_cuda_failure(cudaError_t code, std::string_view what) noexcept {
  if (code == cudaSuccess || code == cudaErrorCudartUnloading) return;
  try {
    log_error(text(what, ": ", cudaGetErrorString(code)));
  } catch (...) {  // nothing is left to say it with
  }
}

}  // namespace longhalo
