#include "model/decoder.hpp"

#include <algorithm>

namespace longhalo {

Decoder::Decoder(const Weights& weights, const AttentionPattern& pattern, int64_t tile)
    : weights_(weights),
      pattern_(pattern),
      strides_(pattern.strides()),
      layer_(weights, tile),
      x_(tile * weights.config.hidden, "residual stream of a tile"),
      hidden_(weights.config.hidden, "final hidden state"),
      logits_(weights.config.vocabulary, "logits") {}

std::span<const float> Decoder::extend(Context& context, std::span<const int32_t> tokens) {
  check(!tokens.empty(), "a context is extended by at least one token");
  const auto tile = static_cast<size_t>(layer_.tile());
  size_t last_tile = 0;
  for (size_t done = 0; done < tokens.size(); done += last_tile) {
    last_tile = std::min(tile, tokens.size() - done);
    extend_tile(context, tokens.subspan(done, last_tile));
  }
  const int64_t last_row = static_cast<int64_t>(last_tile) - 1;
  final_norm(weights_, 1, x_.data() + last_row * weights_.config.hidden, hidden_.data());
  logits_of(weights_, 1, hidden_.data(), logits_.data());
  return logits_.span();
}

void Decoder::extend_tile(Context& context, std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  embed_tokens(weights_, tokens, x_.data());
  for (int64_t layer = 0; layer < weights_.config.layers; ++layer)
    extend_layer(context, layer, n);
  context.advance(n);
}

void Decoder::extend_layer(Context& context, int64_t layer, int64_t n) {
  LayerContext& kept = context.layer(layer);
  const int64_t begin = context.position();

  kept.exact.append(n, pattern_.exact_reach());
  float* k = kept.exact.k_row(begin);
  float* v = kept.exact.v_row(begin);
  layer_.project_keys(layer, n, x_.data(), k, v);
  for (size_t band = 0; band < strides_.size(); ++band) {
    KeyRows& landmarks = kept.landmarks[band];
    LandmarkPoolState& open = kept.open[band];
    const int64_t first_new = landmarks.end();
    const int64_t completing = (open.tokens + n) / strides_[band];
    landmarks.append(completing, kUnlimited);
    layer_.summarise(layer, static_cast<int64_t>(band), strides_[band], n, k, v, first_new, open,
                     landmarks.k_row(first_new), landmarks.v_row(first_new));
  }
  layer_.rotate_keys(n, begin, k);
  layer_.attend(layer, n, begin, band_keys(pattern_, kept.exact.as_band({}), kept.landmarks), x_.data());
}

}  // namespace longhalo
