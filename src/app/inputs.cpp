#include "app/inputs.hpp"

#include <algorithm>

#include "app/document_list.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "dataset/documents.hpp"
#include "storage/result_arrays.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

std::vector<std::string> keys_of(const std::vector<std::string>& entries) {
  std::vector<std::string> keys;
  for (const std::string& entry : entries)
    keys.push_back(as_read_back(entry));
  return keys;
}

std::string digest_of(const std::vector<int32_t>& tokens) {
  return sha256_of_text({reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t)});
}

}  // namespace

void refuse_other_tokenizer(const TokenFile& tokens, const std::string& file,
                            const std::filesystem::path& model_directory) {
  const std::filesystem::path tokenizer = tokenizer_file(model_directory);
  const std::string& made_with = tokens.info().tokenizer_sha256;
  if (made_with.empty() || made_with == sha256_of_file(tokenizer)) return;
  throw UserError(
      text("the token file was made with another tokenizer, ", tokens.info().tokenizer), file,
      text("make it again with ", tokenizer.string(), ", or name the model that it was made for"));
}

Inputs::Inputs(const Config& config, int64_t vocabulary) : vocabulary_(vocabulary) {
  const bool generates =
      std::find(config.tasks.begin(), config.tasks.end(), Task::kGenerate) != config.tasks.end();
  if (config.input.tokens.empty()) {
    names_ = config.input.documents;
    look_at_each(names_, "input.documents", [&](const std::string& name) {
      digests_.push_back(sha256_of_text(read_document(name).text));
    });
  } else {
    read_token_file(config.input.tokens);
  }
  refuse_repeats(names_, "document", [&](size_t a, size_t b) {
    if (token_file_ != nullptr) return text(config.input.tokens, ", documents ", a, " and ", b);
    return text("input.documents, entries ", a + 1, " and ", b + 1);
  });
  document_keys_ = keys_of(names_);
  // Tokens alone need no tokenizer, but if the model has one, it says what stands before them.
  const bool has_one =
      !config.model.path.empty() && std::filesystem::exists(tokenizer_file(config.model.path));
  if (generates || token_file_ == nullptr || has_one) {
    tokenizer_ = Tokenizer::load(config.model.path);
    if (token_file_ != nullptr) refuse_other_tokenizer(*token_file_, config.input.tokens, config.model.path);
  }
  if (generates) {
    read_prompts_of(config.input);
    place_prompts(config);
  } else if (tokenizer_ != nullptr) {
    opening_ = tokenizer_->prefix();
  }
}

// Every token is looked at before work begins: a wrong id in the last document must not cost the first ones.
void Inputs::read_token_file(const std::string& file) {
  token_file_ = std::make_unique<TokenFile>(file);
  if (token_file_->documents() == 0)
    throw UserError("the token file holds no document", file, "make it again with at least one text file");
  for (int64_t i = 0; i < token_file_->documents(); ++i) {
    names_.push_back(token_file_->document_name(i));
    const std::vector<int32_t> tokens = token_file_->read(i);
    const std::string place = text(file, ", document ", i, " (\"", names_.back(), "\")");
    if (tokens.empty())
      throw UserError("the document is empty", place, "leave it out when making the token file");
    check_ids(tokens, place);
    digests_.push_back(digest_of(tokens));
  }
}

void Inputs::read_prompts_of(const Config::Input& input) {
  const std::string& file = input.prompts_file;
  Prompts prompts = file.empty() ? Prompts{input.prompts, {}} : read_prompts(file);
  prompts_ = std::move(prompts.texts);
  refuse_repeats(prompts_, "prompt", [&](size_t a, size_t b) {
    if (!file.empty()) return text(file, ":", prompts.lines[a], " and :", prompts.lines[b]);
    return text("input.prompts, entries ", a + 1, " and ", b + 1);
  });
  prompt_keys_ = keys_of(prompts_);
}

std::string Inputs::fingerprint(int64_t index) const {
  std::string all = digests_[static_cast<size_t>(index)];
  for (const int32_t token : opening_)
    all += text(" ", token);
  return sha256_of_text(all);
}

void Inputs::check_ids(const std::vector<int32_t>& tokens, const std::string& where) const {
  const auto beyond =
      std::find_if(tokens.begin(), tokens.end(), [&](int32_t t) { return t < 0 || t >= vocabulary_; });
  if (beyond == tokens.end()) return;
  throw UserError(text("token id ", *beyond, " is beyond the model's vocabulary of ", vocabulary_),
                  text(where, ", token ", beyond - tokens.begin()),
                  "use the tokenizer that belongs to this model, or make the token file with it");
}

