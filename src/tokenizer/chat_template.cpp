#include "tokenizer/chat_template.hpp"

#include <optional>

#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/json_depth.hpp"
#include "core/text.hpp"
#include "tokenizer/jinja_parser.hpp"
#include "tokenizer/jinja_renderer.hpp"

namespace longhalo {
namespace {

using Json = nlohmann::json;
using SpecialTokens = std::vector<std::pair<std::string, std::string>>;

constexpr std::string_view kRemedy =
    "LongHalo renders the part of Jinja that chat templates use; put a simpler template into "
    "chat_template.jinja in "
    "the model's directory";
constexpr int64_t kLargestTemplateBytes = 1 << 20;
constexpr int64_t kLargestConfigBytes = 64 << 20;

/// Empty when there is no such file.
std::optional<std::string> read_if_there(const std::filesystem::path& path, int64_t largest_bytes) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  return read_text_file(path, largest_bytes);
}

[[noreturn]] void damaged(std::string_view what, const std::filesystem::path& path) {
  throw UserError(what, path.string(), "fetch the model's tokenizer_config.json again, or correct it");
}

/// A token is a text or an object whose "content" is.
std::optional<std::string> token_text(const Json& token) {
  if (token.is_string()) return token.get<std::string>();
  if (token.is_object() && token.contains("content") && token["content"].is_string()) {
    return token["content"].get<std::string>();
  }
  return std::nullopt;
}

std::string template_text(const Json& value, const std::filesystem::path& path) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) damaged("chat_template is neither a text nor a list", path);
  for (const Json& one : value) {
    if (one.is_object() && one.value("name", Json()) == "default" && one.contains("template") &&
        one["template"].is_string()) {
      return one["template"].get<std::string>();
    }
  }
  damaged("chat_template is a list without one whose name is 'default'", path);
}

}  // namespace

struct ChatTemplate::Parsed {
  std::string name;
  std::vector<jinja::Statement> body;
  jinja::Variables special_tokens;
  jinja::Date today;
};

ChatTemplate::ChatTemplate() = default;
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

ChatTemplate ChatTemplate::load(const std::filesystem::path& model_directory, ChatDate today) {
  const std::filesystem::path config_path = model_directory / "tokenizer_config.json";
  const std::filesystem::path template_path = model_directory / "chat_template.jinja";
  std::optional<std::string> source = read_if_there(template_path, kLargestTemplateBytes);
  std::string name = template_path.string();
  SpecialTokens special_tokens;
  if (const auto config_text = read_if_there(config_path, kLargestConfigBytes)) {
    if (json_depth(*config_text) > kMostJsonDepth)
      damaged("tokenizer_config.json is nested too deeply", config_path);
    const Json config = Json::parse(*config_text, nullptr, false);
    if (!config.is_object()) damaged("tokenizer_config.json is not a JSON object", config_path);
    for (const auto& [key, value] : config.items()) {
      const auto token = key.ends_with("_token") ? token_text(value) : std::nullopt;
      if (token) special_tokens.emplace_back(key, *token);
    }
    if (!source && config.contains("chat_template") && !config["chat_template"].is_null()) {
      source = template_text(config["chat_template"], config_path);
      name = config_path.string() + " (chat_template)";
    }
  }
  if (!source) return {};
  return parse(*source, name, std::move(special_tokens), today);
}

ChatTemplate ChatTemplate::parse(std::string_view source, std::string_view name, SpecialTokens special_tokens,
                                 ChatDate today) {
  if (source.size() > static_cast<size_t>(kLargestTemplateBytes)) {
    throw UserError(text("the chat template has more than ", kLargestTemplateBytes, " bytes"), name, kRemedy);
  }
  ChatTemplate result;
  result.parsed_ = std::make_unique<Parsed>();
  result.parsed_->name = name;
  result.parsed_->today = {today.year, today.month, today.day};
  for (auto& [token, value] : special_tokens)
    result.parsed_->special_tokens.emplace_back(token, std::move(value));
  try {
    result.parsed_->body = jinja::parse_template(source);
  } catch (const jinja::TemplateError& error) {
    throw UserError(text("the chat template cannot be used: ", error.what()),
                    text(name, ", template line ", error.line()), kRemedy);
  }
  return result;
}

bool ChatTemplate::exists() const {
  return parsed_ != nullptr;
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const {
  if (!parsed_) {
    throw UserError("the model has no chat template",
                    "chat_template.jinja or tokenizer_config.json of the model",
                    "use a model that was tuned for chat, or add a chat_template.jinja");
  }
  jinja::List list;
  for (const ChatMessage& message : messages) {
    jinja::Dict entry;
    entry.set("role", message.role);
    entry.set("content", message.content);
    list.items.emplace_back(std::move(entry));
  }
  jinja::Variables variables = parsed_->special_tokens;
  variables.emplace_back("messages", std::move(list));
  variables.emplace_back("tools", jinja::None{});
  variables.emplace_back("documents", jinja::None{});
  variables.emplace_back("add_generation_prompt", add_generation_prompt);
  try {
    return jinja::render(parsed_->body, variables, parsed_->today);
  } catch (const jinja::TemplateError& error) {
    throw UserError(text("the chat template cannot be rendered: ", error.what()),
                    text(parsed_->name, ", template line ", error.line()), kRemedy);
  } catch (const jinja::RaisedException& error) {
    throw UserError(text("the chat template refuses the conversation: ", error.what()), parsed_->name,
                    "change what it asks for; some models take no system prompt (input.system_prompt)");
  }
}

ChatTemplate::Placement ChatTemplate::place(std::string_view system_prompt, std::string_view prompt) const {
  if (!parsed_) {
    return {.before_document = system_prompt.empty() ? std::string() : text(system_prompt, "\n\n"),
            .after_document = text("\n\n", prompt, "\n"),
            .source = Placement::Source::kPlain};
  }
  // Stands for the document: letters only, so that no template takes it for white space or markup.
  std::string stand_in;
  for (int attempt = 0; stand_in.empty() || system_prompt.find(stand_in) != std::string_view::npos ||
                        prompt.find(stand_in) != std::string_view::npos;
       ++attempt) {
    stand_in = text("LongHaloDocument", attempt, "End");
  }
  std::vector<ChatMessage> messages;
  if (!system_prompt.empty()) messages.push_back({"system", std::string(system_prompt)});
  messages.push_back({"user", text(stand_in, "\n\n", prompt)});
  const std::string rendered = render(messages, true);
  const size_t at = rendered.find(stand_in);
  if (at == std::string::npos || rendered.find(stand_in, at + 1) != std::string::npos) {
    throw UserError(text("the chat template ", at == std::string::npos ? "drops or changes" : "repeats",
                         " the user's message, so the document has no one place in its text"),
                    parsed_->name, kRemedy);
  }
  return {.before_document = rendered.substr(0, at), .after_document = rendered.substr(at + stand_in.size())};
}

}  // namespace longhalo
