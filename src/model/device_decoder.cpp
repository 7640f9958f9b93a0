#include "model/device_decoder.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "kernels/logits/logits.hpp"

namespace longhalo {

DeviceDecoder::DeviceDecoder(const DeviceWeights& weights, const AttentionPattern& pattern, int64_t tile,
                             DeviceMatmul& matmul, cudaStream_t stream, UseGraphs use_graphs)
    : weights_(weights),
      pattern_(pattern),
      strides_(pattern.strides()),
      stream_(stream),
      use_graphs_(use_graphs),
      layer_(weights, tile, matmul, stream),
      x_(tile * weights.config.hidden, "residual stream of a tile", stream),
      new_kv_(tile * 2 * weights.config.kv_size(), "keys and values of a tile", stream),
      logits_(weights.config.vocabulary, "logits", stream),
      position_(1, "position", stream),
      tokens_(tile, "tokens of a tile", stream),
      most_likely_(1, "next token", stream),
      host_position_(1, "position"),
      host_tokens_(tile, "tokens of a tile"),
      host_most_likely_(1, "next token"),
      host_logits_(weights.config.vocabulary, "logits") {}

int64_t DeviceDecoder::bytes(const ModelConfig& c, Precision precision, int64_t tile) {
  return DeviceLayer::bytes(c, precision, tile) +
         tile * (2 * c.hidden + 4 * c.kv_size() + static_cast<int64_t>(sizeof(int32_t))) +
         c.vocabulary * static_cast<int64_t>(sizeof(float));
}

void DeviceDecoder::extend(DecodedContext& state, std::span<const int32_t> tokens) {
  check(!tokens.empty(), "a context is extended by at least one token");
  const auto tile = static_cast<size_t>(layer_.tile());
  for (size_t done = 0; done < tokens.size(); done += tile)
    extend_tile(state, tokens.subspan(done, std::min(tile, tokens.size() - done)));
}

void DeviceDecoder::extend_tile(DecodedContext& state, std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  for (const int32_t token : tokens)
    check(token >= 0 && token < weights_.config.vocabulary, "a token id lies inside the vocabulary");
  DeviceContext& context = state.context;
  if (make_room(context, n)) state.graph = Graph();

  queued_.synchronize();
  host_position_[0] = context.position();
  std::copy(tokens.begin(), tokens.end(), host_tokens_.data());
  if (n > 1 || use_graphs_ == UseGraphs::kNo || !step_is_warm_) {
    queue_tile(context, n);
    step_is_warm_ = step_is_warm_ || n == 1;
  } else {
    if (state.graph.empty()) state.graph = Graph(stream_, [&] { queue_tile(context, 1); });
    state.graph.launch(stream_);
  }
  queued_.record(stream_);
  context.advance(n);
}

// Rows for n more tokens in every layer. Returns whether memory moved.
bool DeviceDecoder::make_room(DeviceContext& context, int64_t n) {
  bool moved = context.exact().append(n, pattern_.exact_reach(), stream_);
  for (size_t band = 0; band < strides_.size(); ++band) {
    DeviceKeyRows& landmarks = context.landmarks(static_cast<int64_t>(band));
    const int64_t completing = (context.position() + n) / strides_[band] - landmarks.end();
    if (completing > 0) moved = landmarks.append(completing, kUnlimited, stream_) || moved;
  }
  return moved;
}

// NOTE: captured into a graph for n = 1. Nothing here may depend on the position but through position_.
void DeviceDecoder::queue_tile(DeviceContext& context, int64_t n) {
  const int64_t hidden = weights_.config.hidden;
  copy_async(position_.data(), host_position_.data(), 1, stream_);
  copy_async(tokens_.data(), host_tokens_.data(), n, stream_);
  layer_.embed(n, tokens_.data(), x_.data());
  for (int64_t layer = 0; layer < weights_.config.layers; ++layer)
    queue_layer(context, layer, n);
  layer_.logits(1, x_.data() + (n - 1) * hidden, logits_.data());
  argmax(stream_, weights_.config.vocabulary, logits_.data(), most_likely_.data());
  copy_async(host_most_likely_.data(), most_likely_.data(), 1, stream_);
}

void DeviceDecoder::queue_layer(DeviceContext& context, int64_t layer, int64_t n) {
  DeviceKeyRows& exact = context.exact();
  std::vector<PoolTarget> targets;
  for (size_t band = 0; band < strides_.size(); ++band) {
    const auto number = static_cast<int64_t>(band);
    DeviceKeyRows& landmarks = context.landmarks(number);
    targets.push_back(
        {strides_[band], nullptr, landmarks.rows(layer), landmarks.first(), context.open(layer, number)});
  }
  layer_.project_keys(layer, n, x_.data(), new_kv_.data());
  append_keys(stream_, layer_.pooling(layer, targets), n, position_.data(), new_kv_.data(), exact.rows(layer),
              exact.first());

  // Few queries take their position from device memory, and all rows that may ever be there; many queries the
  // rows that are.
  const bool few = n <= kGpuDecodeQueries;
  const auto count_of = [&](const DeviceKeyRows& rows) {
    return few ? rows.capacity() : rows.end() - rows.first();
  };
  std::vector<BandKeys<BFloat16>> landmarks;
  for (size_t band = 0; band < strides_.size(); ++band) {
    const DeviceKeyRows& rows = context.landmarks(static_cast<int64_t>(band));
    landmarks.push_back(rows.as_band({}, layer, count_of(rows)));
  }
  const std::vector<BandKeys<BFloat16>> bands =
      band_keys(pattern_, exact.as_band({}, layer, count_of(exact)), landmarks);
  layer_.project_queries(layer, n, x_.data(), few ? 0 : context.position(), few ? position_.data() : nullptr);
  layer_.attend(layer, n, bands, x_.data());
}

int32_t DeviceDecoder::most_likely() {
  queued_.synchronize();
  const int32_t token = host_most_likely_[0];
  check(token >= 0 && token < weights_.config.vocabulary, "logits are numbers");
  return token;
}

std::span<const float> DeviceDecoder::logits() {
  to_host<float>(host_logits_.span(), logits_.data(), stream_);
  return host_logits_.span();
}

}  // namespace longhalo
