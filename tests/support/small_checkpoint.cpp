#include "support/small_checkpoint.hpp"

#include <cstring>
#include <fstream>
#include <string>

#include "core/bfloat16.hpp"
#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo::test {
namespace {

class Writer {
 public:
  void matrix(const std::string& name, std::span<const float> values, int64_t rows, int64_t columns) {
    check(static_cast<int64_t>(values.size()) == rows * columns, "a matrix has its shape");
    entry(name, "BF16", text(rows, ",", columns), 2 * values.size());
    for (const float value : values) {
      const BFloat16 narrow = to_bfloat16(value);
      check(to_float(narrow) == value, "matrices were rounded to bf16 before");
      bytes_.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
    }
  }
  void floats(const std::string& name, std::span<const float> values, const std::string& shape) {
    entry(name, "F32", shape, 4 * values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }
  void write(const std::filesystem::path& file) const {
    const std::string header = "{" + header_ + "}";
    const uint64_t length = header.size();
    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << header << bytes_;
    check(out.flush().good(), "a test checkpoint can be written");
  }

 private:
  void entry(const std::string& name, const char* type, const std::string& shape, size_t bytes) {
    header_ += text(header_.empty() ? "" : ",", "\"", name, "\":{\"dtype\":\"", type, "\",\"shape\":[", shape,
                    "],\"data_offsets\":[", bytes_.size(), ",", bytes_.size() + bytes, "]}");
  }
  std::string header_, bytes_;
};

}  // namespace

void round_matrices_to_bfloat16(Weights& weights) {
  const auto round = [](HostBuffer<float>& matrix) {
    for (float& value : matrix.span())
      value = to_float(to_bfloat16(value));
  };
  round(weights.embedding);
  round(weights.untied_head);
  for (LayerWeights& layer : weights.layers)
    for (HostBuffer<float>* matrix : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate_up, &layer.down})
      round(*matrix);
}

void write_checkpoint(const Weights& weights, const std::filesystem::path& directory) {
  const ModelConfig& c = weights.config;
  Writer writer;
  writer.matrix("model.embed_tokens.weight", weights.embedding.span(), c.vocabulary, c.hidden);
  for (size_t index = 0; index < weights.layers.size(); ++index) {
    const LayerWeights& w = weights.layers[index];
    const std::string layer = text("model.layers.", index, ".");
    const auto half = static_cast<size_t>(c.ffn * c.hidden);
    writer.floats(layer + "input_layernorm.weight", w.attention_norm.span(), text(c.hidden));
    writer.floats(layer + "post_attention_layernorm.weight", w.mlp_norm.span(), text(c.hidden));
    writer.matrix(layer + "self_attn.q_proj.weight", w.q.span(), c.q_size(), c.hidden);
    writer.matrix(layer + "self_attn.k_proj.weight", w.k.span(), c.kv_size(), c.hidden);
    writer.matrix(layer + "self_attn.v_proj.weight", w.v.span(), c.kv_size(), c.hidden);
    writer.matrix(layer + "self_attn.o_proj.weight", w.o.span(), c.hidden, c.q_size());
    writer.matrix(layer + "mlp.gate_proj.weight", w.gate_up.span().first(half), c.ffn, c.hidden);
    writer.matrix(layer + "mlp.up_proj.weight", w.gate_up.span().last(half), c.ffn, c.hidden);
    writer.matrix(layer + "mlp.down_proj.weight", w.down.span(), c.hidden, c.ffn);
    writer.floats(layer + "self_attn.landmark_bias", w.landmark_bias.span(), text(c.heads));
    std::vector<float> queries;
    for (const HostBuffer<float>& query : w.landmark_query)
      queries.insert(queries.end(), query.data(), query.data() + query.size());
    if (!queries.empty())
      writer.floats(layer + "self_attn.landmark_query", queries,
                    text(w.landmark_query.size(), ",", c.kv_heads, ",", c.head_dim));
  }
  writer.floats("model.norm.weight", weights.final_norm.span(), text(c.hidden));
  if (!c.tied_embeddings) writer.matrix("lm_head.weight", weights.untied_head.span(), c.vocabulary, c.hidden);
  std::filesystem::create_directories(directory);
  writer.write(directory / "model.safetensors");
}

}  // namespace longhalo::test
