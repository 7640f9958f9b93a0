#include "tokenizer/jinja_parser.hpp"

#include <algorithm>
#include <utility>

#include "core/text.hpp"

namespace longhalo::jinja {
namespace {

using Kind = Statement::Kind;
using TokenKind = Token::Kind;

constexpr int kDeepest = 100;

std::string shown(const Token& token) {
  switch (token.kind) {
    case TokenKind::kText:
      return "text";
    case TokenKind::kOutputBegin:
      return "'{{'";
    case TokenKind::kOutputEnd:
      return "'}}'";
    case TokenKind::kBlockBegin:
      return "'{%'";
    case TokenKind::kBlockEnd:
      return "'%}'";
    case TokenKind::kEnd:
      return "the end of the template";
    default:
      return text("'", token.text, "'");
  }
}

class StatementParser {
 public:
  explicit StatementParser(std::string_view source) : tokens_(tokenize(source)) {}

  std::vector<Statement> run() {
    std::vector<Statement> body = parse_body({});
    if (!tokens_.is(TokenKind::kEnd)) tokens_.fail("the end of the template");
    return body;
  }

 private:
  /// Statements up to a block tag that begins with one of `ends` (its "{%" is taken, its name is current), or
  /// up to the end of the template when there are none.
  std::vector<Statement> parse_body(std::initializer_list<std::string_view> ends) {
    if (++depth_ > kDeepest) throw TemplateError(tokens_.line(), "blocks are nested too deeply");
    const int begin_line = tokens_.line();
    std::vector<Statement> body;
    while (!tokens_.is(TokenKind::kEnd)) {
      const Token token = tokens_.take();
      if (token.kind == TokenKind::kText) {
        body.push_back(make(Kind::kText, token.line));
        body.back().text = token.text;
      } else if (token.kind == TokenKind::kOutputBegin) {
        body.push_back(make(Kind::kOutput, token.line));
        body.back().expression = parse_tuple(tokens_);
        if (!tokens_.is(TokenKind::kOutputEnd)) tokens_.fail("'}}'");
        tokens_.take();
      } else {
        const auto is_current = [&](std::string_view name) { return tokens_.is_name(name); };
        if (std::any_of(ends.begin(), ends.end(), is_current)) {
          --depth_;
          return body;
        }
        body.push_back(parse_block(token.line));
      }
    }
    if (ends.size() != 0) {
      throw TemplateError(begin_line, text("the block before this line has no '", *(ends.end() - 1), "'"));
    }
    --depth_;
    return body;
  }

  static Statement make(Kind kind, int line) {
    Statement statement{};
    statement.kind = kind;
    statement.line = line;
    return statement;
  }

  void end_tag() {
    if (!tokens_.is(TokenKind::kBlockEnd)) tokens_.fail("'%}'");
    tokens_.take();
  }

  void end_block(std::string_view name) {
    tokens_.expect_name(name);
    end_tag();
  }

  Statement parse_block(int line) {
    const std::string name = tokens_.take_name("a statement");
    if (name == "set") return parse_set(line);
    if (name == "for") return parse_for(line);
    if (name == "if") return parse_if(line);
    if (name == "macro") return parse_macro(line);
    if (name == "break" || name == "continue") {
      if (loops_ == 0) throw TemplateError(line, text("'", name, "' outside a loop"));
      end_tag();
      return make(name == "break" ? Kind::kBreak : Kind::kContinue, line);
    }
    // Marks what the model itself says, for training; the text is as without it.
    if (name == "generation") {
      end_tag();
      Statement group = make(Kind::kGroup, line);
      group.body = parse_body({"endgeneration"});
      end_block("endgeneration");
      return group;
    }
    throw TemplateError(line, text("the statement '", name, "' is not supported"));
  }

  std::vector<Statement::Target> parse_targets() {
    std::vector<Statement::Target> targets;
    const bool in_parentheses = tokens_.accept_operator("(");
    do {
      targets.push_back({tokens_.take_name("a name"), ""});
    } while (tokens_.accept_operator(","));
    if (in_parentheses) tokens_.expect_operator(")");
    return targets;
  }

