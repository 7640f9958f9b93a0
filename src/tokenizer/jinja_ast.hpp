// The tree of a Jinja template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/jinja_value.hpp"

namespace longhalo::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;
using NamedExpressions = std::vector<std::pair<std::string, ExpressionPtr>>;

struct Expression {
  enum class Kind {
    kLiteral,
    kName,
    kList,         // children: items
    kTuple,        // children: items
    kDict,         // children: key, value, key, value, ...
    kAttribute,    // children: object; name
    kItem,         // children: object, index
    kSlice,        // children: object, start, stop, step (each of the last three may be null)
    kCall,         // children: callee, arguments...; keywords (without a name: a map of them)
    kSpread,       // children: a list whose items are arguments of the call around it
    kFilter,       // children: value, arguments...; name, keywords
    kTest,         // children: value, arguments...; name
    kNot,          // children: operand
    kNegate,       // children: operand
    kPlus,         // children: operand
    kAnd,          // children: left, right
    kOr,           // children: left, right
    kArithmetic,   // children: left, right; name is the operator
    kCompare,      // children: first, second, ...; operators stand between them
    kConditional,  // children: value, condition, otherwise (may be null)
  };
  Kind kind;
  int line;
  std::string name;
  Value literal;
  std::vector<ExpressionPtr> children;
  NamedExpressions keywords;
  std::vector<std::string> operators;
};

struct Statement {
  enum class Kind {
    kText,    // text
    kOutput,  // expression
    kSet,     // targets, expression; without an expression the body's output is the value
    kFor,     // targets, expression, condition (may be null), body, otherwise
    kIf,      // expression, body, otherwise
    kMacro,   // text is the name; parameters (default may be null), body
    kBreak,
    kContinue,
    kGroup,  // body, with no effect of its own
  };
  struct Target {
    std::string name;
    std::string attribute;  // of a namespace, or empty
  };
  Kind kind;
  int line;
  std::string text;
  std::vector<Target> targets;
  ExpressionPtr expression;
  ExpressionPtr condition;
  NamedExpressions parameters;
  std::vector<Statement> body;
  std::vector<Statement> otherwise;
};

}  // namespace longhalo::jinja
