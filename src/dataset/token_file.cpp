#include "dataset/token_file.hpp"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/hdf5_writer.hpp"
#include "storage/trial_read.hpp"

namespace longhalo {
namespace {

constexpr std::string_view kFormat = "longhalo tokens 1";
constexpr int64_t kShortVocabulary = 65536;           // ids of a vocabulary up to this size fit 16 bits
constexpr int64_t kMaxVocabulary = int64_t{1} << 31;  // ids are int32_t in the program
constexpr size_t kBlockTokens = size_t{1} << 20;

bool is_short(const TokenFileInfo& info) {
  return info.vocabulary_size <= kShortVocabulary;
}

}  // namespace

TokenFileWriter::TokenFileWriter(const std::filesystem::path& target, TokenFileInfo info)
    : target_(target), info_(std::move(info)), spool_name_(target) {
  check(info_.vocabulary_size > 0 && info_.vocabulary_size <= kMaxVocabulary,
        "the vocabulary has 1 to 2^31 tokens");
  spool_ = FileDescriptor(::open(spool_name_.path().c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!spool_.is_open()) throw_write_error(errno, target_, 0);
}

void TokenFileWriter::append_document(const std::string& name, std::span<const int32_t> tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < info_.vocabulary_size) continue;
    throw UserError(text("token id ", tokens[i], " at position ", i, " is outside the vocabulary of ",
                         info_.vocabulary_size),
                    text("document ", name), "use the tokenizer that belongs to the model");
  }
  is_short(info_) ? spool<uint16_t>(tokens) : spool<uint32_t>(tokens);
  offsets_.push_back(offsets_.back() + static_cast<int64_t>(tokens.size()));
  names_.push_back(name);
}

template <class Stored>
void TokenFileWriter::spool(std::span<const int32_t> tokens) {
  std::vector<Stored> block(std::min(kBlockTokens, tokens.size()));
  while (!tokens.empty()) {
    const size_t count = std::min(block.size(), tokens.size());
    std::transform(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count), block.begin(),
                   [](int32_t id) { return static_cast<Stored>(id); });
    const auto bytes_needed = static_cast<int64_t>(tokens.size() * sizeof(Stored));
    write_all(spool_, std::as_bytes(std::span(block).first(count)), target_, bytes_needed);
    tokens = tokens.subspan(count);
  }
}

template <class Stored>
void TokenFileWriter::copy_spool_to(Hdf5Writer& writer) {
  writer.create("tokens", hdf5_type_of<Stored>(), {tokens()});
  std::vector<Stored> block(std::min(kBlockTokens, static_cast<size_t>(tokens())));
  for (int64_t at = 0; at < tokens();) {
    const auto part = std::span(block).first(std::min(block.size(), static_cast<size_t>(tokens() - at)));
    read_exactly(spool_, at * static_cast<int64_t>(sizeof(Stored)), std::as_writable_bytes(part),
                 spool_name_.path());
    writer.append("tokens", std::span<const Stored>(part));
    at += static_cast<int64_t>(part.size());
  }
}

void TokenFileWriter::commit() {
  const int64_t token_bytes = is_short(info_) ? 2 : 4;
  Hdf5Writer writer(target_, tokens() * token_bytes + static_cast<int64_t>(offsets_.size()) * 8);
  writer.file().set_attribute("format", kFormat);
  writer.file().set_attribute("vocabulary_size", info_.vocabulary_size);
  writer.file().set_attribute("tokenizer", info_.tokenizer);
  writer.file().set_attribute("tokenizer_sha256", info_.tokenizer_sha256);
  writer.file().write_strings("document_names", names_);
  writer.write("document_offsets", {static_cast<int64_t>(offsets_.size())},
               std::span<const int64_t>(offsets_));
  is_short(info_) ? copy_spool_to<uint16_t>(writer) : copy_spool_to<uint32_t>(writer);
  writer.commit();
}

TokenFile::TokenFile(const std::filesystem::path& file) : TokenFile(tried(file), AfterTrial{}) {}

// Values that lie one after another are found without the file's own structures; others are all looked up
// once.
const std::filesystem::path& TokenFile::tried(const std::filesystem::path& file) {
  constexpr double kSeconds = 3, kBytesPerSecond = 10e6;  // of the processor
  const auto bytes = static_cast<double>(open_input(file).size_bytes);
  try_to_read(file, kSeconds + bytes / kBytesPerSecond, [&] {
    const TokenFile trial(file, AfterTrial{});
    std::vector<int32_t> part(kBlockTokens);
    for (int64_t i = 0; i < trial.documents() && trial.tokens_.file_offset() < 0; ++i) {
      const int64_t count = trial.document_tokens(i);
      for (int64_t at = 0; at < count; at += static_cast<int64_t>(kBlockTokens))
        trial.read(i, at, std::span(part).first(std::min(kBlockTokens, static_cast<size_t>(count - at))));
    }
  });
  return file;
}

