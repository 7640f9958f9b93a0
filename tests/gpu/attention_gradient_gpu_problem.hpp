// The gradient of attention problems on the GPU (attention_gpu_problem.hpp has their forward pass): arrays
// between guard zones, what nobody sees is large, and what bf16 explains of an error.
#pragma once

#include <vector>

#include "attention_gpu_problem.hpp"
#include "attention_gradient_problem.hpp"
#include "guarded.hpp"

namespace longhalo::testing {

/// A problem, its d_out and its results in device memory. Keys before the first and behind the last that some
/// query sees are large numbers, and so is d_out where a row sees nothing. dk, dv and the bias start from
/// random numbers, which answer() takes off again.
class GpuGradient {
 public:
  GpuGradient(const AttentionProblem& problem, const std::vector<float>& d_out, cudaStream_t stream,
              KeyLayout layout = KeyLayout::kDense);

  /// The forward pass, then the gradient; all results and the workspace are poisoned before. Fails the test
  /// when something was written beside a result. `wanted`: whether the landmark bias is.
  void run(AttentionKernel kernel, bool bias_wanted = true, bool deterministic = true);
  /// What the last run added, in fp64.
  GradientJudgement answer() const;
  /// All bits that the last run left.
  std::vector<uint32_t> bits() const;

 private:
  struct DeviceBand {
    int64_t first_v = 0, row_stride = 0;  // where dv begins in `results`, from dk's beginning
    std::vector<float> before, after;
    Guarded<float> results;
  };
  void add_band(const OwnedBand& band, KeyLayout layout);

  AttentionProblem shape_;  // without its arrays
  cudaStream_t stream_;
  GpuAttention forward_;
  std::vector<BFloat16> d_out_;
  std::vector<DeviceBand> bands_;
  std::vector<float> bias_before_, bias_after_;
  std::vector<BFloat16> dq_;
};

/// Runs twice, expects equal bits and the right answer, of the Hopper kernel also when dq is added in any
/// order: row by row within what rounding explains, and, where the exact gradient is not rounding itself,
/// each whole tensor within 1e-2 (the bound).
void expect_gradient_right(const AttentionProblem& problem, unsigned seed, AttentionKernel kernel,
                           cudaStream_t stream, KeyLayout layout = KeyLayout::kDense);

}  // namespace longhalo::testing
