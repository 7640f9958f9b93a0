#include "tokenizer_reference.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo::test {
namespace {

std::string read_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> read_blobs(const std::filesystem::path& file) {
  const std::string content = read_file(file);
  check(!content.empty(), text("the reference ", file.string(), " is there"));
  std::vector<std::string> blobs;
  for (size_t at = 0; at < content.size();) {
    uint32_t length = 0;
    std::memcpy(&length, content.data() + at, sizeof length);
    blobs.push_back(content.substr(at + sizeof length, length));
    at += sizeof length + length;
  }
  return blobs;
}

std::vector<int32_t> as_ids(const std::string& blob) {
  std::vector<int32_t> ids(blob.size() / sizeof(int32_t));
  if (!ids.empty()) std::memcpy(ids.data(), blob.data(), blob.size());
  return ids;
}

Reference make_reference() {
  Reference made;
  if (!std::filesystem::exists(LONGHALO_PYTHON)) {
    made.missing = text("there is no Python at ", LONGHALO_PYTHON, " (scripts/setup.sh makes it)");
    return made;
  }
  made.folder = std::filesystem::absolute("tokenizer_reference");
  const auto output = made.folder.string() + ".output";
  const auto real_model = std::filesystem::path(LONGHALO_SOURCE_DIR) / "models/smollm2-135m-instruct";
  std::string command = text("PYTHONDONTWRITEBYTECODE=1 '", LONGHALO_PYTHON, "' '", LONGHALO_SOURCE_DIR,
                             "/tests/unit/tokenizer_reference.py' '", made.folder.string(), "' '",
                             LONGHALO_SOURCE_DIR, "/data/byte_tokenizer'");
  if (std::filesystem::exists(real_model / "tokenizer.json")) {
    command += text(" '", real_model.string(), "'");
  }
  // Sanitizer settings are meant for this program, not for Python.
  const int status = std::system(text("env -u LD_PRELOAD ", command, " >'", output, "' 2>&1").c_str());
  constexpr int kPackageMissing = 77;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kPackageMissing) {
    made.missing = text("a Python package is missing (scripts/setup.sh installs it): ", read_file(output));
    return made;
  }
  check(status == 0, text("tokenizer_reference.py makes the reference; it says: ", read_file(output)));
  made.texts = read_blobs(made.folder / "texts.bin");
  for (const auto& entry : std::filesystem::directory_iterator(made.folder)) {
    if (entry.is_directory()) made.names.push_back(entry.path().filename().string());
  }
  std::sort(made.names.begin(), made.names.end());
  return made;
}

}  // namespace

const Reference& reference() {
  static const Reference made = make_reference();
  return made;
}

std::vector<TextReference> read_reference(const std::string& name) {
  const auto blobs = read_blobs(reference().folder / name / "reference.bin");
  const auto stride = static_cast<size_t>(as_ids(blobs.at(0)).at(0));
  std::vector<TextReference> all;
  for (size_t at = 1; at + 2 < blobs.size(); at += 3) {
    all.push_back({all.size() * stride, as_ids(blobs[at]), as_ids(blobs[at + 1]), blobs[at + 2]});
  }
  check(all.size() == (reference().texts.size() + stride - 1) / stride, "the reference covers the corpus");
  return all;
}

std::vector<float> read_scores(const std::string& name) {
  const std::string content = read_file(reference().folder / name / "scores.bin");
  std::vector<float> scores(content.size() / sizeof(float));
  if (!scores.empty()) std::memcpy(scores.data(), content.data(), content.size());
  return scores;
}

}  // namespace longhalo::test
