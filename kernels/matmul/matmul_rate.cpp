#include <algorithm>
#include <vector>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "device/host_buffer.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {

double measure_matmul_rate(double seconds) {
  check(seconds > 0, "a measurement takes time");
  constexpr int64_t kSide = 1536;
  HostBuffer<float> a(kSide * kSide, "the matrix product measurement");
  HostBuffer<float> w(kSide * kSide, "the matrix product measurement");
  HostBuffer<float> c(kSide * kSide, "the matrix product measurement");
  // Row i of `a` holds i % 7 and `w` holds 0.5, so every product is exact and can be checked below.
  for (int64_t i = 0; i < kSide * kSide; ++i)
    a[i] = static_cast<float>(i / kSide % 7);
  std::fill(w.data(), w.data() + w.size(), 0.5F);

  matmul(kSide, kSide, kSide, a.data(), w.data(), c.data());  // warm-up: threads, pages, OpenBLAS's buffers
  std::vector<double> times;
  const Stopwatch total;
  do {
    const Stopwatch one;
    matmul(kSide, kSide, kSide, a.data(), w.data(), c.data());
    times.push_back(one.seconds());
  } while (total.seconds() < seconds || times.size() < 3);
  for (int64_t i = 0; i < kSide * kSide; ++i)
    check(c[i] == static_cast<float>(i / kSide % 7) * 0.5F * static_cast<float>(kSide),
          "the measured matrix product is right");
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return 2.0 * kSide * kSide * kSide / times[times.size() / 2];
}

}  // namespace longhalo
