#include "fuzz/targets.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "core/error.hpp"
#include "core/json_depth.hpp"
#include "core/log.hpp"
#include "dataset/token_file.hpp"
#include "model/model_config.hpp"
#include "storage/checkpoint_manifest.hpp"
#include "storage/checksum.hpp"
#include "storage/optimizer_state.hpp"
#include "storage/safetensors.hpp"
#include "tokenizer/chat_template.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo::fuzz {
namespace {

namespace fs = std::filesystem;

// In memory where that can be: a fuzzer writes a file for each of some million inputs.
class OwnFolder {
 public:
  OwnFolder() {
    const fs::path parent =
        ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
    std::string name = (parent / "longhalo_fuzz_XXXXXX").string();
    check(::mkdtemp(name.data()) != nullptr, "a folder of our own can be made");
    path_ = name;
  }
  ~OwnFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  OwnFolder(const OwnFolder&) = delete;
  OwnFolder& operator=(const OwnFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

fs::path folder() {
  static const OwnFolder own;
  return own.path();
}

void put(const fs::path& name, Bytes bytes) {
  const int file = ::open((folder() / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  check(file >= 0, "an input can be written");
  const ssize_t put = ::write(file, bytes.data(), bytes.size());
  ::close(file);
  check(put == static_cast<ssize_t>(bytes.size()), "an input is written whole");
}

void put(const fs::path& name, std::string_view text) {
  put(name, std::as_bytes(std::span(text.data(), text.size())));
}

void only(std::initializer_list<std::string_view> names) {
  for (const auto& entry : fs::directory_iterator(folder())) {
    if (std::find(names.begin(), names.end(), entry.path().filename().string()) == names.end())
      fs::remove(entry.path());
  }
}

// Looks at every byte, so that a sanitizer sees those that are not ours.
uint64_t look_at(Bytes bytes) {
  uint64_t sum = 0;
  for (const std::byte byte : bytes)
    sum += std::to_integer<uint64_t>(byte);
  return sum;
}
volatile uint64_t seen = 0;

void safetensors(Bytes bytes) {
  put("model.safetensors", bytes);
  const SafetensorsFile file(folder() / "model.safetensors");
  for (const std::string& name : file.names()) {
    const TensorView& tensor = file.view(name);
    int64_t elements = 1;
    for (const int64_t length : tensor.shape)
      elements *= length;
    check(elements == tensor.elements(), "a tensor has the elements that its shape says");
    seen = seen + look_at(tensor.bytes);
  }
}

// The index of a model in several files, beside one such file that holds the tensors a and b.
void weight_index(Bytes bytes) {
  constexpr std::string_view header =
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})";
  std::string shard(8, '\0');
  shard[0] = static_cast<char>(header.size());
  shard += header;
  shard += "xyz";
  only({"model.safetensors.index.json", "shard.safetensors"});
  put("shard.safetensors", shard);
  put("model.safetensors.index.json", bytes);
  const ModelWeights weights(folder());
  for (const std::string& name : weights.names())
    seen = seen + look_at(weights.view(name).bytes);
}

constexpr std::string_view kModelConfig =
    R"({"model_type":"llama","num_hidden_layers":1,"hidden_size":8,"intermediate_size":8,"num_attention_heads":1,)"
    R"("vocab_size":8})";

void model_config(Bytes bytes) {
  only({"config.json"});
  put("config.json", bytes);
  const ModelConfig config = read_model_config(folder());
  check(config.parameters() > 0, "the numbers of a config that is taken can be computed with");
}

void generation_config(Bytes bytes) {
  put("config.json", kModelConfig);
  put("generation_config.json", bytes);
  for (const int32_t id : read_model_config(folder()).eos_ids)
    check(id >= 0, "ids are not negative");
}

constexpr std::string_view kText =
    "The rank's 12,345 landmarks: \xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82\t\r\n  and <|im_end|> it's \xff\xfe "
    "not UTF-8.";

void use(const Tokenizer& tokenizer) {
  const std::vector<int32_t> document = tokenizer.encode(kText, SpecialTokens::kAsText);
  const std::vector<int32_t> prompt = tokenizer.encode(kText, SpecialTokens::kParse);
  for (const std::vector<int32_t>* ids : {&document, &prompt, &tokenizer.prefix(), &tokenizer.suffix()}) {
    for (const int32_t id : *ids) {
      check(id >= 0 && id < tokenizer.vocabulary_size(), "ids are of the vocabulary");
      check(tokenizer.text_bytes(id) >= 0, "a token stands for some bytes");
    }
    seen = seen + tokenizer.decode(*ids).size();
  }
}

void tokenizer_json(Bytes bytes) {
  only({"tokenizer.json"});
  put("tokenizer.json", bytes);
  use(*Tokenizer::load(folder()));
}

void tokenizer_model(Bytes bytes) {
  only({"tokenizer.model"});
  put("tokenizer.model", bytes);
  use(*Tokenizer::load(folder()));
}

void place_prompt() {
  const ChatTemplate chat = ChatTemplate::load(folder(), {2024, 7, 26});
  seen = seen + chat.place("Answer briefly.", "What is this?").after_document.size();
}

void tokenizer_config(Bytes bytes) {
  only({"tokenizer_config.json"});
  put("tokenizer_config.json", bytes);
  place_prompt();
}

void chat_template(Bytes bytes) {
  only({"chat_template.jinja"});
  put("chat_template.jinja", bytes);
  place_prompt();
}

void config_yaml(Bytes bytes) {
  put("job.yaml", bytes);
  ConfigSources sources;
  sources.file = folder() / "job.yaml";
  bool taken = false;
  std::string refused;
  for (const Subcommand subcommand : {Subcommand::kInfer, Subcommand::kTrain, Subcommand::kBenchPrefill}) {
    try {
      const Config config = load_config(subcommand, sources);
      check(load_config_text(subcommand, dump_yaml(config), "the dump") == config, "a dump loads as it was");
      seen = seen + dump_json(config).size();
      taken = true;
    } catch (const UserError& error) {
      refused = error.what();
    }
  }
  if (!taken) throw UserError(refused, "job.yaml", "as it says");
}

void token_file(Bytes bytes) {
  put("tokens.h5", bytes);
  const TokenFile tokens(folder() / "tokens.h5");
  std::vector<int32_t> part;
  for (int64_t i = 0; i < tokens.documents(); ++i) {
    seen = seen + tokens.document_name(i).size();
    part.resize(static_cast<size_t>(std::min<int64_t>(tokens.document_tokens(i), 1 << 16)));
    if (!part.empty()) tokens.read(i, 0, part);
  }
}

// The checksum over the rest would refuse nearly every input before it is looked at: the same text with the
// right one.
std::string with_right_checksum(Bytes bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (json_depth(text) > kMostJsonDepth) return std::string(text);
  nlohmann::json stored = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!stored.is_object()) return std::string(text);
  stored.erase("checksum");
  const std::string rest = stored.dump();
  Checksum64 checksum;
  checksum.update(std::as_bytes(std::span(rest.data(), rest.size())));
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(checksum.value()));
  stored["checksum"] = digits.data();
  return stored.dump();
}

void look_at_manifest() {
  const CheckpointManifest manifest = read_manifest(folder());
  OptimizerStateReader reader(folder(), manifest.optimizer_parts());
  for (const std::string& group : reader.groups())
    check(reader.total(group) >= 0, "a group has some elements");
  for (const ManifestPart& part : manifest.parts) {
    try {
      verify_part(folder(), part);
    } catch (const UserError&) {  // there are no parts here
    }
  }
}

void manifest(Bytes bytes) {
  only({kManifestName});
  put(kManifestName, bytes);
  run(Target{"as it is", [](Bytes) { look_at_manifest(); }}, bytes);
  put(kManifestName, with_right_checksum(bytes));
  look_at_manifest();
}

constexpr std::array kTargets{Target{"safetensors", safetensors},
                              Target{"weight_index", weight_index},
                              Target{"model_config", model_config},
                              Target{"generation_config", generation_config},
                              Target{"tokenizer_json", tokenizer_json},
                              Target{"tokenizer_model", tokenizer_model},
                              Target{"tokenizer_config", tokenizer_config},
                              Target{"chat_template", chat_template},
                              Target{"config_yaml", config_yaml},
                              Target{"token_file", token_file},
                              Target{"manifest", manifest}};

}  // namespace

std::span<const Target> all_targets() {
  set_log_level(LogLevel::kError);
  return kTargets;
}

Outcome run(const Target& target, Bytes bytes) {
  try {
    target.read(bytes);
    return Outcome::kTaken;
  } catch (const UserError&) {
    return Outcome::kRefused;
  }
}

}  // namespace longhalo::fuzz