// The template decides what stands before the document and after it. What stands before must not depend on
// the prompt, for the document is read once for all prompts.
void Inputs::place_prompts(const Config& config) {
  const ChatTemplate chat = ChatTemplate::load(config.model.path);
  std::string opening;
  for (size_t i = 0; i < prompts_.size(); ++i) {
    const ChatTemplate::Placement placement = chat.place(config.input.system_prompt, prompts_[i]);
    if (i == 0) opening = placement.before_document;
    if (placement.before_document != opening)
      throw UserError("the chat template puts text before the document that depends on the prompt",
                      config.model.path, "give one prompt a job, or a model with another chat template");
    continuations_.push_back(tokenizer_->encode(placement.after_document, SpecialTokens::kParse));
    if (continuations_.back().empty())
      throw UserError(text("prompt ", i, " leaves nothing to read after the document"), "input.prompts",
                      "write a prompt");
  }
  opening_ = tokenizer_->encode(opening, SpecialTokens::kParse);
  // A template may write the model's begin token itself.
  const std::vector<int32_t>& prefix = tokenizer_->prefix();
  if (!std::equal(prefix.begin(), prefix.end(), opening_.begin(),
                  opening_.begin() + static_cast<std::ptrdiff_t>(std::min(prefix.size(), opening_.size()))))
    opening_.insert(opening_.begin(), prefix.begin(), prefix.end());
}

std::vector<int32_t> Inputs::document_tokens(int64_t index, int64_t& bytes,
                                             const ProgressOptions& options) const {
  const std::string& name = document_name(index);
  const auto refuse_changes = [&](const std::string& digest) {
    if (digest != digests_[static_cast<size_t>(index)])
      throw UserError(
          "the document was changed while the job ran", name,
          "start again with output.if_exists: resume once it is complete; what is recorded stays");
  };
  if (token_file_ != nullptr) {
    std::vector<int32_t> tokens = token_file_->read(index);
    refuse_changes(digest_of(tokens));
    return tokens;
  }
  const Document document = read_document(name);
  refuse_changes(sha256_of_text(document.text));
  bytes = static_cast<int64_t>(document.text.size());
  Progress progress(text("tokenising ", name), bytes, ProgressUnit::kBytes, options);
  return tokenizer_->encode(document.text, SpecialTokens::kAsText,
                            [&](int64_t done, int64_t) { progress.set(done); });
}

std::vector<int32_t> Inputs::beginnings(int64_t tokens) const {
  constexpr int64_t kMostDocuments = 8, kBytesAToken = 16;
  const int64_t documents = std::min(kMostDocuments, this->documents());
  const auto share = static_cast<size_t>(tokens / documents);
  std::vector<int32_t> all = opening_;
  for (int64_t i = 0; i < documents; ++i) {
    std::vector<int32_t> document;
    if (token_file_ != nullptr) {
      document = token_file_->read(i);
    } else {
      std::string text = read_document(document_name(i)).text;
      size_t cut = std::min(text.size(), share * kBytesAToken);
      while (cut > 0 && cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xc0U) == 0x80)
        --cut;  // not inside a character
      text.resize(cut);
      document = tokenizer_->encode(text, SpecialTokens::kAsText);
    }
    document.resize(std::min(document.size(), share));
    check_ids(document, document_name(i));
    all.insert(all.end(), document.begin(), document.end());
  }
  check_ids(opening_, "the chat template's opening");
  all.resize(std::min(all.size(), static_cast<size_t>(tokens)));
  return all;
}

// Of a text that begins with this token. SentencePiece counts a space that it puts before the text, which
// decoding takes away; decoding has a name for a token that stands for no text.
int64_t Inputs::first_bytes(int32_t first_token) const {
  return std::min(tokenizer_->text_bytes(first_token),
                  static_cast<int64_t>(tokenizer_->decode({&first_token, 1}).size()));
}

Sequence Inputs::sequence(int64_t index, const ProgressOptions& progress) const {
  Sequence sequence;
  sequence.tokens = opening_;
  sequence.document_begin = static_cast<int64_t>(opening_.size());
  sequence.prompts = continuations_;
  const std::vector<int32_t> document = document_tokens(index, sequence.document_bytes, progress);
  if (document.empty())
    throw UserError("the model's vocabulary has no token for anything in the document", document_name(index),
                    "check that the file is text, and that the tokenizer belongs to the model");
  sequence.tokens.insert(sequence.tokens.end(), document.begin(), document.end());
  sequence.predicted_bytes = sequence.document_bytes;
  if (sequence.document_bytes > 0 && sequence.document_begin == 0)
    sequence.predicted_bytes -= first_bytes(document.front());

  check_ids(document, document_name(index));
  check_ids(opening_, "the chat template's opening");
  for (const std::vector<int32_t>& prompt : continuations_)
    check_ids(prompt, "a prompt");
  return sequence;
}

}  // namespace longhalo
