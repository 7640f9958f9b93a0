// Names of files in a Hugging Face directory beside the weights: those of a trained model are its origin's,
// and no other output may take their places.
#pragma once

namespace longhalo {

/// What says of a model how it computes and where its weights are.
inline constexpr const char* kModelDescriptions[] = {"config.json", "generation_config.json",
                                                     "model.safetensors.index.json"};

/// What belongs to its tokenizer: a trained model has it from its origin as it is.
inline constexpr const char* kModelCompanions[] = {
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json",     "merges.txt",      "chat_template.jinja",   "added_tokens.json"};

}  // namespace longhalo
