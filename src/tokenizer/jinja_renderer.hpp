// Walks the tree of a Jinja template and writes its text.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tokenizer/jinja_ast.hpp"
#include "tokenizer/jinja_builtins.hpp"

namespace longhalo::jinja {

using Variables = std::vector<std::pair<std::string, Value>>;

/// Throws TemplateError with a line of the template, or RaisedException. Work and text are bounded, so that
/// no template runs for ever or fills memory.
std::string render(const std::vector<Statement>& body, const Variables& variables, const Date& today);

}  // namespace longhalo::jinja
