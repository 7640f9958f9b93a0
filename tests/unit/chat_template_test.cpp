// The Jinja interpreter against texts that Jinja itself rendered (data/chat_templates.json), what it refuses,
// and how a document is placed.
#include "tokenizer/chat_template.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

using Json = nlohmann::json;

constexpr const char* kChatMl =
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe "
    "kind."
    "<|im_end|>\n{% endif %}<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}";

std::string render(std::string_view source) {
  return ChatTemplate::parse(source, "t.jinja", {{"bos_token", "<s>"}}).render({{"user", "hello"}}, true);
}

/// The message of the UserError, or the text in brackets where there is none.
std::string refusal(std::string_view source) {
  try {
    return text("[", render(source), "]");
  } catch (const UserError& error) {
    return error.what();
  }
}

testing::AssertionResult holds(const std::string& message, std::string_view part) {
  if (message.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << part << "' is not in:\n" << message;
}

/// A model's directory that goes away with the test.
class ModelDirectory {
 public:
  ModelDirectory() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::temp_directory_path() / text("longhalo_", test->name(), "_", ::getpid());
    std::filesystem::create_directories(path_);
  }
  ~ModelDirectory() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, std::string_view content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
  }

 private:
  std::filesystem::path path_;
};

std::string refusal_of_load(const ModelDirectory& model) {
  try {
    ChatTemplate::load(model.path());
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(ChatTemplate, RendersWhatJinjaRenders) {
  std::ifstream file(std::filesystem::path(LONGHALO_SOURCE_DIR) / "data/chat_templates.json");
  const Json stored = Json::parse(file);
  const auto special_tokens = stored["special_tokens"].get<std::map<std::string, std::string>>();
  ASSERT_GE(stored["cases"].size(), 200U);
  for (const Json& one : stored["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>() + ": " + one["template"].get<std::string>().substr(0, 300));
    std::vector<ChatMessage> messages;
    for (const Json& message : one["messages"])
      messages.push_back({message["role"], message["content"]});
    std::optional<std::string> rendered;
    std::string refused;
    try {
      rendered = ChatTemplate::parse(one["template"].get<std::string>(), "stored",
                                     {special_tokens.begin(), special_tokens.end()})
                     .render(messages, one["add_generation_prompt"]);
    } catch (const UserError& error) {
      refused = error.what();
    }
    if (one["expected"].is_null()) {
      EXPECT_FALSE(rendered.has_value()) << "rendered: " << *rendered;
    } else {
      EXPECT_EQ(rendered.value_or(refused), one["expected"].get<std::string>());
    }
  }
}

TEST(ChatTemplate, RefusesWhatItDoesNotKnowByNameAndLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\n{% include 'x' %}",
       "the statement 'include' is not supported\n  where:  t.jinja, template line 2"},
      {"{% block b %}{% endblock %}", "the statement 'block' is not supported"},
      {"{% call m() %}{% endcall %}", "the statement 'call' is not supported"},
      {"{% filter upper %}x{% endfilter %}", "the statement 'filter' is not supported"},
      {"\n\n{{ 'x' | wordwrap }}",
       "the filter 'wordwrap' is not supported\n  where:  t.jinja, template line 3"},
      {"{{ 'x' is prime }}", "the test 'prime' is not supported"},
      {"{{ 'x'.format(1) }}", "'format' is not a function that is supported"},
      {"{{ lipsum() }}", "'lipsum' is not a function that is supported"},
      {"{{ '%s' % 1 }}", "formatting a text with % is not supported"},
      {"{% for x in [] recursive %}{% endfor %}", "'recursive' loops are not supported"},
      {"{% for x in [1] %}{% macro m() %}{% endmacro %}{% endfor %}", "a macro inside a loop"},
      {"{{ 0x10 }}", "only decimal numbers are supported"},
      {"{{ 'É'.lower() }}", "the case of letters beyond ASCII is not supported"},
      {"{{ 9223372036854775807 + 1 }}", "a whole number grows beyond 64 bits"},
      {"{{ 99999999999999999999 }}", "is too large a number"},
      {"{{ {}.pop('a') }}", "the method 'pop' of a map is not supported"},
      {"{{ none + 1 }}", "a none + a whole number is not possible"},
      {"{{ nothing.there }}", "'nothing' is undefined"},
  };
  for (const auto& [source, part] : cases)
    EXPECT_TRUE(holds(refusal(source), part)) << source;
}

TEST(ChatTemplate, RefusesBrokenTemplates) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{{ 1", "has no '}}'"},
      {"a\n{% if true", "has no '%}'\n  where:  t.jinja, template line 2"},
      {"{# x", "has no '#}'"},
      {"{% raw %} x", "'raw' has no 'endraw'"},
      {"{% if true %}x", "has no 'endif'"},
      {"{% for x in [] %}x{% endif %}", "the statement 'endif' is not supported"},
      {"{% endfor %}", "the statement 'endfor' is not supported"},
      {"{{ 'x }}", "has no closing quote"},
      {"{{ 'x\\", "has no closing quote"},
      {"{{ (1 }}", "unexpected '}'"},
      {"{{ [1, 2) }}", "unexpected ')'"},
      {"{{ }}", "found '}}' where an expression should be"},
      {"{{ 1 2 }}", "found '2' where '}}' should be"},
      {"{% set x %}", "has no 'endset'"},
      {"{% set 1 = 2 %}", "found '1' where a name should be"},
      {"{% for x of y %}", "found 'of' where 'in' should be"},
      {"{{ 1 ? 2 }}", "unexpected character '?'"},
      {"{{ é }}", "unexpected character 'é'"},
      {"{% break %}", "'break' outside a loop"},
      {"{% %}", "found '%}' where a statement should be"},
      {"{{ '\\ud83d' }}", "names no character"},
      {"{{ '\\xg0' }}", "too few hexadecimal digits"},
      {"{{ x | }}", "where a filter should be"},
      {"{{ f(a=1, 2) }}", "an argument without a name follows one with a name"},
  };
  for (const auto& [source, part] : cases)
    EXPECT_TRUE(holds(refusal(source), part)) << source;
}

TEST(ChatTemplate, NoTemplateRunsForEverOrFillsTheMemory) {
  std::string loops = "x";
  for (int i = 0; i < 5; ++i)
    loops = "{% for i in range(100000) %}" + loops + "{% endfor %}";
  EXPECT_TRUE(holds(refusal(loops), "too many steps"));
  EXPECT_TRUE(holds(refusal("{{ range(100001) }}"), "more than 100000 numbers"));
  EXPECT_TRUE(holds(refusal("{{ 'x' * 4611686018427387904 }}"), "grows beyond"));
  EXPECT_TRUE(holds(refusal("{{ [1] * 4611686018427387904 }}"), "grows beyond"));
  EXPECT_TRUE(holds(refusal("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "too deeply"));
  EXPECT_TRUE(
      holds(refusal("{% macro m(n) %}{% if n %}{% if n %}{{ m(n - - 1) }}{% endif %}{% endif %}{% endmacro %}"
                    "{{ m(4) }}"),
            "too deeply"));
  EXPECT_TRUE(holds(refusal("{{ " + std::string(100000, '(') + "1" + std::string(100000, ')') + " }}"),
                    "too deeply"));
  EXPECT_TRUE(
      holds(refusal("{{ " + std::string(100000, '[') + std::string(100000, ']') + " }}"), "too deeply"));
  EXPECT_TRUE(holds(refusal("{{ " + std::string(100000, '-') + "1 }}"), "too deeply"));
  std::string sum = "1", negations, nested, closing;
  for (int i = 0; i < 100000; ++i)
    sum += "+1";
  for (int i = 0; i < 10000; ++i)
    negations += "not ";
  for (int i = 0; i < 10000; ++i) {
    nested += "{% if true %}";
    closing += "{% endif %}";
  }
  EXPECT_TRUE(holds(refusal("{{ " + sum + " }}"), "too long"));
  EXPECT_TRUE(holds(refusal("{{ " + negations + "1 }}"), "too deeply"));
  EXPECT_TRUE(holds(refusal(nested + closing), "nested too deeply"));
  EXPECT_TRUE(holds(refusal("{% set l = [1] %}{% set ns = namespace(l=l) %}{% for i in range(200) %}"
                            "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}"),
                    "nested too deeply"));
  EXPECT_TRUE(holds(refusal(std::string((1 << 20) + 1, 'x')), "more than"));
}

TEST(ChatTemplate, ATemplateMayRefuseTheConversation) {
  const std::string message = refusal("{{ raise_exception('System role not supported') }}");
  EXPECT_TRUE(holds(message, "the chat template refuses the conversation: System role not supported"));
  EXPECT_TRUE(holds(message, "input.system_prompt"));
}

TEST(ChatTemplate, PlacesTheDocumentInTheUsersMessage) {
  const ChatTemplate chat = ChatTemplate::parse(kChatMl, "t.jinja", {});
  const auto plain = chat.place("", "Why?");
  EXPECT_EQ(plain.before_document, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n");
  EXPECT_EQ(plain.after_document, "\n\nWhy?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(plain.source, ChatTemplate::Placement::Source::kTemplate);
  const auto with_system = chat.place("Be brief.", "Why?");
  EXPECT_EQ(with_system.before_document, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n");
  // Rendering with the document itself gives the same text.
  EXPECT_EQ(chat.render({{"user", "A document.\n\nWhy?"}}, true),
            plain.before_document + "A document." + plain.after_document);
}

TEST(ChatTemplate, TheStandInForTheDocumentIsUnique) {
  const ChatTemplate chat = ChatTemplate::parse(kChatMl, "t.jinja", {});
  const auto placement = chat.place("LongHaloDocument1End", "LongHaloDocument0End");
  EXPECT_TRUE(placement.before_document.find("LongHaloDocument1End") != std::string::npos);
  EXPECT_TRUE(placement.after_document.starts_with("\n\nLongHaloDocument0End"));
}

TEST(ChatTemplate, RefusesTemplatesThatLoseTheDocument) {
  const auto place = [](std::string_view source) -> std::string {
    try {
      return ChatTemplate::parse(source, "t.jinja", {}).place("", "Why?").before_document;
    } catch (const UserError& error) {
      return error.what();
    }
  };
  EXPECT_TRUE(holds(place("no messages"), "drops or changes the user's message"));
  EXPECT_TRUE(holds(place("{{ messages[0].content.upper() }}"), "drops or changes the user's message"));
  EXPECT_TRUE(holds(place("{{ messages[0].content * 2 }}"), "repeats the user's message"));
  EXPECT_EQ(place("a {{ messages[0].content | trim }}"), "a ");
}

TEST(ChatTemplate, WithoutATemplateTheDocumentComesFirst) {
  const ModelDirectory model;
  const ChatTemplate chat = ChatTemplate::load(model.path());
  EXPECT_FALSE(chat.exists());
  const auto placement = chat.place("", "Why?");
  EXPECT_EQ(placement.before_document, "");
  EXPECT_EQ(placement.after_document, "\n\nWhy?\n");
  EXPECT_EQ(placement.source, ChatTemplate::Placement::Source::kPlain);
  EXPECT_EQ(chat.place("Be brief.", "Why?").before_document, "Be brief.\n\n");
  EXPECT_THROW(chat.render({{"user", "x"}}, true), UserError);
}

TEST(ChatTemplate, LoadsFromTheTokenizersConfig) {
  const ModelDirectory model;
  model.write("tokenizer_config.json",
              R"({"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
      "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null, "add_bos_token": true})");
  EXPECT_EQ(ChatTemplate::load(model.path()).render({{"user", "x"}}, true), "<s></s>False");
  model.write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "tools"},
      {"name": "default", "template": "the default"}]})");
  EXPECT_EQ(ChatTemplate::load(model.path()).render({{"user", "x"}}, true), "the default");
  model.write("chat_template.jinja", "the file\n");
  EXPECT_EQ(ChatTemplate::load(model.path()).render({{"user", "x"}}, true), "the file");
  model.write("tokenizer_config.json", R"({"chat_template": null})");
  std::filesystem::remove(model.path() / "chat_template.jinja");
  EXPECT_FALSE(ChatTemplate::load(model.path()).exists());
}

TEST(ChatTemplate, DamagedTokenizerConfigsAreNamed) {
  const ModelDirectory model;
  const std::string path = (model.path() / "tokenizer_config.json").string();
  for (const char* content :
       {"{\"chat_template\": ", "[1]", "", "{\"chat_template\": 5}", "{\"chat_template\": []}",
        "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"x\"}]}"}) {
    model.write("tokenizer_config.json", content);
    EXPECT_TRUE(holds(refusal_of_load(model), path)) << content;
  }
  model.write("tokenizer_config.json", R"({"chat_template": "a\n{{ 1"})");
  EXPECT_TRUE(holds(refusal_of_load(model), path + " (chat_template), template line 2"));
}

TEST(ChatTemplate, TheDateIsThatOfTheCaller) {
  const auto chat = ChatTemplate::parse("{{ strftime_now('%d %b %Y, %A') }}", "t", {},
                                        {.year = 2025, .month = 3, .day = 1});
  EXPECT_EQ(chat.render({{"user", "x"}}, true), "01 Mar 2025, Saturday");
}

}  // namespace
}  // namespace longhalo