  Statement parse_set(int line) {
    Statement set = make(Kind::kSet, line);
    set.targets = parse_targets();
    if (set.targets.size() == 1 && tokens_.accept_operator(".")) {
      set.targets[0].attribute = tokens_.take_name("an attribute");
    }
    if (tokens_.accept_operator("=")) {
      set.expression = parse_tuple(tokens_);
      end_tag();
      return set;
    }
    if (set.targets.size() != 1 || !tokens_.is(TokenKind::kBlockEnd)) tokens_.fail("'='");
    end_tag();
    set.body = parse_body({"endset"});
    end_block("endset");
    return set;
  }

  Statement parse_for(int line) {
    Statement loop = make(Kind::kFor, line);
    loop.targets = parse_targets();
    tokens_.expect_name("in");
    loop.expression = parse_tuple(tokens_, Conditional::kNotAllowed);
    if (tokens_.accept_name("if")) loop.condition = parse_expression(tokens_);
    if (tokens_.is_name("recursive")) throw TemplateError(line, "'recursive' loops are not supported");
    end_tag();
    ++loops_;
    ++scopes_;
    loop.body = parse_body({"else", "endfor"});
    --loops_;
    if (tokens_.accept_name("else")) {
      end_tag();
      loop.otherwise = parse_body({"endfor"});
    }
    --scopes_;
    end_block("endfor");
    return loop;
  }

  /// An "elif" is an "if" that is all of the "else".
  Statement parse_if(int line) {
    Statement branch = make(Kind::kIf, line);
    branch.expression = parse_tuple(tokens_, Conditional::kNotAllowed);
    end_tag();
    branch.body = parse_body({"elif", "else", "endif"});
    const int next_line = tokens_.line();
    if (tokens_.accept_name("elif")) {
      if (++depth_ > kDeepest) throw TemplateError(line, "blocks are nested too deeply");
      branch.otherwise.push_back(parse_if(next_line));
      --depth_;
      return branch;
    }
    if (tokens_.accept_name("else")) {
      end_tag();
      branch.otherwise = parse_body({"endif"});
    }
    end_block("endif");
    return branch;
  }

  Statement parse_macro(int line) {
    // A macro sees the variables outside all loops and macros; one within would have to keep theirs.
    if (scopes_ > 0) throw TemplateError(line, "a macro inside a loop or another macro is not supported");
    Statement macro = make(Kind::kMacro, line);
    macro.text = tokens_.take_name("the macro's name");
    tokens_.expect_operator("(");
    while (!tokens_.accept_operator(")")) {
      if (!macro.parameters.empty()) tokens_.expect_operator(",");
      const std::string name = tokens_.take_name("a parameter");
      const bool has_default = tokens_.accept_operator("=");
      macro.parameters.emplace_back(name, has_default ? parse_expression(tokens_) : nullptr);
    }
    end_tag();
    const int loops_around = std::exchange(loops_, 0);
    ++scopes_;
    macro.body = parse_body({"endmacro"});
    --scopes_;
    loops_ = loops_around;
    end_block("endmacro");
    return macro;
  }

  TokenStream tokens_;
  int depth_ = 0;
  int loops_ = 0;   // around the current place, within the current macro
  int scopes_ = 0;  // loops and macros around the current place
};

}  // namespace

bool TokenStream::next_is_name(std::string_view name) const {
  return at_ + 1 < tokens_.size() && tokens_[at_ + 1].kind == TokenKind::kName &&
         tokens_[at_ + 1].text == name;
}

bool TokenStream::accept_operator(std::string_view wanted) {
  const bool found = is_operator(wanted);
  if (found) take();
  return found;
}

bool TokenStream::accept_name(std::string_view wanted) {
  const bool found = is_name(wanted);
  if (found) take();
  return found;
}

void TokenStream::expect_operator(std::string_view wanted) {
  if (!accept_operator(wanted)) fail(text("'", wanted, "'"));
}

void TokenStream::expect_name(std::string_view wanted) {
  if (!accept_name(wanted)) fail(text("'", wanted, "'"));
}

std::string TokenStream::take_name(std::string_view purpose) {
  if (!is(TokenKind::kName)) fail(purpose);
  return take().text;
}

void TokenStream::fail(std::string_view wanted) const {
  throw TemplateError(line(), text("found ", shown(current()), " where ", wanted, " should be"));
}

std::vector<Statement> parse_template(std::string_view source) {
  return StatementParser(source).run();
}

}  // namespace longhalo::jinja
