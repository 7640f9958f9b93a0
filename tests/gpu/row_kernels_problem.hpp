// What the tests of kernels that go row by row share: rows narrower than a warp, of a block, and too wide for
// registers, and the errors that a sum over a row and SiLU may make.
#pragma once

#include <limits>
#include <vector>

#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct RowShape {
  int64_t n, width;
};

inline const RowShape kRowShapes[] = {{1, 8},     {5, 8},     {131, 24},   {7, 576},   {33, 1536},
                                      {3, 4096},  {9, 1024},  {129, 4096}, {5, 14336}, {2, 16384},
                                      {1, 32768}, {2, 32776}, {1, 57344}};

// The chain of additions that a sum over a row goes through, in units of fp32: a thread adds at most 56
// numbers (width / 1024 where rows are read twice), then 10 steps among threads.
inline constexpr double kRowSum = 66 * kFp32Unit;

inline std::vector<BFloat16> gates_and_ups(const RowShape& shape) {
  auto gate_up = normal_bf16(shape.n * 2 * shape.width, 5, 6);
  const float far[] = {-1000, -88.5F, -80, 0, 90, 3e4F};
  for (size_t at = 0; at < 6; ++at)  // gates of the first row; the widths are 8 at least
    gate_up[at] = to_bfloat16(far[at]);
  return gate_up;
}

// exp errs by 2 + 1.2 |x| units of 2^-23, which reach 2 * 108 units of 2^-24 before it overflows; a sum, a
// reciprocal and two products are exact to a few.
inline constexpr double kSilu = (216 + 8) * kFp32Unit;

}  // namespace longhalo::testing
