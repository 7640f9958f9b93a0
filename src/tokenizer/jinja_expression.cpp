// Expressions, by recursive descent. From loose to tight: if-else, or, and, not, comparisons, + -, ~, * / //
// %, **, sign, then attributes, calls, filters and tests.
#include <charconv>

#include "core/text.hpp"
#include "tokenizer/jinja_parser.hpp"

namespace longhalo::jinja {
namespace {

using Kind = Expression::Kind;
using TokenKind = Token::Kind;

// Both bound the depth of the tree, and so the stack that evaluating it takes.
constexpr int kDeepest = 200;
constexpr int kMostOperations = 1500;

ExpressionPtr make(Kind kind, int line, std::string name = "") {
  auto node = std::make_unique<Expression>();
  node->kind = kind;
  node->line = line;
  node->name = std::move(name);
  return node;
}

ExpressionPtr make_literal(int line, Value value) {
  ExpressionPtr node = make(Kind::kLiteral, line);
  node->literal = std::move(value);
  return node;
}

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenStream& tokens) : tokens_(tokens) {}

  ExpressionPtr parse(Conditional conditional) {
    return conditional == Conditional::kAllowed ? parse_conditional() : parse_or();
  }

  bool at_tuple_end() const {
    return tokens_.is(TokenKind::kBlockEnd) || tokens_.is(TokenKind::kOutputEnd) || tokens_.is_operator(")");
  }

  ExpressionPtr parse_tuple_items(Conditional conditional) {
    const int line = tokens_.line();
    ExpressionPtr first = parse(conditional);
    if (!tokens_.is_operator(",")) return first;
    ExpressionPtr tuple = make_with(Kind::kTuple, line, std::move(first));
    while (tokens_.accept_operator(",") && !at_tuple_end())
      tuple->children.push_back(parse(conditional));
    return tuple;
  }

 private:
  /// Counts how deep the recursion is: an endless "((((" must not overflow the stack.
  class Level {
   public:
    explicit Level(ExpressionParser& parser) : parser_(parser) {
      if (++parser_.depth_ > kDeepest)
        throw TemplateError(parser_.tokens_.line(), "an expression is nested too deeply");
    }
    ~Level() { --parser_.depth_; }

   private:
    ExpressionParser& parser_;
  };

  ExpressionPtr make_with(Kind kind, int line, ExpressionPtr first, ExpressionPtr second = nullptr,
                          std::string name = "") {
    if (++operations_ > kMostOperations) throw TemplateError(line, "an expression is too long");
    ExpressionPtr node = make(kind, line, std::move(name));
    node->children.push_back(std::move(first));
    if (second) node->children.push_back(std::move(second));
    return node;
  }

  ExpressionPtr parse_conditional() {
    const Level level(*this);
    ExpressionPtr value = parse_or();
    while (tokens_.is_name("if")) {
      const int line = tokens_.take().line;
      ExpressionPtr node = make_with(Kind::kConditional, line, std::move(value), parse_or());
      node->children.push_back(tokens_.accept_name("else") ? parse_conditional() : nullptr);
      value = std::move(node);
    }
    return value;
  }

  ExpressionPtr parse_or() {
    ExpressionPtr left = parse_and();
    while (tokens_.is_name("or")) {
      const int line = tokens_.take().line;
      left = make_with(Kind::kOr, line, std::move(left), parse_and());
    }
    return left;
  }

  ExpressionPtr parse_and() {
    ExpressionPtr left = parse_not();
    while (tokens_.is_name("and")) {
      const int line = tokens_.take().line;
      left = make_with(Kind::kAnd, line, std::move(left), parse_not());
    }
    return left;
  }

  ExpressionPtr parse_not() {
    const Level level(*this);
    if (!tokens_.is_name("not")) return parse_compare();
    const int line = tokens_.take().line;
    return make_with(Kind::kNot, line, parse_not());
  }

  /// The comparison at the current token, or "".
  std::string take_comparison() {
    for (const char* one : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (tokens_.accept_operator(one)) return one;
    }
    if (tokens_.accept_name("in")) return "in";
    if (tokens_.is_name("not") && tokens_.next_is_name("in")) {
      tokens_.take();
      tokens_.take();
      return "not in";
    }
    return "";
  }

