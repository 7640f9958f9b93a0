#include "tokenizer/pattern.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

std::string pcre2_message(int error) {
  PCRE2_UCHAR8 buffer[256];
  if (pcre2_get_error_message_8(error, buffer, sizeof buffer) < 0) return text("PCRE2 error ", error);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

MatchScratch::MatchScratch() {
  constexpr size_t kJitStackStart = size_t{32} << 10;
  constexpr size_t kJitStackMost = size_t{16} << 20;
  context_ = pcre2_match_context_create_8(nullptr);
  jit_stack_ = pcre2_jit_stack_create_8(kJitStackStart, kJitStackMost, nullptr);
  match_data_ = pcre2_match_data_create_8(1, nullptr);
  check(context_ != nullptr && match_data_ != nullptr, "PCRE2 has memory for a match");
  if (jit_stack_ != nullptr) pcre2_jit_stack_assign_8(context_, nullptr, jit_stack_);
  // A run of a million spaces is legitimate text: the limits that guard against explosive patterns are
  // lifted; translate_expression() refuses those instead.
  pcre2_set_match_limit_8(context_, UINT32_MAX);
  pcre2_set_depth_limit_8(context_, UINT32_MAX);
  pcre2_set_heap_limit_8(context_, UINT32_MAX);
}

MatchScratch::~MatchScratch() {
  pcre2_match_data_free_8(match_data_);
  pcre2_jit_stack_free_8(jit_stack_);
  pcre2_match_context_free_8(context_);
}

Pattern Pattern::regex(std::string_view expression, std::string_view where) {
  return Pattern(translate_expression(expression, where), PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE,
                 where);
}

Pattern Pattern::literal(std::string_view literal_text, std::string_view where) {
  return Pattern(std::string(literal_text), PCRE2_UTF | PCRE2_LITERAL, where);
}

Pattern Pattern::word_character() {
  return Pattern(R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}])", PCRE2_UTF | PCRE2_UCP,
                 "word characters");
}

Pattern::Pattern(const std::string& pcre2_expression, unsigned options, std::string_view where) {
  int error = 0;
  size_t error_at = 0;
  pcre2_code_8* code = pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(pcre2_expression.data()),
                                       pcre2_expression.size(), options, &error, &error_at, nullptr);
  if (code == nullptr) {
    throw UserError(text("the pattern is not a valid regular expression: ", pcre2_message(error), " at byte ",
                         error_at, " of ", pcre2_expression),
                    where, "fetch the file again from where the model came from");
  }
  code_ = std::shared_ptr<pcre2_code_8>(code, pcre2_code_free_8);
  uint32_t may_match_empty = 0;
  pcre2_pattern_info_8(code, PCRE2_INFO_MATCHEMPTY, &may_match_empty);
  if (may_match_empty != 0) {
    throw UserError(text("the pattern may match the empty string: ", pcre2_expression), where,
                    "use a tokenizer whose patterns always match text");
  }
  // Without just-in-time compilation (a platform that lacks it) pcre2_match interprets: slower, same matches.
  pcre2_jit_compile_8(code, PCRE2_JIT_COMPLETE);
}

bool Pattern::find(std::string_view subject, size_t from, MatchScratch& scratch, ByteRange& match) const {
  const int found = pcre2_match_8(code_.get(), reinterpret_cast<PCRE2_SPTR8>(subject.data()), subject.size(),
                                  from, PCRE2_NO_UTF_CHECK, scratch.match_data_, scratch.context_);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0) {
    throw UserError(text("the pre-tokenizer's pattern gave up: ", pcre2_message(found)),
                    text("byte ", from, " of a text of ", subject.size(), " bytes"),
                    "use a PCRE2 with just-in-time compilation, or break the text's longest runs");
  }
  const size_t* ends = pcre2_get_ovector_pointer_8(scratch.match_data_);
  match = {ends[0], ends[1]};
  return true;
}

}  // namespace longhalo
