#include "model/model_config.hpp"

#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostBytes = int64_t{16} << 20;  // of config.json, which has one or two thousand
constexpr const char* kSupported =
    "LongHalo reads Llama-family models: LlamaForCausalLM with SiLU, RMSNorm, no biases";

Json read_json(const std::filesystem::path& path) {
  try {
    Json json = Json::parse(read_json_text(path, kMostBytes));
    if (!json.is_object())
      throw UserError("the file is not a JSON object", path.string(),
                      "take config.json from the model's original");
    return json;
  } catch (const Json::exception& error) {
    throw UserError(text("the file is not valid JSON: ", error.what()), path.string(),
                    "copy the file again from the model's original");
  }
}

// Reads typed keys of one config.json; every message names file and key.
class Keys {
 public:
  Keys(const Json& json, std::string file) : json_(json), file_(std::move(file)) {}

  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  std::string place(const char* key) const { return text(file_, ": \"", key, "\""); }

  int64_t integer(const char* key, std::optional<int64_t> fallback = {}) const {
    if (!has(key)) {
      if (fallback) return *fallback;
      throw UserError("a required key is missing", place(key), "take config.json from the model's original");
    }
    const Json& value = json_.at(key);
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() && value.get<uint64_t>() > (uint64_t{1} << 62)))
      throw UserError(text("the value is no sensible integer: ", value.dump()), place(key),
                      "take config.json from the model's original");
    return value.get<int64_t>();
  }

  double number(const char* key, double fallback) const {
    if (!has(key)) return fallback;
    if (!json_.at(key).is_number())
      throw UserError(text("the value is not a number: ", json_.at(key).dump()), place(key),
                      "take config.json from the model's original");
    return json_.at(key).get<double>();
  }

  bool flag(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!json_.at(key).is_boolean())
      throw UserError(text("the value is not true or false: ", json_.at(key).dump()), place(key),
                      "take config.json from the model's original");
    return json_.at(key).get<bool>();
  }

  void refuse_true(const char* key) const {
    if (flag(key, false))
      throw UserError(text("\"", key, "\": true is not supported"), place(key), kSupported);
  }

  void require_text(const char* key, const std::string& only) const {
    if (has(key) && json_.at(key) != only)
      throw UserError(text("\"", key, "\": ", json_.at(key).dump(), " is not supported"), place(key),
                      kSupported);
  }

  const Json& json() const { return json_; }

 private:
  const Json& json_;
  std::string file_;
};

std::optional<Llama3RopeScaling> read_rope_scaling(const Keys& keys) {
  if (!keys.has("rope_scaling")) return std::nullopt;
  const Json& json = keys.json().at("rope_scaling");
  if (!json.is_object())
    throw UserError(text("the value is not an object: ", json.dump()), keys.place("rope_scaling"),
                    kSupported);
  const char* type_key = json.contains("rope_type") ? "rope_type" : "type";
  const Json type = json.value(type_key, Json("default"));
  if (type == "default") return std::nullopt;
  if (type != "llama3")
    throw UserError(text("rope_scaling of type ", type.dump(), " is not supported"),
                    keys.place("rope_scaling"), "supported are no rope_scaling, \"default\" and \"llama3\"");
  const Keys inner(json, keys.place("rope_scaling"));
  Llama3RopeScaling scaling;
  scaling.factor = inner.number("factor", 0);
  scaling.low_freq_factor = inner.number("low_freq_factor", 0);
  scaling.high_freq_factor = inner.number("high_freq_factor", 0);
  scaling.original_max_position_embeddings = inner.number("original_max_position_embeddings", 0);
  if (!(scaling.factor >= 1) || !(scaling.low_freq_factor > 0) ||
      !(scaling.high_freq_factor > scaling.low_freq_factor) ||
      !(scaling.original_max_position_embeddings >= 1))
    throw UserError(
        "llama3 rope_scaling needs factor >= 1, 0 < low_freq_factor < high_freq_factor and "
        "original_max_position_embeddings >= 1",
        keys.place("rope_scaling"), "take config.json from the model's original");
  return scaling;
}

