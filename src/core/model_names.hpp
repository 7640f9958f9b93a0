// Names of files in a Hugging Face directory beside the weights: those of a trained model are its origin's,
// and no other output may take their places.
#pragma once

#include <algorithm>
#include <filesystem>
#include <iterator>

namespace longhalo {

/// What says of a model how it computes and where its weights are.
inline constexpr const char* kModelDescriptions[] = {"config.json", "generation_config.json",
                                                     "model.safetensors.index.json"};

/// What belongs to its tokenizer: a trained model has it from its origin as it is.
inline constexpr const char* kModelCompanions[] = {
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json",     "merges.txt",      "chat_template.jinja",   "added_tokens.json"};

/// Whether a file of this name in a model's folder is read, or copied to a trained one, as a part of it.
inline bool is_of_model(const std::filesystem::path& name) {
  const auto is_one_of = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  return name.extension() == ".safetensors" || is_one_of(kModelDescriptions) || is_one_of(kModelCompanions);
}

}  // namespace longhalo
