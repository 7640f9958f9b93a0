// The SentencePiece side: special tokens beside the model, prefix and suffix, damaged models. The model is
// written by hand as the protocol buffer that it is (sentencepiece_model.proto).
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/text.hpp"
#include "tokenizer_fixture.hpp"

namespace longhalo {
namespace {

using test::user_error_of;
using Ids = std::vector<int32_t>;

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7)
    out.push_back(static_cast<char>(0x80 | (value & 0x7F)));
  out.push_back(static_cast<char>(value));
}

void put_number(std::string& out, uint64_t field, uint64_t value) {
  put_varint(out, field << 3);
  put_varint(out, value);
}

void put_bytes(std::string& out, uint64_t field, std::string_view bytes) {
  put_varint(out, field << 3 | 2);
  put_varint(out, bytes.size());
  out += bytes;
}

enum PieceType : uint64_t { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };

void put_piece(std::string& model, std::string_view text, float score, PieceType type) {
  std::string piece;
  put_bytes(piece, 1, text);
  put_varint(piece, 2 << 3 | 5);
  char bits[sizeof score];
  std::memcpy(bits, &score, sizeof score);
  piece.append(bits, sizeof bits);
  put_number(piece, 3, type);
  put_bytes(model, 1, piece);
}

constexpr int32_t kFirstByte = 3;
constexpr int32_t kSpace = kFirstByte + 256;  // then: a, b, c, " a", "ab", " ab", "  "
constexpr int32_t kPieces = kSpace + 8;

/// A BPE model with byte fallback and Llama's normaliser.
std::string tiny_model() {
  std::string model;
  put_piece(model, "<unk>", 0, kUnknown);
  put_piece(model, "<s>", 0, kControl);
  put_piece(model, "</s>", 0, kControl);
  constexpr const char* kHex = "0123456789ABCDEF";
  for (unsigned byte = 0; byte < 256; ++byte) {
    put_piece(model, text("<0x", kHex[byte >> 4], kHex[byte & 15], ">"), 0, kByte);
  }
  float score = -1;
  for (const char* piece : {"\u2581", "a", "b", "c", "\u2581a", "ab", "\u2581ab", "\u2581\u2581"}) {
    put_piece(model, piece, score--, kNormal);
  }
  std::string trainer;
  put_number(trainer, 3, 2);   // model_type: BPE
  put_number(trainer, 35, 1);  // byte_fallback
  put_bytes(model, 2, trainer);
  std::string normalizer;
  put_bytes(normalizer, 1, "identity");
  put_number(normalizer, 3, 1);  // add_dummy_prefix
  put_number(normalizer, 4, 0);  // remove_extra_whitespaces
  put_number(normalizer, 5, 1);  // escape_whitespaces
  put_bytes(model, 3, normalizer);
  return model;
}

class SentencePiece : public testing::Test {
 protected:
  void SetUp() override {
#if !LONGHALO_HAVE_SENTENCEPIECE
    GTEST_SKIP() << "this build has no SentencePiece";
#endif
    folder_.write("tokenizer.model", tiny_model());
  }
  std::unique_ptr<Tokenizer> load() const {
    return Tokenizer::load(folder_.path());
  }

  test::ScratchFolder folder_;
};

TEST_F(SentencePiece, WordsAndSpaces) {
  const auto tokenizer = load();
  const Ids space_a{kSpace + 4};
  EXPECT_EQ(tokenizer->encode("", SpecialTokens::kAsText), Ids{});
  EXPECT_EQ(tokenizer->encode("a", SpecialTokens::kAsText), space_a);
  EXPECT_EQ(tokenizer->encode("a c", SpecialTokens::kAsText), (Ids{kSpace + 4, kSpace, kSpace + 3}));
  EXPECT_EQ(tokenizer->encode("a ", SpecialTokens::kAsText), (Ids{kSpace + 4, kSpace}));
  EXPECT_EQ(tokenizer->encode(" ", SpecialTokens::kAsText), Ids{kSpace + 7});
  EXPECT_EQ(tokenizer->encode("c\n", SpecialTokens::kAsText), (Ids{kSpace, kSpace + 3, kFirstByte + '\n'}));
  for (const std::string text : {"a", "a c  ab\n\nab ", " a", "   ", "\u00E9 c", "a\u2581 b"}) {
    const std::string back = tokenizer->decode(tokenizer->encode(text, SpecialTokens::kAsText));
    EXPECT_EQ(back, text == "a\u2581 b" ? "a  b" : text);  // U+2581 is how the model writes a space
  }
  EXPECT_EQ(tokenizer->prefix(), Ids{1});
  EXPECT_TRUE(tokenizer->suffix().empty());
  EXPECT_EQ(tokenizer->vocabulary_size(), kPieces);
  EXPECT_EQ(tokenizer->token_id("</s>"), 2);
  EXPECT_EQ(tokenizer->token_id("ab"), kSpace + 5);
  EXPECT_EQ(tokenizer->token_id("nothing"), std::nullopt);
}

