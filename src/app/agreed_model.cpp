#include "app/agreed_model.hpp"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "app/model_setup.hpp"
#include "app/training_state.hpp"
#include "comm/alike.hpp"
#include "model/checkpoint_reader.hpp"
#include "storage/checksum.hpp"
#include "storage/safetensors.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

constexpr const char* kRemedy =
    "give all hosts the same model: one folder that they share, or copies made anew from one place";

// All that the computation takes from config.json and generation_config.json.
std::string shape_text(const ModelConfig& model) {
  nlohmann::json shape = model_heads(model);
  shape.update(model_numbers(model));
  shape.update({{"layers", model.layers},
                {"hidden", model.hidden},
                {"ffn", model.ffn},
                {"vocabulary", model.vocabulary},
                {"trained_positions", model.trained_positions},
                {"eos", model.eos_ids}});
  return shape.dump();
}

void add_samples(Checksum64& sum, std::span<const std::byte> bytes) {
  constexpr size_t kSample = 4096;
  if (bytes.size() <= 3 * kSample) return sum.update(bytes);
  for (const size_t at : {size_t{0}, (bytes.size() - kSample) / 2, bytes.size() - kSample})
    sum.update(bytes.subspan(at, kSample));
}

}  // namespace

std::string weights_fingerprint(const std::filesystem::path& model_directory) {
  const ModelWeights weights(model_directory);
  Checksum64 sum;
  for (const std::string& name : weights.names()) {
    const TensorView& tensor = weights.view(name);
    sum.update_values(std::span(name));
    sum.update_values(std::span(dtype_name(tensor.dtype)));
    sum.update_values(std::span(std::as_const(tensor.shape)));
    add_samples(sum, tensor.bytes);
  }
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum.value()));
  return digits;
}

std::string model_fingerprint(const Config& config, const AgreedModel& model) {
  std::string all = shape_text(model.shape);
  if (config.model.weights == WeightsSource::kCheckpoint)
    all += model.weights.empty() ? weights_fingerprint(config.model.path) : model.weights;
  if (config.model.path.empty()) return all;
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"}) {
    const std::filesystem::path file = std::filesystem::path(config.model.path) / name;
    std::error_code ignored;
    if (std::filesystem::is_regular_file(file, ignored)) all += name + sha256_of_file(file);
  }
  return all;
}

AgreedModel agreed_model(const MpiSession& session, const Config& config) {
  AgreedModel model;
  session.together([&] { model.shape = model_shape(config); });
  if (config.model.weights != WeightsSource::kCheckpoint) return model;
  if (session.ranks() > 1) {
    require_alike(session, "the shape of the model", shape_text(model.shape),
                  config.model.path + "/config.json", kRemedy);
    session.together([&] { model.weights = weights_fingerprint(config.model.path); });
    require_alike(session, "the fingerprint of the weights", model.weights, config.model.path, kRemedy);
  }
  session.together([&] { require_tensors(config.model.path, model.shape); });
  return model;
}

}  // namespace longhalo
