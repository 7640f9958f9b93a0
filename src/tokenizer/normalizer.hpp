// Unicode normalisation form C (composed characters), which Qwen's tokenizer applies to a text first.
#pragma once

#include <string>
#include <string_view>

#include "tokenizer/json_cursor.hpp"

namespace longhalo {

/// Whether this build can normalise (utf8proc was found).
bool nfc_available();

/// NFC of valid UTF-8 (Unicode Standard Annex 15). Time is n log n even for a run of combining marks.
/// Calls check() if nfc_available() is false.
std::string nfc(std::string_view text);

enum class Normalization { kNone, kNfc };

/// Reads the top level's "normalizer": null, NFC, or a Sequence of at most one NFC. Throws UserError
/// otherwise, also for NFC in a build without it.
Normalization read_normalization(const JsonCursor& tokenizer);

}  // namespace longhalo