TEST_F(SentencePiece, TextBytesAreThoseOfTheTextAndTheSpaceBeforeIt) {
  const auto tokenizer = load();
  for (const std::string text : {"a", "a c  ab\n\nab ", " a", "   ", "\u00E9 c"}) {
    int64_t bytes = 0;
    for (const int32_t id : tokenizer->encode(text, SpecialTokens::kAsText))
      bytes += tokenizer->text_bytes(id);
    EXPECT_EQ(bytes, static_cast<int64_t>(text.size()) + 1) << text;
  }
  EXPECT_EQ(tokenizer->text_bytes(1), 0) << "the begin token";
  EXPECT_EQ(tokenizer->text_bytes(kPieces), 0);
}

TEST_F(SentencePiece, SpecialTokensBesideTheModel) {
  EXPECT_EQ(load()->encode("a</s>", SpecialTokens::kParse), (Ids{kSpace + 4, 2}));
  EXPECT_GT(load()->encode("a</s>", SpecialTokens::kAsText).size(), 4U);
  folder_.write("tokenizer_config.json",
                text(R"({"add_bos_token": false, "add_eos_token": true,
      "added_tokens_decoder": {"1": {"content": "<s>", "special": true},
                               ")",
                     kPieces, R"(": {"content": "<|x|>", "special": true, "rstrip": true}}})"));
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->encode("a<|x|> \n c", SpecialTokens::kParse),
            (Ids{kSpace + 4, kPieces, kSpace, kSpace + 3}));
  EXPECT_EQ(tokenizer->decode(Ids{kSpace + 4, kPieces, kSpace + 4, 2}), "a<|x|>a</s>");
  EXPECT_TRUE(tokenizer->prefix().empty());
  EXPECT_EQ(tokenizer->suffix(), Ids{2});
  EXPECT_EQ(tokenizer->vocabulary_size(), kPieces + 1);
  EXPECT_EQ(tokenizer->token_id("<|x|>"), kPieces);
}

TEST_F(SentencePiece, TextAfterASpecialTokenIsAStartOrGoesOn) {
  EXPECT_EQ(load()->encode("a</s>a", SpecialTokens::kParse), (Ids{kSpace + 4, 2, kSpace + 4}));
  folder_.write("tokenizer_config.json", R"({"legacy": false})");
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->encode("a</s>a", SpecialTokens::kParse), (Ids{kSpace + 4, 2, kSpace + 1}));
  EXPECT_EQ(tokenizer->encode("a</s> ab", SpecialTokens::kParse), (Ids{kSpace + 4, 2, kSpace + 6}));
  EXPECT_EQ(tokenizer->encode("</s>\n", SpecialTokens::kParse), (Ids{2, kFirstByte + '\n'}));
}

TEST_F(SentencePiece, FaultsAreNamed) {
  const auto load_it = [&] { load(); };
  const auto expect_fault = [&](const char* config, const char* message) {
    folder_.write("tokenizer_config.json", config);
    const std::string said = user_error_of(load_it);
    EXPECT_NE(said.find(message), std::string::npos) << config << ": " << said;
  };
  expect_fault(R"({"added_tokens_decoder": {"5": {"content": "<|x|>"}}})",
               "has the id 5, which is \"<0x02>\"");
  expect_fault(R"({"added_tokens_decoder": {"x": {"content": "<|x|>"}}})", "a token id is a whole number");
  expect_fault(R"({"added_tokens_decoder": {"999999999": {"content": "<|x|>"}}})",
               "a token id is a whole number");
  expect_fault(R"({"added_tokens_decoder": {"300": {"content": 3}}})", "at added_tokens_decoder.300.content");
  expect_fault(R"({"added_tokens_decoder": {"300": {"content": "x", "single_word": true}}})", "single_word");
  expect_fault(R"({"add_bos_token": "yes"})", "at add_bos_token");
  folder_.write("tokenizer_config.json", "{}");
  const std::string message = user_error_of([&] { load()->decode(Ids{kPieces}); });
  EXPECT_NE(message.find("is no token"), std::string::npos) << message;
}

TEST_F(SentencePiece, CutOffModelsAreRefusedOrWork) {
  const std::string model = tiny_model();
  int refused = 0;
  for (size_t length = 0; length < model.size(); length += 7) {
    folder_.write("tokenizer.model", model.substr(0, length));
    try {
      const auto tokenizer = load();
      tokenizer->decode(tokenizer->encode("a c \xFF\u00E9</s>", SpecialTokens::kParse));
    } catch (const UserError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace longhalo
