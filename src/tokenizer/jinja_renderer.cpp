#include "tokenizer/jinja_renderer.hpp"

#include <algorithm>
#include <functional>
#include <map>

#include "core/text.hpp"

namespace longhalo::jinja {
namespace {

constexpr int64_t kMostSteps = 2'000'000;
constexpr int64_t kStepsOfRound = 10;  // what making "loop" for a round of a loop counts
constexpr int kDeepest = 300;          // expressions and statements within one another; bounds the stack

/// Variables of one scope; a name that is not here is sought in the scope around it.
struct Scope {
  const Scope* around;
  std::map<std::string, Value, std::less<>> variables;

  const Value* find(std::string_view name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->around) {
      if (const auto found = scope->variables.find(name); found != scope->variables.end())
        return &found->second;
    }
    return nullptr;
  }
};

enum class Flow { kOn, kBreak, kContinue };

class Renderer {
 public:
  Renderer(const Variables& variables, const Date& today) : today_(today) {
    for (const std::string& name : global_functions())
      globals_.variables[name] = Callable{name, nullptr, nullptr};
    for (const auto& [name, value] : variables)
      globals_.variables[name] = value;
  }

  std::string run(const std::vector<Statement>& body) {
    std::string out;
    run_body(body, globals_, out);
    return out;
  }

 private:
  /// Adds the line to what a value complained of, and counts the step.
  template <class Work>
  auto at_line(int line, Work work) {
    if (++steps_ > kMostSteps)
      throw TemplateError(line, "the template takes too many steps; does it loop for ever?");
    if (depth_ == kDeepest) throw TemplateError(line, "the template is nested, or calls itself, too deeply");
    const Level level(depth_);
    try {
      return work();
    } catch (const ValueError& error) {
      throw TemplateError(line, error.what());
    }
  }

  class Level {
   public:
    explicit Level(int& depth) : depth_(depth) { ++depth_; }
    ~Level() { --depth_; }

   private:
    int& depth_;
  };