// "eos_token_id" is one id or a list of ids.
std::vector<int32_t> read_eos(const Json& json, const std::string& file) {
  std::vector<int32_t> ids;
  if (!json.contains("eos_token_id") || json.at("eos_token_id").is_null()) return ids;
  const Json& value = json.at("eos_token_id");
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    if (!id.is_number_integer() || id.get<double>() < 0 || id.get<double>() > 2e9)
      throw UserError(text("the value is no token id: ", id.dump()), text(file, ": \"eos_token_id\""),
                      "take the file from the model's original");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

}  // namespace

int64_t ModelConfig::layer_parameters() const {
  return layers * (hidden * (2 * q_size() + 2 * kv_size() + 3 * ffn) + 2 * hidden);
}

int64_t ModelConfig::parameters() const {
  return layer_parameters() + hidden + (tied_embeddings ? 1 : 2) * vocabulary * hidden;
}

ModelConfig read_model_config(const std::filesystem::path& model_directory) {
  require_folder(model_directory, "the model's folder",
                 "model.path must be a Hugging Face model directory with config.json and *.safetensors");
  const std::filesystem::path path = model_directory / "config.json";
  const Json json = read_json(path);
  const Keys keys(json, path.string());

  keys.require_text("model_type", "llama");
  keys.require_text("hidden_act", "silu");
  keys.refuse_true("attention_bias");
  keys.refuse_true("mlp_bias");
  if (keys.has("quantization_config"))
    throw UserError("quantised checkpoints are not supported", keys.place("quantization_config"),
                    "use the model's bf16, fp16 or fp32 weights");
  if (keys.has("sliding_window"))
    throw UserError("a model with its own sliding window is not supported", keys.place("sliding_window"),
                    kSupported);

  ModelConfig config;
  config.layers = keys.integer("num_hidden_layers");
  config.hidden = keys.integer("hidden_size");
  config.ffn = keys.integer("intermediate_size");
  config.heads = keys.integer("num_attention_heads");
  config.kv_heads = keys.integer("num_key_value_heads", config.heads);
  config.head_dim = keys.integer("head_dim", config.heads > 0 ? config.hidden / config.heads : 0);
  config.vocabulary = keys.integer("vocab_size");
  config.rms_norm_epsilon = keys.number("rms_norm_eps", 1e-6);
  config.rope_theta = keys.number("rope_theta", 10000);
  config.rope_scaling = read_rope_scaling(keys);
  config.tied_embeddings = keys.flag("tie_word_embeddings", false);
  config.trained_positions = keys.integer("max_position_embeddings", 0);

  const std::filesystem::path generation = model_directory / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(generation, ignored))
    config.eos_ids = read_eos(read_json(generation), generation.string());
  if (config.eos_ids.empty()) config.eos_ids = read_eos(json, path.string());

  validate_model_config(config, path.string());
  return config;
}

void validate_model_config(const ModelConfig& config, const std::string& origin) {
  struct Limit {
    const char* key;
    int64_t value, largest;
  };
  for (const Limit& limit : {Limit{"num_hidden_layers", config.layers, 4096},
                             {"hidden_size", config.hidden, 1 << 18},
                             {"intermediate_size", config.ffn, 1 << 20},
                             {"num_attention_heads", config.heads, 4096},
                             {"num_key_value_heads", config.kv_heads, 4096},
                             {"head_dim", config.head_dim, 256},
                             {"vocab_size", config.vocabulary, 1 << 24}}) {
    if (limit.value < 1 || limit.value > limit.largest)
      throw UserError(text("\"", limit.key, "\" is ", limit.value, ", sensible are 1 to ", limit.largest),
                      origin, "take config.json from the model's original");
  }
  if (config.heads % config.kv_heads != 0)
    throw UserError(
        text(config.heads, " query heads are not a multiple of ", config.kv_heads, " key/value heads"),
        origin, "num_attention_heads must be a multiple of num_key_value_heads");
  if (config.head_dim % 8 != 0)
    throw UserError(text("a head dimension of ", config.head_dim, " is not supported"), origin,
                    "supported are multiples of 8 up to 256");
  if (!(config.rope_theta > 0) || !(config.rms_norm_epsilon >= 0))
    throw UserError("rope_theta must be positive and rms_norm_eps not negative", origin,
                    "take config.json from the model's original");
}

}  // namespace longhalo
