// Checks the GPU's gradient of attention, deals out its workspace and chooses the kernel.
#include <algorithm>

#include "device/device.hpp"
#include "device/nvtx.hpp"
#include "kernels/attention/attention_checks.hpp"
#include "kernels/attention/attention_cuda.hpp"

namespace longhalo {
namespace {

int64_t rounded(int64_t floats) {
  return (floats + 3) / 4 * 4;
}

// The workspace in floats, each part a multiple of four. Enough for any kernel.
struct Parts {
  explicit Parts(const AttentionGradient<BFloat16>& gradient)
      : rows(gradient.forward.heads * attention_backward_padded(gradient.forward.queries)),
        queries(rounded(attention_backward_queries_floats(gradient.forward))),
        rest(std::max(rounded(attention_backward_keys_floats(gradient.forward)),
                      rounded(attention_backward_hopper_floats(gradient)))) {}
  int64_t rows;  // of lse, and of D
  int64_t queries;
  int64_t rest;  // of the kernel that makes dk and dv
  int64_t floats() const { return 2 * rows + queries + rest; }
};

void check_gpu_gradient(const AttentionGradient<BFloat16>& gradient) {
  const Attention<BFloat16>& p = gradient.forward;
  check_attention_gradient(gradient);
  check(p.head_dim == 64 || p.head_dim == 128, "the GPU's attention takes head dimension 64 or 128");
  check(p.scale > 0, "the scale of attention scores is positive");
  check(p.queries <= INT32_MAX - 128, "a GPU has less than 2^31 queries");
  check(p.position == nullptr, "decoding has no gradient");
  const int64_t width = p.kv_heads * p.head_dim;
  for (size_t b = 0; b < p.bands.size(); ++b)
    for (int64_t row_stride : {p.bands[b].row_stride, gradient.d_bands[b].row_stride})
      check(row_stride == 0 || (row_stride >= width && row_stride % 8 == 0),
            "rows of keys and of their gradients are 16-byte aligned and do not overlap");
}

}  // namespace

int64_t attention_backward_workspace(const AttentionGradient<BFloat16>& gradient) {
  check_gpu_gradient(gradient);
  return Parts(gradient).floats() * int64_t{sizeof(float)};
}

void attention_backward(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                        AttentionKernel kernel) {
  const Attention<BFloat16>& p = gradient.forward;
  check_gpu_gradient(gradient);
  const bool is_hopper = current_device_info().is_hopper();
  if (kernel == AttentionKernel::kAutomatic)
    kernel = is_hopper ? AttentionKernel::kHopper : AttentionKernel::kPortable;
  check(kernel != AttentionKernel::kDecode, "attention's gradient has no kernel for decoding");
  check(kernel == AttentionKernel::kPortable || is_hopper,
        "the Hopper kernel runs on compute capability 9.0");
  if (p.queries == 0) return;
  check(p.lse != nullptr, "attention's gradient needs the forward pass's lse");
  check(gradient.workspace != nullptr, "attention's gradient needs its workspace");
  const NvtxRange range("attention's gradient");
  const Parts parts(gradient);
  float* const lse_log2 = static_cast<float*>(gradient.workspace);
  float* const delta = lse_log2 + parts.rows;
  float* const queries = delta + parts.rows;
  float* const rest = queries + parts.queries;
  attention_backward_rows(stream, gradient, lse_log2, delta);
  if (kernel == AttentionKernel::kHopper)
    attention_backward_hopper(stream, gradient, lse_log2, delta, rest);
  else
    attention_backward_keys(stream, gradient, lse_log2, delta, rest);
  if (kernel == AttentionKernel::kHopper && !gradient.deterministic) return;
  // The Hopper kernel has dq by sums in any order, and the bias already: here dq comes in a fixed one.
  AttentionGradient<BFloat16> in_order = gradient;
  if (kernel == AttentionKernel::kHopper) in_order.d_landmark_bias = nullptr;
  attention_backward_queries(stream, in_order, lse_log2, delta, queries);
}

}  // namespace longhalo
