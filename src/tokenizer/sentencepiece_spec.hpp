// The few settings of a SentencePiece model file that the library keeps to itself, read from the file's
// protocol buffer (sentencepiece_model.proto: ModelProto.trainer_spec, .normalizer_spec).
#pragma once

#include <string_view>

namespace longhalo {

struct SentencePieceSpec {
  bool is_bpe = false;  ///< trainer_spec.model_type is BPE
  bool whitespace_as_suffix = false;
  bool rewrites_characters = false;  ///< the normaliser has a character map
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

/// `model` is the content of a file that the library has accepted; what does not parse keeps its default.
SentencePieceSpec read_sentencepiece_spec(std::string_view model);

}  // namespace longhalo