  Flow run_body(const std::vector<Statement>& body, Scope& scope, std::string& out) {
    for (const Statement& statement : body) {
      const Flow flow = at_line(statement.line, [&] { return run_statement(statement, scope, out); });
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

  Flow run_statement(const Statement& statement, Scope& scope, std::string& out) {
    switch (statement.kind) {
      case Statement::Kind::kText:
        out += statement.text;
        break;
      case Statement::Kind::kOutput:
        out += evaluate(*statement.expression, scope).str();
        break;
      case Statement::Kind::kSet:
        run_set(statement, scope);
        break;
      case Statement::Kind::kFor:
        run_for(statement, scope, out);
        break;
      case Statement::Kind::kIf:
        return run_body(evaluate(*statement.expression, scope).truth() ? statement.body : statement.otherwise,
                        scope, out);
      case Statement::Kind::kMacro:
        scope.variables[statement.text] = Callable{statement.text, nullptr, &statement};
        break;
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
      case Statement::Kind::kGroup: {
        Scope inside{&scope, {}};
        return run_body(statement.body, inside, out);
      }
    }
    check_text_size(out.size());
    return Flow::kOn;
  }

  void run_set(const Statement& set, Scope& scope) {
    if (set.expression) {
      assign(set.targets, evaluate(*set.expression, scope), scope);
      return;
    }
    std::string out;
    Scope inside{&scope, {}};
    run_body(set.body, inside, out);
    assign(set.targets, std::move(out), scope);
  }

  static void assign(const std::vector<Statement::Target>& targets, Value value, Scope& scope) {
    if (targets.size() > 1) {
      std::vector<Value> parts = iterate(value);
      if (parts.size() != targets.size()) {
        throw ValueError(text(targets.size(), " names are given ", parts.size(), " values"));
      }
      for (size_t i = 0; i < targets.size(); ++i)
        scope.variables[targets[i].name] = std::move(parts[i]);
      return;
    }
    const Statement::Target& target = targets.front();
    if (target.attribute.empty()) {
      scope.variables[target.name] = std::move(value);
      return;
    }
    const Value* owner = scope.find(target.name);
    if (owner == nullptr || !owner->is_namespace()) {
      throw ValueError(text("'", target.name, "' is not a namespace; only the attributes of one can be set"));
    }
    (void)value.depth_inside();  // no namespace in a namespace, which could then be in itself
    owner->space().attributes.set(target.attribute, std::move(value));
  }

  void run_for(const Statement& loop, Scope& scope, std::string& out) {
    std::vector<Value> items = iterate(evaluate(*loop.expression, scope));
    if (loop.condition) {
      std::vector<Value> kept;
      for (Value& item : items) {
        Scope inside{&scope, {}};
        assign(loop.targets, item, inside);
        if (evaluate(*loop.condition, inside).truth()) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    // As in Jinja, "else" runs unless some round came to the end of the body: a break or continue is not
    // that.
    bool completes_a_round = false;
    for (size_t i = 0; i < items.size(); ++i) {
      Scope inside{&scope, {}};
      steps_ += kStepsOfRound;
      inside.variables["loop"] = loop_state(items, i);
      assign(loop.targets, items[i], inside);
      const Flow flow = run_body(loop.body, inside, out);
      if (flow == Flow::kBreak) break;
      completes_a_round = completes_a_round || flow == Flow::kOn;
    }
    if (!completes_a_round) {
      Scope inside{&scope, {}};
      run_body(loop.otherwise, inside, out);
    }
  }

  static Value loop_state(const std::vector<Value>& items, size_t i) {
    const auto index = static_cast<int64_t>(i), count = static_cast<int64_t>(items.size());
    Dict state;
    state.entries = {{"index", index + 1},
                     {"index0", index},
                     {"revindex", count - index},
                     {"revindex0", count - index - 1},
                     {"first", index == 0},
                     {"last", index + 1 == count},
                     {"length", count},
                     {"previtem", i > 0 ? items[i - 1] : Value(Undefined{"loop.previtem"})},
                     {"nextitem", i + 1 < items.size() ? items[i + 1] : Value(Undefined{"loop.nextitem"})},
                     {"cycle", Callable{"loop.cycle", std::make_shared<Value>(index), nullptr}}};
    return state;
  }

  Value evaluate(const Expression& node, const Scope& scope) {
    return at_line(node.line, [&] { return evaluate_kind(node, scope); });
  }

  Value evaluate_or_none(const ExpressionPtr& node, const Scope& scope) {
    return node ? evaluate(*node, scope) : Value(None{});
  }

  Value evaluate_kind(const Expression& node, const Scope& scope) {
    using Kind = Expression::Kind;
    const auto child = [&](size_t i) { return evaluate(*node.children[i], scope); };
    switch (node.kind) {
      case Kind::kLiteral:
        return node.literal;
      case Kind::kName: {
        const Value* found = scope.find(node.name);
        return found == nullptr ? Value(Undefined{node.name}) : *found;
      }
      case Kind::kList:
      case Kind::kTuple: {
        List list{{}, node.kind == Kind::kTuple};
        for (size_t i = 0; i < node.children.size(); ++i)
          list.items.push_back(child(i));
        return list;
      }
      case Kind::kDict: {
        Dict dict;
        for (size_t i = 0; i < node.children.size(); i += 2)
          dict.set(child(i), child(i + 1));
        return dict;
      }
      case Kind::kAttribute:
        return get_attribute(child(0), node.name);
      case Kind::kItem:
        return get_item(child(0), child(1));
      case Kind::kSlice:
        return get_slice(child(0), evaluate_or_none(node.children[1], scope),
                         evaluate_or_none(node.children[2], scope),
                         evaluate_or_none(node.children[3], scope));
      case Kind::kCall:
        return call(child(0), arguments_of(node, scope));
      case Kind::kFilter:
        return apply_filter(node.name, child(0), arguments_of(node, scope));
      case Kind::kTest:
        return apply_test(node.name, child(0), arguments_of(node, scope));
      case Kind::kSpread:
        break;  // arguments_of() takes these apart
      case Kind::kNot:
        return !child(0).truth();
      case Kind::kNegate:
        return negated(child(0));
      case Kind::kPlus:
        return arithmetic("+", int64_t{0}, child(0));
      case Kind::kAnd: {
        const Value left = child(0);
        return left.truth() ? child(1) : left;
      }
      case Kind::kOr: {
        const Value left = child(0);
        return left.truth() ? left : child(1);
      }
      case Kind::kArithmetic: {
        const Value left = child(0);
        return arithmetic(node.name, left, child(1));
      }
      case Kind::kCompare:
        return evaluate_comparisons(node, scope);
      case Kind::kConditional:
        if (child(1).truth()) return child(0);
        return node.children[2] ? child(2) : Value(Undefined{"the value of an 'if' without 'else'"});
    }
    throw ValueError("an unknown expression");
  }

  /// a < b < c is a < b and b < c.
  Value evaluate_comparisons(const Expression& node, const Scope& scope) {
    Value left = evaluate(*node.children[0], scope);
    for (size_t i = 0; i < node.operators.size(); ++i) {
      Value right = evaluate(*node.children[i + 1], scope);
      if (!holds(node.operators[i], left, right)) return false;
      left = std::move(right);
    }
    return true;
  }

  static bool holds(const std::string& operation, const Value& left, const Value& right) {
    if (operation == "==") return left == right;
    if (operation == "!=") return !(left == right);
    if (operation == "in") return contains(right, left);
    if (operation == "not in") return !contains(right, left);
    const int order = compare(left, right);
    if (operation == "<") return order < 0;
    if (operation == "<=") return order <= 0;
    return operation == ">" ? order > 0 : order >= 0;
  }

  Arguments arguments_of(const Expression& node, const Scope& scope) {
    Arguments arguments;
    for (size_t i = 1; i < node.children.size(); ++i) {
      const Expression& argument = *node.children[i];
      if (argument.kind == Expression::Kind::kSpread) {
        for (Value& item : iterate(evaluate(*argument.children[0], scope))) {
          arguments.positional.push_back(std::move(item));
        }
      } else {
        arguments.positional.push_back(evaluate(argument, scope));
      }
    }
    for (const auto& [name, expression] : node.keywords) {
      Value value = evaluate(*expression, scope);
      if (!name.empty()) {
        arguments.keywords.emplace_back(name, std::move(value));
        continue;
      }
      if (!value.is_dict()) throw ValueError(text("** takes a map, not ", value.kind()));
      for (const auto& [key, entry] : value.dict().entries)
        arguments.keywords.emplace_back(key.str(), entry);
    }
    return arguments;
  }

  Value call(const Value& callee, const Arguments& arguments) {
    if (callee.is<Undefined>()) {
      throw ValueError(text("'", callee.undefined().name, "' is not a function that is supported"));
    }
    if (!callee.is<Callable>()) throw ValueError(text("a ", callee.kind(), " cannot be called"));
    const Callable& function = callee.callable();
    if (function.macro != nullptr) return call_macro(*function.macro, arguments);
    if (function.receiver == nullptr) return call_global(function.name, arguments, today_);
    if (function.name == "loop.cycle") {
      const auto count = static_cast<int64_t>(arguments.positional.size());
      if (count == 0) throw ValueError("loop.cycle takes at least one value");
      return arguments.positional[static_cast<size_t>(function.receiver->whole() % count)];
    }
    return call_method(*function.receiver, function.name, arguments);
  }

  Value call_macro(const Statement& macro, const Arguments& arguments) {
    if (arguments.positional.size() > macro.parameters.size()) {
      throw ValueError(text("the macro '", macro.text, "' takes ", macro.parameters.size(),
                            " arguments, not ", arguments.positional.size()));
    }
    Scope inside{&globals_, {}};
    for (const auto& argument : arguments.keywords) {
      const auto found =
          std::find_if(macro.parameters.begin(), macro.parameters.end(),
                       [&](const auto& parameter) { return parameter.first == argument.first; });
      if (found == macro.parameters.end()) {
        throw ValueError(text("the macro '", macro.text, "' has no parameter '", argument.first, "'"));
      }
      if (found - macro.parameters.begin() < static_cast<std::ptrdiff_t>(arguments.positional.size())) {
        throw ValueError(text("the macro '", macro.text, "' is given '", argument.first, "' twice"));
      }
    }
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      const auto& [name, otherwise] = macro.parameters[i];
      const Value* given = arguments.find(i, name);
      inside.variables[name] = given != nullptr ? *given
                               : otherwise      ? evaluate(*otherwise, inside)
                                                : Value(Undefined{name});
    }
    std::string out;
    run_body(macro.body, inside, out);
    return out;
  }

  const Date& today_;
  Scope globals_{nullptr, {}};
  int64_t steps_ = 0;
  int depth_ = 0;
};

}  // namespace

std::string render(const std::vector<Statement>& body, const Variables& variables, const Date& today) {
  const Budget budget;
  try {
    return Renderer(variables, today).run(body);
  } catch (const ValueError& error) {  // of the variables, before the first line
    throw TemplateError(1, error.what());
  }
}

}  // namespace longhalo::jinja
