// Checks the GPU's gradient of attention, deals out its workspace and chooses the kernel.
#include "device/device.hpp"
#include "device/nvtx.hpp"
#include "kernels/attention/attention_checks.hpp"
#include "kernels/attention/attention_cuda.hpp"

namespace longhalo {
namespace {

// The workspace in floats, each part a multiple of four.
struct Parts {
  explicit Parts(const Attention<BFloat16>& p)
      : rows(p.heads * attention_backward_padded(p.queries)),
        queries((attention_backward_queries_floats(p) + 3) / 4 * 4),
        keys(attention_backward_keys_floats(p)) {}
  int64_t rows;  // of lse, and of D
  int64_t queries;
  int64_t keys;
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
  const Parts parts(gradient.forward);
  return (2 * parts.rows + parts.queries + parts.keys) * int64_t{sizeof(float)};
}

void attention_backward(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                        AttentionKernel kernel) {
  const Attention<BFloat16>& p = gradient.forward;
  check_gpu_gradient(gradient);
  check(kernel == AttentionKernel::kAutomatic || kernel == AttentionKernel::kPortable,
        "attention's gradient has the portable kernel");
  if (p.queries == 0) return;
  check(p.lse != nullptr, "attention's gradient needs the forward pass's lse");
  check(gradient.workspace != nullptr, "attention's gradient needs its workspace");
  const NvtxRange range("attention's gradient");
  const Parts parts(p);
  float* const lse_log2 = static_cast<float*>(gradient.workspace);
  float* const delta = lse_log2 + parts.rows;
  float* const queries = delta + parts.rows;
  attention_backward_rows(stream, gradient, lse_log2, delta);
  attention_backward_queries(stream, gradient, lse_log2, delta, queries);
  attention_backward_keys(stream, gradient, lse_log2, delta, queries + parts.queries);
}

}  // namespace longhalo
