// One transformer layer on the GPU as a list of kernel calls over a tile of tokens, all on ONE stream; the
// host waits for nothing. Prefill and decode share it, as they share Layer on the CPU.
//
//   project_keys      norm -> one product for K and V (rotary not yet applied), rows [2, H_kv, d]
//   pooling           what rotate_and_pool() and append_keys() need to know of a layer
//   project_queries   norm -> Q -> rotary, which also multiplies with exponent_factor(d) (attention.hpp)
//   attend            attention -> output projection + residual -> norm -> SwiGLU MLP + residual
//
// The temporaries of a tile are two buffers, because most of them never live at once: `operand` holds what a
// product reads (normed or activated rows), `work` holds queries and attention output, later gates and ups.
// The matrix of a product says in which form it reads them: eight-bit operands are quantised by the norm and
// the activation themselves, the attention output in a pass of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/landmark_pool/rotate_and_pool.hpp"
#include "kernels/matmul/device_matmul.hpp"
#include "model/device_weights.hpp"
#include "model/phase_clock.hpp"

namespace longhalo {

class DeviceLayer {
 public:
  /// Works on up to `tile` tokens at once. `weights` and `matmul` must outlive it; `matmul` queues on
  /// `stream`.
  DeviceLayer(const DeviceWeights& weights, int64_t tile, DeviceMatmul& matmul, cudaStream_t stream);

  const ModelConfig& config() const { return weights_.config; }
  int64_t tile() const { return tile_; }
  cudaStream_t stream() const { return stream_; }
  /// Tells `clock` of the phases from now on; nullptr tells nobody.
  void set_clock(PhaseClock* clock) { clock_ = clock; }
  /// Calls `see` before each product of a matrix in bf16 from now on, with its operand a [n, in].
  using SeeOperand = std::function<void(const DeviceMatrix& w, const BFloat16* a)>;
  void watch(SeeOperand see) { see_ = std::move(see); }

  /// x [n, D] -> kv [n, 2, H_kv, d], k before the rotary embedding. n <= tile.
  void project_keys(int64_t layer, int64_t n, const BFloat16* x, BFloat16* kv);

  /// The pooling and rotation of this layer; `bands` are its strided bands, in order, whose landmark_query is
  /// filled in here. They must outlive the result.
  RotateAndPool pooling(int64_t layer, std::span<PoolTarget> bands) const;

  /// Queries of x [n, D], kept inside for attend(). Row 0 is token first_position, plus *position (device
  /// memory) when that is set.
  void project_queries(int64_t layer, int64_t n, const BFloat16* x, int64_t first_position,
                       const int64_t* position = nullptr);

  /// x [n, D] in place, through attention of the queries made last over `bands`, and the MLP. The position is
  /// the one that project_queries() got. `doc_start` [n] (device memory): where each token's document begins.
  void attend(int64_t layer, int64_t n, std::span<const BandKeys<BFloat16>> bands, BFloat16* x,
              const int64_t* doc_start = nullptr);

  /// Rows of the embedding: tokens [n] in device memory, inside the vocabulary -> x [n, D].
  void embed(int64_t n, const int32_t* tokens, BFloat16* x);
  /// Final norm and head: x [n, D] -> logits [n, V]. n <= tile.
  void logits(int64_t n, const BFloat16* x, float* logits);
  /// Final norm: x [n, D] -> hidden [n, D].
  void final_norm(int64_t n, const BFloat16* x, BFloat16* hidden);

  /// Bytes of the temporaries of a tile.
  static int64_t bytes(const ModelConfig& config, Precision precision, int64_t tile);

 private:
  const DeviceLayerWeights& layer_weights(int64_t layer) const {
    return weights_.layers[static_cast<size_t>(layer)];
  }
  void enter(Phase phase) {
    if (clock_ != nullptr) clock_->enter(phase);
  }
  BFloat16* bf16_operand() { return reinterpret_cast<BFloat16*>(operand_.data()); }
  Fp8Rows fp8_operand(const DeviceMatrix& w) {
    return {reinterpret_cast<Fp8E4M3*>(operand_.data()), scales_.data(), w.mean.data(), w.largest_mean,
            w.outlier_columns()};
  }
  Int8Rows int8_operand() { return {reinterpret_cast<int8_t*>(operand_.data()), scales_.data()}; }
  /// Calls to() with where w's product reads, in the form that it reads.
  template <class To>
  void write_operand(const DeviceMatrix& w, To to);
  void norm(int64_t n, const BFloat16* x, const DeviceBuffer<float>& weight, const DeviceMatrix& next);
  void activate(int64_t n, const DeviceMatrix& next);
  /// What w's product is to read, from x [n, w.in]: x itself in bf16.
  const BFloat16* operand_of(int64_t n, const BFloat16* x, const DeviceMatrix& w);
  void product(int64_t n, const BFloat16* a, const DeviceMatrix& w, BFloat16* c, Accumulate accumulate);

  const DeviceWeights& weights_;
  int64_t tile_;
  DeviceMatmul& matmul_;
  cudaStream_t stream_;
  PhaseClock* clock_ = nullptr;
  SeeOperand see_;
  DeviceBuffer<double> frequencies_;  // [d/2]
  DeviceBuffer<uint8_t> operand_;     // [tile] rows of what any product reads, in the widest form it has
  DeviceBuffer<float> scales_;        // [tile] in eight bits
  DeviceBuffer<BFloat16> work_;       // [tile, max(2*H*d, 2F)]: queries, then attention output; or gates, ups
  int64_t first_position_ = 0;        // of the queries made last
  const int64_t* position_ = nullptr;  //
};

}  // namespace longhalo
