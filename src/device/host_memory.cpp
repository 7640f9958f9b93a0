#include <atomic>
#include <cstdlib>

#include "core/text.hpp"
#include "device/host_buffer.hpp"

namespace longhalo {
namespace {

constexpr int64_t kAlignment = 64;
std::atomic<int64_t> current_bytes{0};

}  // namespace

namespace detail {

void* allocate_host(int64_t bytes, const char* purpose) {
  check(bytes >= 0, "an array size is not negative");
  if (bytes == 0) return nullptr;
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded));
  if (data == nullptr)
    throw UserError(text("out of host memory: ", bytes, " bytes for ", purpose, " could not be allocated"),
                    text("this process already holds ", current_bytes.load(), " bytes in arrays"),
                    "use more ranks or nodes, a shorter document, or a machine with more memory");
  current_bytes.fetch_add(bytes);
  return data;
}

void release_host(void* data, int64_t bytes) noexcept {
  if (data == nullptr) return;
  std::free(data);
  current_bytes.fetch_sub(bytes);
}

}  // namespace detail
}  // namespace longhalo
