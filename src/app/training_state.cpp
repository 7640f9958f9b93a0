#include "app/training_state.hpp"

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

using nlohmann::json;

// Change the order of the data, or what is learned of it, in a way that no later step can make good.
constexpr const char* kFixedKeys[] = {"sequence_tokens", "packing", "seed", "validation_share"};

// Of where the weights come from when a job begins: one that goes on has its own, so that another value,
// which somebody expects something of, would do nothing.
constexpr const char* kFirstKeys[] = {"weights", "seed"};

// How far a job goes and how often it reports, which is nobody's business but the user's.
constexpr const char* kFreeKeys[] = {"validate_every", "validation_sequences", "log_every",
                                     "save_every",     "checkpoint_every",     "checkpoint_keep"};

// What is known by its fingerprint alone.
constexpr const char* kParameters = "the list of the model's parameters";
constexpr const char* kData = "the training data";

// Where to look when one of these differs.
std::string whereabouts(const std::string& key) {
  if (key == kParameters) return " (model.path, or model.shape of random weights)";
  if (key == kData) return " (the text of input.documents or input.tokens, or the tokenizer of model.path)";
  return "";
}

std::string differences(const json& before, const json& now) {
  std::string list;
  for (const auto& [key, value] : now.items())
    if (before.contains(key) && before.at(key) != value)
      list += text("\n  ", key, " was ", before.at(key).dump(), ", is ", value.dump(), whereabouts(key));
  return list;
}

// A version that did not look at a setting wrote nothing of it.
std::string unknown(const json& before, const json& now) {
  std::string list;
  for (const auto& [key, value] : now.items())
    if (!before.contains(key)) list += text("\n  ", key, " is ", value.dump());
  return list;
}

}  // namespace

TrainingSettings TrainingSettings::of(const Config& config, const std::string& attention,
                                      const std::string& parameters, const std::string& data) {
  TrainingSettings settings;
  const json all = json::parse(dump_json(config));
  json train = all.at("train");
  settings.fixed = {{"attention", attention},
                    {kParameters, parameters},
                    {kData, data},
                    {"attention.landmark_bias", all.at("attention").at("landmark_bias")}};
  for (const char* key : kFirstKeys)
    settings.fixed[text("model.", key)] = all.at("model").at(key);
  for (const char* key : kFixedKeys) {
    settings.fixed[text("train.", key)] = train.at(key);
    train.erase(key);
  }
  for (const char* key : kFreeKeys)
    train.erase(key);
  // A folder may move; what of it matters afterwards, numbers and tokenizer, is compared by content.
  settings.changed = {{"model.path", all.at("model").at("path")}};
  for (const auto& [key, value] : train.items())
    settings.changed["train." + key] = value;
  return settings;
}

json model_numbers(const ModelConfig& model) {
  json numbers{{"rope_theta", model.rope_theta},
               {"rms_norm_eps", model.rms_norm_epsilon},
               {"tie_word_embeddings", model.tied_embeddings}};
  if (const auto& scaling = model.rope_scaling)
    numbers["rope_scaling"] = {scaling->factor, scaling->low_freq_factor, scaling->high_freq_factor,
                               scaling->original_max_position_embeddings};
  return numbers;
}

json model_heads(const ModelConfig& model) {
  return {{"heads", model.heads}, {"kv_heads", model.kv_heads}, {"head_dim", model.head_dim}};
}

json job_state_of(const TrainingState& state, const TrainingSettings& settings) {
  return {{"step", state.step},
          {"sequences", state.sequences},
          {"updates", state.updates},
          {"skipped", state.skipped},
          {"skipped_in_a_row", state.skipped_in_a_row},
          {"fixed", settings.fixed},
          {"settings", settings.changed}};
}

TrainingState training_state_of(const json& job_state, const TrainingSettings& settings,
                                const std::string& folder, Say say) {
  TrainingState state;
  json fixed, changed;
  try {
    fixed = job_state.at("fixed").get<json::object_t>();
    changed = job_state.at("settings").get<json::object_t>();
    state = {job_state.at("step"), job_state.at("sequences"), job_state.at("updates"),
             job_state.at("skipped"), job_state.at("skipped_in_a_row")};
  } catch (const json::exception& error) {
    throw UserError(text("the checkpoint is not of a training job of this version: ", error.what()), folder,
                    "choose another output.directory");
  }
  const std::string faults = differences(fixed, settings.fixed);
  if (!faults.empty())
    throw UserError(
        text("the checkpoint is of another training job:", faults), folder,
        "set that back, or choose another output.directory (model.path takes over the weights of a "
        "saved model)");
  // Its weights are of a training that went further: no step from here leads to those that were asked for.
  if (const int64_t steps = settings.changed.at("train.steps"); state.step > steps)
    throw UserError(text("the checkpoint is of step ", state.step, ", beyond train.steps, which is ", steps),
                    folder,
                    text("set train.steps to ", state.step,
                         " for the model as it is there, or to more to train on; or choose another "
                         "output.directory"));
  if (say == Say::kNo) return state;
  const std::string notes = differences(changed, settings.changed);
  if (!notes.empty()) log_info(text("settings that differ from the job before:", notes));
  const std::string unsaid = unknown(fixed, settings.fixed) + unknown(changed, settings.changed);
  if (!unsaid.empty())
    log_info(text("settings of which the checkpoint, written by another version, says nothing:", unsaid));
  return state;
}

}  // namespace longhalo
