// Cuts a Jinja template into text and the tokens inside {{ }} and {% %}; comments and white space control
// ("-", "+", and, as chat templates expect, trim_blocks and lstrip_blocks) are done with here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace longhalo::jinja {

struct Token {
  enum class Kind {
    kText,
    kOutputBegin,
    kOutputEnd,
    kBlockBegin,
    kBlockEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd
  };
  Kind kind;
  std::string text;  // of kString: after escapes
  int line;          // from 1
};

/// The last token is kEnd. Throws TemplateError.
std::vector<Token> tokenize(std::string_view source);

}  // namespace longhalo::jinja
