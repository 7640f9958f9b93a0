// A model's chat template: how a conversation becomes the one text that the model reads.
//
// The template is the model's own, a program in Jinja, interpreted by the files jinja_*: a strict subset,
// with the settings that the transformers package uses. The rendered text holds special tokens as text
// ("<|im_start|>", often the beginning-of-text token too): encode it with special tokens recognised and none
// added.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace longhalo {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

/// The day that a template gets when it asks for today's. Fixed, so that answers do not change from day to
/// day.
struct ChatDate {
  int year = 2024;
  int month = 7;
  int day = 26;
};

class ChatTemplate {
 public:
  /// What stands around a document in the user's message.
  struct Placement {
    enum class Source { kTemplate, kPlain };
    std::string before_document;
    std::string after_document;         // ends where the answer begins
    Source source = Source::kTemplate;  // kPlain: the model has no chat template
  };

  /// Takes chat_template.jinja of a Hugging Face directory, else "chat_template" of its tokenizer_config.json
  /// (one text, or the one named "default" of a list). A directory without either has no template, which is
  /// no error. Throws UserError with file and line of the template where it is damaged or outside the subset.
  static ChatTemplate load(const std::filesystem::path& model_directory, ChatDate today = {});

  /// From the template's text. `name` stands for the file in messages; `special_tokens` are variables such as
  /// {"bos_token", "<s>"}.
  static ChatTemplate parse(std::string_view source, std::string_view name,
                            std::vector<std::pair<std::string, std::string>> special_tokens,
                            ChatDate today = {});

  ChatTemplate();
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  bool exists() const;

  /// The text of a conversation, and with `add_generation_prompt` the beginning of the next answer. Throws
  /// UserError, also where the template itself refuses the conversation, and where there is no template.
  std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const;

  /// Renders one user message "<document>\n\n<prompt>" after the system message, if that is not empty, and
  /// cuts the text around the document. A template sees neither the document's text nor its length. Without a
  /// template the document comes first and "\n\n<prompt>\n" after it, below the system message. Throws
  /// UserError where the template drops, repeats or changes the document.
  Placement place(std::string_view system_prompt, std::string_view prompt) const;

 private:
  struct Parsed;
  std::unique_ptr<Parsed> parsed_;  // nullptr: no template
};

}  // namespace longhalo
