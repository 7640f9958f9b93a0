// Turns a Jinja template into its tree. What is outside the subset that chat templates use is refused by
// name.
#pragma once

#include <string_view>
#include <vector>

#include "tokenizer/jinja_ast.hpp"
#include "tokenizer/jinja_lexer.hpp"

namespace longhalo::jinja {

/// A place in the tokens, shared by the parsers of statements and of expressions.
class TokenStream {
 public:
  explicit TokenStream(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[at_]; }
  int line() const { return current().line; }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is(Token::Kind kind) const { return current().kind == kind; }
  bool is_operator(std::string_view text) const {
    return is(Token::Kind::kOperator) && current().text == text;
  }
  bool is_name(std::string_view text) const { return is(Token::Kind::kName) && current().text == text; }
  bool next_is_name(std::string_view text) const;
  bool accept_operator(std::string_view text);
  bool accept_name(std::string_view text);
  void expect_operator(std::string_view text);
  void expect_name(std::string_view text);
  std::string take_name(std::string_view purpose);
  [[noreturn]] void fail(std::string_view wanted) const;

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
};

enum class Conditional { kAllowed, kNotAllowed };

/// `a if b else c` and all that binds tighter.
ExpressionPtr parse_expression(TokenStream& tokens, Conditional conditional = Conditional::kAllowed);

/// The same, or several separated by commas: a tuple without parentheses.
ExpressionPtr parse_tuple(TokenStream& tokens, Conditional conditional = Conditional::kAllowed);

/// Throws TemplateError.
std::vector<Statement> parse_template(std::string_view source);

}  // namespace longhalo::jinja
