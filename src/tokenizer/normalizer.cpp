#include "tokenizer/normalizer.hpp"

#include <algorithm>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "tokenizer/utf8.hpp"

#if LONGHALO_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

namespace longhalo {

#if LONGHALO_HAVE_UTF8PROC

namespace {

// Below U+0300 every character is composed already and none combines with the one before it. In UTF-8 a lead
// byte below 0xCC says so.
constexpr unsigned char kFirstLeadThatMayChange = 0xCC;

int combining_class(int32_t code_point) {
  return utf8proc_get_property(code_point)->combining_class;
}

/// Appends the NFC of `run` to `out`. `decomposed` is a buffer.
void append_nfc(std::string_view run, std::vector<int32_t>& decomposed, std::string& out) {
  constexpr int kLongestDecomposition = 8;  // code points; Unicode's longest canonical one has 4
  decomposed.clear();
  for (size_t at = 0; at < run.size();) {
    const CodePoint next = code_point_at(run, at);
    at += static_cast<size_t>(next.length_bytes);
    int32_t parts[kLongestDecomposition];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(
        static_cast<int32_t>(next.value), parts, kLongestDecomposition,
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &boundary);
    check(count >= 0 && count <= kLongestDecomposition, "utf8proc decomposes every code point");
    decomposed.insert(decomposed.end(), parts, parts + count);
  }
  // Canonical order by a real sort: utf8proc's own exchange sort is quadratic on a long run of marks.
  for (size_t i = 0; i < decomposed.size();) {
    size_t end = i;
    while (end < decomposed.size() && combining_class(decomposed[end]) != 0)
      ++end;
    std::stable_sort(decomposed.begin() + static_cast<ptrdiff_t>(i),
                     decomposed.begin() + static_cast<ptrdiff_t>(end),
                     [](int32_t a, int32_t b) { return combining_class(a) < combining_class(b); });
    i = end + 1;
  }
  const auto composed =
      utf8proc_normalize_utf32(decomposed.data(), static_cast<utf8proc_ssize_t>(decomposed.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  check(composed >= 0, "utf8proc composes every text");
  for (utf8proc_ssize_t i = 0; i < composed; ++i)
    append_utf8(out, static_cast<uint32_t>(decomposed[static_cast<size_t>(i)]));
}

}  // namespace

bool nfc_available() {
  return true;
}

std::string nfc(std::string_view text) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  std::string out;
  out.reserve(text.size());
  std::vector<int32_t> decomposed;
  size_t copied = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (byte(at) < kFirstLeadThatMayChange) continue;
    // A run that may change, with the character before it (which may take a mark) and up to the next ASCII
    // character (which takes part in nothing before it).
    size_t begin = at;
    if (begin > copied) begin -= static_cast<size_t>(code_point_before(text, at).length_bytes);
    out += text.substr(copied, begin - copied);
    while (at < text.size() && byte(at) >= 0x80)
      ++at;
    append_nfc(text.substr(begin, at - begin), decomposed, out);
    copied = at;
  }
  out += text.substr(copied);
  return out;
}

#else

bool nfc_available() {
  return false;
}

std::string nfc(std::string_view) {
  check(false, "NFC is asked for only where the build has it");
  return {};
}

#endif

Normalization read_normalization(const JsonCursor& tokenizer) {
  auto normalizer = tokenizer.find("normalizer");
  if (normalizer && (*normalizer)["type"].string() == "Sequence") {
    normalizer->only_keys({"type", "normalizers"});
    const JsonCursor parts = (*normalizer)["normalizers"];
    if (parts.size() == 0) return Normalization::kNone;
    if (parts.size() > 1) parts.unsupported("a sequence of several normalizers");
    normalizer = parts.at(0);
  }
  if (!normalizer) return Normalization::kNone;
  const std::string type = (*normalizer)["type"].string();
  if (type != "NFC") normalizer->unsupported(text("the normalizer ", type));
  normalizer->only_keys({"type"});
  if (!nfc_available()) {
    normalizer->fail("this build of LongHalo has no Unicode normalisation (NFC)",
                     "install utf8proc (Debian: libutf8proc-dev), configure again and rebuild");
  }
  return Normalization::kNfc;
}

}  // namespace longhalo
