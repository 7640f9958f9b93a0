// MPI counts are int: what is longer than 1 GiB travels in parts, in ascending order on both sides.
#pragma once

#include <algorithm>
#include <cstdint>

namespace longhalo {

inline constexpr int64_t kLargestMessageBytes = int64_t{1} << 30;

/// Calls send_part(T* first, int count) for consecutive parts that cover data[0, count), each of at most
/// `largest_bytes` bytes (at least one element).
template <class T, class SendPart>
void for_each_message(T* data, int64_t count, const SendPart& send_part,
                      int64_t largest_bytes = kLargestMessageBytes) {
  const int64_t most = std::max<int64_t>(1, largest_bytes / static_cast<int64_t>(sizeof(T)));
  for (int64_t done = 0; done < count; done += most)
    send_part(data + done, static_cast<int>(std::min(most, count - done)));
}

}  // namespace longhalo
