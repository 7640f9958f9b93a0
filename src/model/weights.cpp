#include "model/weights.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/safetensors.hpp"

namespace longhalo {
namespace {

// On the bits, which the compiler does many at a time: an exponent of all ones is an infinity or a NaN.
bool all_finite(std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint32_t bad = 0;
  for (const float value : values)
    bad |= static_cast<uint32_t>((std::bit_cast<uint32_t>(value) & kExponent) == kExponent);
  return bad == 0;
}

// Reads tensors as fp32 and lets go of the file's pages at once, so that memory holds the weights once.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& directory) : tensors_(directory) {}

  bool contains(const std::string& name) const { return tensors_.contains(name); }

  void read_into(const std::string& name, std::vector<int64_t> shape, std::span<float> out) const {
    const TensorView& tensor = tensors_.view(name, shape);
    copy_as_float(tensor, out);
    drop_pages(tensor);
    if (!all_finite(out))
      throw UserError("it holds values that are infinite or no number", text(tensor.file, ", tensor ", name),
                      "the file is damaged, or its values do not fit its type: fetch or convert it again");
  }

  HostBuffer<float> read(const std::string& name, std::vector<int64_t> shape) const {
    int64_t elements = 1;
    for (const int64_t size : shape)
      elements *= size;
    HostBuffer<float> values(elements, "weights");
    read_into(name, std::move(shape), values.span());
    return values;
  }

  const TensorView& view(const std::string& name) const { return tensors_.view(name); }

 private:
  ModelWeights tensors_;
};

HostBuffer<float> filled(int64_t count, double value) {
  HostBuffer<float> values(count, "weights");
  std::fill_n(values.data(), count, static_cast<float>(value));
  return values;
}

// landmark_query is [H_kv, d] for one strided band, [bands, H_kv, d] for several.
std::vector<HostBuffer<float>> read_landmark_queries(const Reader& reader, const std::string& name,
                                                     const ModelConfig& c, int64_t bands) {
  std::vector<HostBuffer<float>> queries;
  if (bands == 0 || !reader.contains(name)) return queries;
  const bool single = reader.view(name).shape.size() == 2;
  const HostBuffer<float> all = single && bands == 1 ? reader.read(name, {c.kv_heads, c.head_dim})
                                                     : reader.read(name, {bands, c.kv_heads, c.head_dim});
  for (int64_t band = 0; band < bands; ++band) {
    HostBuffer<float>& query = queries.emplace_back(c.kv_size(), "landmark queries");
    std::copy_n(all.data() + band * c.kv_size(), c.kv_size(), query.data());
  }
  return queries;
}

LayerWeights read_layer(const Reader& reader, const ModelConfig& c, const LandmarkWeights& landmarks,
                        int64_t index) {
  const std::string layer = text("model.layers.", index, ".");
  LayerWeights w;
  w.attention_norm = reader.read(layer + "input_layernorm.weight", {c.hidden});
  w.q = reader.read(layer + "self_attn.q_proj.weight", {c.q_size(), c.hidden});
  w.k = reader.read(layer + "self_attn.k_proj.weight", {c.kv_size(), c.hidden});
  w.v = reader.read(layer + "self_attn.v_proj.weight", {c.kv_size(), c.hidden});
  w.o = reader.read(layer + "self_attn.o_proj.weight", {c.hidden, c.q_size()});
  w.mlp_norm = reader.read(layer + "post_attention_layernorm.weight", {c.hidden});
  w.gate_up = HostBuffer<float>(2 * c.ffn * c.hidden, "weights");
  const auto half = static_cast<size_t>(c.ffn * c.hidden);
  reader.read_into(layer + "mlp.gate_proj.weight", {c.ffn, c.hidden}, w.gate_up.span().first(half));
  reader.read_into(layer + "mlp.up_proj.weight", {c.ffn, c.hidden}, w.gate_up.span().last(half));
  w.down = reader.read(layer + "mlp.down_proj.weight", {c.hidden, c.ffn});

  w.landmark_query =
      read_landmark_queries(reader, layer + "self_attn.landmark_query", c, landmarks.strided_bands);
  const std::string bias = layer + "self_attn.landmark_bias";
  if (landmarks.bias || !reader.contains(bias))
    w.landmark_bias = filled(c.heads, landmarks.bias.value_or(kDefaultLandmarkBias));
  else
    w.landmark_bias = reader.read(bias, {c.heads});
  return w;
}

}  // namespace

Weights load_weights(const std::filesystem::path& model_directory, const ModelConfig& config,
                     const LandmarkWeights& landmarks, const LayerProgress& progress) {
  const Reader reader(model_directory);
  Weights weights;
  weights.config = config;
  weights.embedding = reader.read("model.embed_tokens.weight", {config.vocabulary, config.hidden});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    weights.layers.push_back(read_layer(reader, config, landmarks, layer));
    if (progress) progress(layer + 1, config.layers);
  }
  weights.final_norm = reader.read("model.norm.weight", {config.hidden});
  if (!config.tied_embeddings)
    weights.untied_head = reader.read("lm_head.weight", {config.vocabulary, config.hidden});
  return weights;
}

Weights random_weights(const ModelConfig& config, const LandmarkWeights& landmarks, uint64_t seed) {
  std::mt19937_64 generator(seed);
  // Spread 1 / sqrt(inputs) keeps activations of order one through any depth; a sum of uniforms is normal
  // enough.
  const auto normal = [&generator](int64_t rows, int64_t inputs) {
    HostBuffer<float> values(rows * inputs, "weights");
    const double spread = std::sqrt(12.0 / 4.0 / static_cast<double>(inputs));
    for (float& value : values.span()) {
      const uint64_t bits = generator();
      double sum = -2;
      for (int part = 0; part < 4; ++part)
        sum += static_cast<double>(bits >> (16 * part) & 0xffff) / 65536.0;
      value = static_cast<float>(sum * spread);
    }
    return values;
  };
  const ModelConfig& c = config;
  Weights weights;
  weights.config = config;
  weights.embedding = normal(c.vocabulary, c.hidden);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    LayerWeights& w = weights.layers.emplace_back();
    w.attention_norm = filled(c.hidden, 1);
    w.q = normal(c.q_size(), c.hidden);
    w.k = normal(c.kv_size(), c.hidden);
    w.v = normal(c.kv_size(), c.hidden);
    w.o = normal(c.hidden, c.q_size());
    w.mlp_norm = filled(c.hidden, 1);
    w.gate_up = normal(2 * c.ffn, c.hidden);
    w.down = normal(c.hidden, c.ffn);
    w.landmark_bias = filled(c.heads, landmarks.bias.value_or(kDefaultLandmarkBias));
  }
  weights.final_norm = filled(c.hidden, 1);
  if (!c.tied_embeddings) weights.untied_head = normal(c.vocabulary, c.hidden);
  return weights;
}

}  // namespace longhalo
