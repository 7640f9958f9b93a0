#include "tokenizer/sentencepiece_spec.hpp"

#include <cstdint>
#include <optional>

namespace longhalo {
namespace {

// Field numbers of sentencepiece_model.proto.
constexpr uint64_t kTrainerSpec = 2;
constexpr uint64_t kNormalizerSpec = 3;
constexpr uint64_t kTrainerModelType = 3;
constexpr uint64_t kTrainerWhitespaceAsSuffix = 24;
constexpr uint64_t kNormalizerCharacterMap = 2;
constexpr uint64_t kNormalizerAddDummyPrefix = 3;
constexpr uint64_t kNormalizerRemoveExtraWhitespaces = 4;
constexpr uint64_t kNormalizerEscapeWhitespaces = 5;
constexpr uint64_t kModelTypeBpe = 2;

struct Field {
  uint64_t number = 0;
  uint64_t value = 0;      // of a varint
  std::string_view bytes;  // of a length-delimited field
};

/// Walks the fields of one message (protocol buffers, wire format).
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    const auto tag = varint();
    if (!tag) return std::nullopt;
    Field field;
    field.number = *tag >> 3;
    switch (*tag & 7U) {
      case 0: {
        const auto value = varint();
        if (!value) return std::nullopt;
        field.value = *value;
        return field;
      }
      case 1:
        return take(8, field);
      case 2: {
        const auto length = varint();
        return length ? take(*length, field) : std::nullopt;
      }
      case 5:
        return take(4, field);
      default:
        return std::nullopt;
    }
  }

 private:
  std::optional<uint64_t> varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7FU) << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }

  std::optional<Field> take(uint64_t length, Field& field) {
    if (length > rest_.size()) return std::nullopt;
    field.bytes = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return field;
  }

  std::string_view rest_;
};

}  // namespace

SentencePieceSpec read_sentencepiece_spec(std::string_view model) {
  SentencePieceSpec spec;
  Fields top(model);
  while (const auto part = top.next()) {
    if (part->number != kTrainerSpec && part->number != kNormalizerSpec) continue;
    Fields settings(part->bytes);
    while (const auto field = settings.next()) {
      if (part->number == kTrainerSpec) {
        if (field->number == kTrainerModelType) spec.is_bpe = field->value == kModelTypeBpe;
        if (field->number == kTrainerWhitespaceAsSuffix) spec.whitespace_as_suffix = field->value != 0;
      } else {
        if (field->number == kNormalizerCharacterMap) spec.rewrites_characters = !field->bytes.empty();
        if (field->number == kNormalizerAddDummyPrefix) spec.add_dummy_prefix = field->value != 0;
        if (field->number == kNormalizerRemoveExtraWhitespaces)
          spec.remove_extra_whitespaces = field->value != 0;
        if (field->number == kNormalizerEscapeWhitespaces) spec.escape_whitespaces = field->value != 0;
      }
    }
  }
  return spec;
}

}  // namespace longhalo
