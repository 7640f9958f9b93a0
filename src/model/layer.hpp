// One transformer layer as a list of kernel calls over a tile of tokens. Prefill and decode share it:
// prefill runs many tiles against the keys of a whole shard, decode one tile against the context.
//
//   project_keys   norm -> K, V (rotary not yet applied)
//   summarise      pool keys and values into landmarks, rotate those at their segments' centres
//   rotate_keys    rotary on K
//   attend         norm -> Q -> rotary -> attention -> output projection + residual -> norm -> SwiGLU MLP +
//   residual
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "model/prefill_cost.hpp"
#include "model/weights.hpp"

namespace longhalo {

class Layer {
 public:
  /// Works on up to `tile` tokens at once; holds the tile's temporaries, O(tile * (D + F)). `weights` must
  /// outlive it.
  Layer(const Weights& weights, int64_t tile);

  const ModelConfig& config() const { return weights_.config; }
  int64_t tile() const { return tile_; }
  const LayerTimes& times() const { return times_; }

  /// x [n, D] -> k, v [n, H_kv, d], k before the rotary embedding. n <= tile.
  void project_keys(int64_t layer, int64_t n, const float* x, float* k, float* v);

  /// Feeds n tokens (k before rotary) to the pooling of strided band number `strided_band`; the segments that
  /// complete have the global indices first_segment, ... and go to the rows of kbar, vbar [completed, H_kv,
  /// d], kbar rotated. Returns how many completed.
  int64_t summarise(int64_t layer, int64_t strided_band, int64_t stride, int64_t n, const float* k,
                    const float* v, int64_t first_segment, LandmarkPoolState& open, float* kbar, float* vbar);

  /// Rotates k [n, H_kv, d] in place; row 0 is token `first_position`.
  void rotate_keys(int64_t n, int64_t first_position, float* k);

  /// x [n, D] in place, through attention over `bands` and the MLP. n <= tile. `doc_start` [n]: the global
  /// position at which each token's document begins, or nullptr for 0.
  void attend(int64_t layer, int64_t n, int64_t first_position, std::span<const BandKeys<float>> bands,
              float* x, const int64_t* doc_start = nullptr);

 private:
  const Weights& weights_;
  int64_t tile_;
  std::vector<double> frequencies_;
  HostBuffer<float> normed_;     // [tile, D]
  HostBuffer<float> q_;          // [tile, H*d]
  HostBuffer<float> attended_;   // [tile, H*d]
  HostBuffer<float> gate_up_;    // [tile, 2F]
  HostBuffer<float> activated_;  // [tile, F]
  LayerTimes times_;
};

/// Rows of the embedding: x [n, D]. Every token must lie in [0, V).
void embed_tokens(const Weights& weights, std::span<const int32_t> tokens, float* x);

/// Final norm: x [n, D] -> hidden [n, D] (hidden may be x).
void final_norm(const Weights& weights, int64_t n, const float* x, float* hidden);

/// hidden [n, D] (after the final norm) -> logits [n, V].
void logits_of(const Weights& weights, int64_t n, const float* hidden, float* logits);

}  // namespace longhalo