TokenFile::TokenFile(const std::filesystem::path& file, AfterTrial)
    : file_(Hdf5File::open(file)), tokens_(file_.dataset("tokens")) {
  const std::string where = file.string();
  const std::string_view remedy = "make the file again with longhalo tokenize";
  info_.vocabulary_size = file_.int_attribute("vocabulary_size");
  if (info_.vocabulary_size < 1 || info_.vocabulary_size > kMaxVocabulary) {
    throw UserError(text("vocabulary_size is ", info_.vocabulary_size),
                    text(where, ", attribute vocabulary_size"), remedy);
  }
  if (file_.has_attribute("tokenizer")) info_.tokenizer = file_.string_attribute("tokenizer");
  if (file_.has_attribute("tokenizer_sha256"))
    info_.tokenizer_sha256 = file_.string_attribute("tokenizer_sha256");
  const std::array<int64_t, 1> any_length{-1};
  tokens_.expect(tokens_.type() == Hdf5Type::kUint16 ? Hdf5Type::kUint16 : Hdf5Type::kUint32, any_length);

  const Hdf5Dataset offsets = file_.dataset("document_offsets");
  offsets.expect(Hdf5Type::kInt64, any_length);
  if (offsets.rows() < 1) {
    throw UserError("document_offsets is empty; it holds one more value than there are documents",
                    text(where, ", dataset document_offsets"), remedy);
  }
  offsets_.resize(static_cast<size_t>(offsets.rows()));
  offsets.read(0, std::span(offsets_));
  const auto refuse = [&](std::string_view what) {
    throw UserError(what, text(where, ", dataset document_offsets"), remedy);
  };
  if (offsets_.front() != 0) refuse(text("the first offset is ", offsets_.front(), ", not 0"));
  for (size_t i = 1; i < offsets_.size(); ++i) {
    if (offsets_[i] < offsets_[i - 1]) {
      refuse(text("offset ", i, " is ", offsets_[i], ", less than the one before it, ", offsets_[i - 1]));
    }
  }
  if (offsets_.back() != tokens_.rows()) {
    refuse(text("the last offset is ", offsets_.back(), " but there are ", tokens_.rows(), " tokens"));
  }
  if (file_.contains("document_names")) names_ = file_.read_strings("document_names");
  if (!file_.contains("document_names")) {  // a file of another program need not name its documents
    for (size_t i = 0; i + 1 < offsets_.size(); ++i)
      names_.push_back(text("document_", i));
  }
  if (names_.size() + 1 != offsets_.size()) {
    throw UserError(text(names_.size(), " names for ", offsets_.size() - 1, " documents"),
                    text(where, ", dataset document_names"), remedy);
  }
}

const std::string& TokenFile::document_name(int64_t document) const {
  check(document >= 0 && document < documents(), "the document exists");
  return names_[static_cast<size_t>(document)];
}

int64_t TokenFile::document_tokens(int64_t document) const {
  check(document >= 0 && document < documents(), "the document exists");
  return offsets_[static_cast<size_t>(document) + 1] - offsets_[static_cast<size_t>(document)];
}

template <class Stored>
void TokenFile::read_as(int64_t begin, std::span<int32_t> out) const {
  std::vector<Stored> block(std::min(kBlockTokens, out.size()));
  for (size_t at = 0; at < out.size(); at += block.size()) {
    const auto part = std::span(block).first(std::min(block.size(), out.size() - at));
    tokens_.read(begin + static_cast<int64_t>(at), part);
    // An id of 2^31 or more becomes negative here and is refused by the caller like any other.
    std::transform(part.begin(), part.end(), out.begin() + static_cast<std::ptrdiff_t>(at),
                   [](Stored id) { return static_cast<int32_t>(id); });
  }
}

void TokenFile::read(int64_t document, int64_t first, std::span<int32_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  check(first >= 0 && count <= document_tokens(document) && first <= document_tokens(document) - count,
        "the tokens are the document's");
  const int64_t begin = offsets_[static_cast<size_t>(document)] + first;
  tokens_.type() == Hdf5Type::kUint16 ? read_as<uint16_t>(begin, out) : read_as<uint32_t>(begin, out);
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] >= 0 && out[i] < info_.vocabulary_size) continue;
    throw UserError(
        text("token id ", static_cast<uint32_t>(out[i]), " at position ", first + static_cast<int64_t>(i),
             " is outside the vocabulary of ", info_.vocabulary_size),
        text(file_.path().string(), ", document ", document, " (", document_name(document), ")"),
        "make the file again with the tokenizer that belongs to the model");
  }
}

std::vector<int32_t> TokenFile::read(int64_t document) const {
  std::vector<int32_t> tokens(static_cast<size_t>(document_tokens(document)));
  read(document, 0, tokens);
  return tokens;
}

}  // namespace longhalo