  ExpressionPtr parse_compare() {
    ExpressionPtr first = parse_sum();
    const int line = tokens_.line();
    std::string comparison = take_comparison();
    if (comparison.empty()) return first;
    ExpressionPtr node = make_with(Kind::kCompare, line, std::move(first));
    for (; !comparison.empty(); comparison = take_comparison()) {
      node->operators.push_back(std::move(comparison));
      node->children.push_back(parse_sum());
    }
    return node;
  }

  template <class Operand>
  ExpressionPtr parse_left_to_right(std::initializer_list<std::string_view> operators, Operand operand) {
    ExpressionPtr left = operand();
    while (true) {
      std::string_view found;
      for (const std::string_view one : operators) {
        if (tokens_.is_operator(one)) found = one;
      }
      if (found.empty()) return left;
      const int line = tokens_.take().line;
      left = make_with(Kind::kArithmetic, line, std::move(left), operand(), std::string(found));
    }
  }

  ExpressionPtr parse_sum() {
    return parse_left_to_right({"+", "-"}, [this] { return parse_concatenation(); });
  }
  ExpressionPtr parse_concatenation() {
    return parse_left_to_right({"~"}, [this] { return parse_product(); });
  }
  ExpressionPtr parse_product() {
    return parse_left_to_right({"*", "/", "//", "%"}, [this] { return parse_power(); });
  }
  ExpressionPtr parse_power() {
    return parse_left_to_right({"**"}, [this] { return parse_signed(Filters::kYes); });
  }

  enum class Filters { kYes, kNo };

  ExpressionPtr parse_signed(Filters filters) {
    const Level level(*this);
    const int line = tokens_.line();
    ExpressionPtr node;
    if (tokens_.accept_operator("-")) {
      node = make_with(Kind::kNegate, line, parse_signed(Filters::kNo));
    } else if (tokens_.accept_operator("+")) {
      node = make_with(Kind::kPlus, line, parse_signed(Filters::kNo));
    } else {
      node = parse_primary();
    }
    node = parse_postfix(std::move(node));
    return filters == Filters::kYes ? parse_filters(std::move(node)) : std::move(node);
  }

  ExpressionPtr parse_primary() {
    const int line = tokens_.line();
    if (tokens_.is(TokenKind::kName)) {
      std::string name = tokens_.take().text;
      if (name == "true" || name == "True") return make_literal(line, true);
      if (name == "false" || name == "False") return make_literal(line, false);
      if (name == "none" || name == "None") return make_literal(line, None{});
      return make(Kind::kName, line, std::move(name));
    }
    if (tokens_.is(TokenKind::kString)) {
      std::string value = tokens_.take().text;
      while (tokens_.is(TokenKind::kString))
        value += tokens_.take().text;
      return make_literal(line, std::move(value));
    }
    if (tokens_.is(TokenKind::kInteger)) return make_literal(line, take_number<int64_t>());
    if (tokens_.is(TokenKind::kFloat)) return make_literal(line, take_number<double>());
    if (tokens_.accept_operator("(")) {
      if (tokens_.accept_operator(")")) return make(Kind::kTuple, line);
      ExpressionPtr inside = parse_tuple_items(Conditional::kAllowed);
      tokens_.expect_operator(")");
      return inside;
    }
    if (tokens_.accept_operator("[")) return parse_list(line);
    if (tokens_.accept_operator("{")) return parse_dict(line);
    tokens_.fail("an expression");
  }

  template <class Number>
  Value take_number() {
    const Token token = tokens_.take();
    Number number{};
    const char* end = token.text.data() + token.text.size();
    const auto [stop, error] = std::from_chars(token.text.data(), end, number);
    if (error != std::errc{} || stop != end)
      throw TemplateError(token.line, token.text + " is too large a number");
    return number;
  }

  ExpressionPtr parse_list(int line) {
    ExpressionPtr list = make(Kind::kList, line);
    while (!tokens_.accept_operator("]")) {
      if (!list->children.empty()) {
        tokens_.expect_operator(",");
        if (tokens_.accept_operator("]")) break;
      }
      list->children.push_back(parse_conditional());
    }
    return list;
  }

  ExpressionPtr parse_dict(int line) {
    ExpressionPtr dict = make(Kind::kDict, line);
    while (!tokens_.accept_operator("}")) {
      if (!dict->children.empty()) {
        tokens_.expect_operator(",");
        if (tokens_.accept_operator("}")) break;
      }
      dict->children.push_back(parse_conditional());
      tokens_.expect_operator(":");
      dict->children.push_back(parse_conditional());
    }
    return dict;
  }

