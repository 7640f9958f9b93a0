#include "device/memory_pool.hpp"

#include <map>
#include <memory>
#include <mutex>

#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

int64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
  uint64_t value = 0;
  check_cuda(cudaMemPoolGetAttribute(pool, which, &value), "cudaMemPoolGetAttribute");
  return static_cast<int64_t>(value);
}

}  // namespace

double PoolUse::fragmentation() const {
  if (reserved_high_bytes == 0) return 0;
  return 1 - static_cast<double>(used_high_bytes) / static_cast<double>(reserved_high_bytes);
}

std::string PoolUse::describe() const {
  return text("GPU memory: at most ", used_high_bytes / 1'000'000, " MB in arrays, ",
              reserved_high_bytes / 1'000'000, " MB taken from the card");
}

MemoryPool::MemoryPool(int device) : device_(device) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  check_cuda(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
  uint64_t keep_all = UINT64_MAX;
  check_cuda(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all),
             "cudaMemPoolSetAttribute");
}

void* MemoryPool::allocate(int64_t bytes, const char* purpose, cudaStream_t stream) {
  check(bytes >= 0, "an array size is not negative");
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  cudaError_t code = cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), pool_, stream);
  if (code == cudaErrorMemoryAllocation) {  // once more with the holes of released arrays given back
    cudaGetLastError();
    const Waiting waiting("this rank's GPU, for memory");
    check_cuda(cudaDeviceSynchronize(), "waiting for the GPU");
    trim();
    code = cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), pool_, stream);
  }
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    const PoolUse now = use();
    throw UserError(
        text("out of GPU memory: ", bytes / 1'000'000, " MB for ", purpose, " could not be allocated"),
        text("GPU ", device_, "; this process holds ", now.used_bytes / 1'000'000, " MB in arrays"),
        "use more GPUs, a shorter document or a smaller run.token_tile, and see that no other program "
        "holds memory of this GPU (nvidia-smi)");
  }
  check_cuda(code, text("allocating ", purpose));
  return data;
}

void MemoryPool::release(void* data, cudaStream_t stream) noexcept {
  if (data != nullptr) log_cuda_failure(cudaFreeAsync(data, stream), "releasing device memory");
}

PoolUse MemoryPool::use() const {
  return {attribute(pool_, cudaMemPoolAttrUsedMemCurrent), attribute(pool_, cudaMemPoolAttrUsedMemHigh),
          attribute(pool_, cudaMemPoolAttrReservedMemCurrent),
          attribute(pool_, cudaMemPoolAttrReservedMemHigh)};
}

void MemoryPool::reset_high_marks() {
  uint64_t zero = 0;
  check_cuda(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrUsedMemHigh, &zero), "cudaMemPoolSetAttribute");
  check_cuda(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReservedMemHigh, &zero),
             "cudaMemPoolSetAttribute");
}

void MemoryPool::trim() {
  check_cuda(cudaMemPoolTrimTo(pool_, 0), "cudaMemPoolTrimTo");
}

MemoryPool& memory_pool() {
  // Never destroyed: arrays of static duration may outlive any order of destruction, and the driver takes all
  // memory back when the process ends.
  static std::mutex mutex;
  static auto* pools = new std::map<int, std::unique_ptr<MemoryPool>>;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  std::unique_ptr<MemoryPool>& pool = (*pools)[device];
  if (!pool) pool = std::make_unique<MemoryPool>(device);
  return *pool;
}

}  // namespace longhalo