  ExpressionPtr parse_postfix(ExpressionPtr node) {
    while (true) {
      const int line = tokens_.line();
      if (tokens_.accept_operator(".")) {
        if (tokens_.is(TokenKind::kInteger)) {
          node = make_with(Kind::kItem, line, std::move(node), make_literal(line, take_number<int64_t>()));
        } else {
          node =
              make_with(Kind::kAttribute, line, std::move(node), nullptr, tokens_.take_name("an attribute"));
        }
      } else if (tokens_.accept_operator("[")) {
        node = parse_subscript(std::move(node), line);
      } else if (tokens_.is_operator("(")) {
        node = make_with(Kind::kCall, line, std::move(node));
        parse_arguments(*node);
      } else {
        return node;
      }
    }
  }

  ExpressionPtr parse_subscript(ExpressionPtr object, int line) {
    ExpressionPtr start;
    if (!tokens_.is_operator(":")) start = parse_conditional();
    if (tokens_.accept_operator("]"))
      return make_with(Kind::kItem, line, std::move(object), std::move(start));
    ExpressionPtr slice = make_with(Kind::kSlice, line, std::move(object));
    slice->children.push_back(std::move(start));
    for (int part = 0; part < 2; ++part) {
      const bool given =
          tokens_.accept_operator(":") && !tokens_.is_operator(":") && !tokens_.is_operator("]");
      slice->children.push_back(given ? parse_conditional() : nullptr);
    }
    tokens_.expect_operator("]");
    return slice;
  }

  void parse_arguments(Expression& call) {
    tokens_.expect_operator("(");
    bool is_first = true;
    while (!tokens_.accept_operator(")")) {
      if (!is_first) {
        tokens_.expect_operator(",");
        if (tokens_.accept_operator(")")) return;
      }
      is_first = false;
      const int line = tokens_.line();
      if (tokens_.accept_operator("*")) {
        call.children.push_back(make_with(Kind::kSpread, line, parse_conditional()));
        continue;
      }
      if (tokens_.accept_operator("**")) {
        call.keywords.emplace_back("", parse_conditional());
        continue;
      }
      ExpressionPtr argument = parse_conditional();
      if (argument->kind == Kind::kName && tokens_.accept_operator("=")) {
        call.keywords.emplace_back(argument->name, parse_conditional());
      } else if (!call.keywords.empty()) {
        throw TemplateError(tokens_.line(), "an argument without a name follows one with a name");
      } else {
        call.children.push_back(std::move(argument));
      }
    }
  }

  ExpressionPtr parse_filters(ExpressionPtr node) {
    while (true) {
      const int line = tokens_.line();
      if (tokens_.accept_operator("|")) {
        node = make_with(Kind::kFilter, line, std::move(node), nullptr, tokens_.take_name("a filter"));
        if (tokens_.is_operator("(")) parse_arguments(*node);
      } else if (tokens_.accept_name("is")) {
        node = parse_test(std::move(node), line);
      } else if (tokens_.is_operator("(")) {
        node = make_with(Kind::kCall, line, std::move(node));
        parse_arguments(*node);
      } else {
        return node;
      }
    }
  }

  ExpressionPtr parse_test(ExpressionPtr value, int line) {
    const bool negated = tokens_.accept_name("not");
    ExpressionPtr test = make_with(Kind::kTest, line, std::move(value), nullptr, tokens_.take_name("a test"));
    const bool takes_one = test->name == "divisibleby" || test->name == "eq" || test->name == "equalto" ||
                           test->name == "ne" || test->name == "in" || test->name == "sameas" ||
                           test->name == "lt" || test->name == "gt" || test->name == "le" ||
                           test->name == "ge";
    if (tokens_.is_operator("(")) {
      parse_arguments(*test);
    } else if (takes_one) {
      test->children.push_back(parse_postfix(parse_primary()));
    }
    return negated ? make_with(Kind::kNot, line, std::move(test)) : std::move(test);
  }

  TokenStream& tokens_;
  int depth_ = 0;
  int operations_ = 0;
};

}  // namespace

ExpressionPtr parse_expression(TokenStream& tokens, Conditional conditional) {
  return ExpressionParser(tokens).parse(conditional);
}

ExpressionPtr parse_tuple(TokenStream& tokens, Conditional conditional) {
  return ExpressionParser(tokens).parse_tuple_items(conditional);
}

}  // namespace longhalo::jinja
