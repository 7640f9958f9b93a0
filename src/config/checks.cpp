#include "config/checks.hpp"

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "config/schema.hpp"
#include "core/file_access.hpp"
#include "core/model_names.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr size_t kMostBands = 4;
constexpr int64_t kMostAlignment = int64_t{1} << 31;

class Checker {
 public:
  Checker(Subcommand subcommand, const Config& config, const KeyOrigins& origins, ConfigFaults& faults)
      : subcommand_(subcommand), config_(config), origins_(origins), faults_(faults) {}

  void run() {
    check_attention();
    check_model();
    check_input();
    check_generate();
    check_run();
    check_train();
    check_activations();
    check_bench();
  }

  void run_places(const std::filesystem::path& config_file) {
    check_origin();
    check_outputs(config_file);
  }

 private:
  /// A fault at the place of the first of `keys` that is set somewhere, unless one of them is faulty already.
  void fault(std::initializer_list<std::string_view> keys, std::string_view what) {
    std::string_view place = origins_.config_name;
    for (auto key = std::rbegin(keys); key != std::rend(keys); ++key) {
      if (origins_.faulty.contains(*key)) return;
      if (const auto found = origins_.place.find(*key); found != origins_.place.end()) place = found->second;
    }
    faults_.add(place, what);
  }

  /// "attention.window 2048 (default)" or "(demo.yaml:3:5)".
  std::string told(std::string_view key) const {
    const auto found = origins_.place.find(key);
    return text(key, " ", schema().find_key(key)->write(config_).dump(), " (",
                found == origins_.place.end() ? "default" : found->second, ")");
  }

  void check_attention() {
    const Config::Attention& attention = config_.attention;
    const Config::Attention standard;
    if (!attention.bands.empty()) {
      for (const auto& [key, changed] :
           {std::pair{"attention.window", attention.window != standard.window},
            std::pair{"attention.landmark_stride", attention.landmark_stride != standard.landmark_stride}}) {
        if (changed)
          fault({key, "attention.bands"}, text(told(key),
                                               " has no effect beside attention.bands, which "
                                               "replaces it; remove one of the two"));
      }
      check_bands();
      return;
    }
    if (attention.landmark_stride > attention.window) {
      fault({"attention.landmark_stride", "attention.window"},
            text(told("attention.landmark_stride"), " is larger than ", told("attention.window"),
                 "; a landmark's tokens must all fit in the window, or some would never be seen"));
    }
    check_alignment("attention.landmark_stride", std::max<int64_t>(1, attention.landmark_stride), 128);
  }

  void check_bands() {
    const std::vector<BandConfig>& bands = config_.attention.bands;
    const auto band_fault = [&](size_t index, std::string_view what) {
      const BandConfig& band = bands[index];
      const std::string far = band.far == kFarUnlimited ? std::string("inf") : std::to_string(band.far);
      fault({"attention.bands"}, text("attention.bands: band ", index + 1, ", [", band.stride, ", ",
                                      band.near, ", ", far, "], ", what));
    };
    if (bands.size() > kMostBands) {
      fault({"attention.bands"}, text("attention.bands has ", bands.size(), " bands; at most ", kMostBands));
    }
    bool sees_itself = false;
    int64_t alignment = 128;
    for (size_t i = 0; i < bands.size(); ++i) {
      const BandConfig& band = bands[i];
      if (band.far <= band.near) band_fault(i, "sees nothing: far must be larger than near");
      if (band.stride > 1 && band.near < band.stride) {
        band_fault(i,
                   "has near below its stride: a summary of tokens that have not all been read yet would be "
                   "wanted; near must be at least the stride");
      }
      sees_itself = sees_itself || (band.stride == 1 && band.near == 0);
      alignment = check_alignment("attention.bands", band.stride, alignment);
    }
    if (!sees_itself) {
      fault(
          {"attention.bands"},
          "attention.bands has no band of stride 1 and near 0; a token must see itself and those before it");
    }
  }

  /// lcm of `alignment` and `stride`; shards begin at its multiples.
  int64_t check_alignment(std::string_view key, int64_t stride, int64_t alignment) {
    const int64_t factor = stride / std::gcd(stride, alignment);
    if (factor <= kMostAlignment / alignment) return alignment * factor;
    fault({key}, text(told(key),
                      ": shards begin at multiples of 128 and of every stride, and their least common "
                      "multiple is above ",
                      kMostAlignment, "; choose strides that are powers of two"));
    return alignment;
  }

  void check_heads(std::string_view prefix, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    const std::string heads_key = text(prefix, ".heads"), kv_key = text(prefix, ".kv_heads"),
                      dim_key = text(prefix, ".head_dim");
    if (heads % kv_heads != 0) {
      fault({kv_key, heads_key}, text(told(kv_key), " does not divide ", told(heads_key),
                                      "; each key/value head serves as many query heads"));
    }
    if (head_dim % 8 != 0) {
      fault({dim_key}, text(told(dim_key), " is not a multiple of 8, as the attention kernels need"));
    }
  }

  void check_model() {
    const Config::Model& model = config_.model;
    if (model.weights == WeightsSource::kRandom) {
      check_heads("model.shape", model.shape.heads, model.shape.kv_heads, model.shape.head_dim);
    } else if (!(model.shape == Config::Model::Shape{}) && !origins_.faulty.contains("model.weights")) {
      std::string_view first = "model.shape.layers";
      for (const ConfigKey& key : schema().keys) {
        if (key.path.starts_with("model.shape.") && key.write(config_) != key.write(Config{})) {
          first = key.path;
          break;
        }
      }
      fault({first, "model.weights"},
            text(told(first),
                 " has no effect: model.shape is for model.weights: random; a checkpoint has its own"));
    }
    const bool runs_model = subcommand_ == Subcommand::kInfer || subcommand_ == Subcommand::kTrain ||
                            subcommand_ == Subcommand::kBenchPrefill ||
                            subcommand_ == Subcommand::kBenchLayer || subcommand_ == Subcommand::kBenchStep;
    if (runs_model && model.path.empty() && model.weights == WeightsSource::kCheckpoint) {
      fault({"model.path", "model.weights"}, missing("model.path") + ": the directory of the model");
    }
    const bool needs_tokenizer =
        subcommand_ == Subcommand::kTokenize ||
        (subcommand_ == Subcommand::kInfer && model.weights == WeightsSource::kRandom &&
         (!config_.input.documents.empty() || does(Task::kGenerate))) ||
        (subcommand_ == Subcommand::kTrain && !config_.input.documents.empty());
    if (needs_tokenizer && model.path.empty()) {
      fault({"model.path"},
            missing("model.path") + ": the directory of the tokenizer that reads and writes text");
    }
  }

  void check_input() {
    const Config::Input& input = config_.input;
    if (!input.documents.empty() && !input.tokens.empty()) {
      fault({"input.tokens", "input.documents"}, text(told("input.tokens"), " and ", told("input.documents"),
                                                      " are both given; remove one of the two"));
    }
    if (!input.prompts.empty() && !input.prompts_file.empty()) {
      fault({"input.prompts_file", "input.prompts"},
            text(told("input.prompts_file"), " and ", told("input.prompts"),
                 " are both given; remove one of the two"));
    }
    check_no_empty("input.documents", input.documents);
    check_no_empty("input.prompts", input.prompts);
    const bool reads = subcommand_ == Subcommand::kInfer || subcommand_ == Subcommand::kTokenize ||
                       subcommand_ == Subcommand::kTrain;
    if (reads && input.documents.empty() && input.tokens.empty()) {
      fault({"input.documents", "input.tokens"}, "there is no input: give input.documents or input.tokens");
    }
    if (reads && config_.output.directory.empty()) {
      fault({"output.directory"}, missing("output.directory") + ": the folder for the results");
    }
    if (subcommand_ == Subcommand::kInfer && config_.tasks.empty()) {
      fault({"tasks"}, "tasks is missing or empty: name one or more of generate, score, embed");
    }
  }

  void check_no_empty(std::string_view key, const std::vector<std::string>& entries) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].find_first_not_of(" \t\r\n") == std::string::npos) {
        fault({key}, text(key, ": entry ", i + 1, " is empty; fill it or remove it"));
      }
    }
  }

  void check_generate() {
    if (subcommand_ == Subcommand::kInfer && does(Task::kGenerate) && config_.input.prompts.empty() &&
        config_.input.prompts_file.empty()) {
      fault({"input.prompts", "input.prompts_file", "tasks"},
            "the task generate has nothing to answer: give input.prompts or input.prompts_file");
    }
    if (config_.generate.temperature == 0 && config_.generate.top_p != 1) {
      fault({"generate.top_p", "generate.temperature"},
            text(told("generate.top_p"), " has no effect with ", told("generate.temperature"),
                 ", which is greedy; set a temperature above 0 or remove top_p"));
    }
  }

  void check_run() {
    const Config::Run& run = config_.run;
    const auto only_cuda = [&](std::string_view key) {
      fault({key, "run.device"},
            text(told(key), " is for GPUs, but ", told("run.device"), "; remove one of the two"));
    };
    if (run.device == DeviceSetting::kCpu) {
      if (run.precision != PrecisionSetting::kAuto && run.precision != PrecisionSetting::kFp32)
        fault({"run.precision", "run.device"}, text(told("run.precision"), " is for GPUs, but ",
                                                    told("run.device"), "; the CPU computes in fp32"));
      if (run.transport == TransportSetting::kNccl || run.transport == TransportSetting::kStaged)
        only_cuda("run.transport");
      if (run.share_gpus) only_cuda("run.share_gpus");
      if (config_.bench.kernel != KernelSetting::kAuto) only_cuda("bench.kernel");
    }
    if (run.device == DeviceSetting::kCuda && run.precision == PrecisionSetting::kFp32)
      fault({"run.precision", "run.device"},
            text(told("run.precision"), " is for the CPU, but ", told("run.device"),
                 "; the GPU computes in bf16, fp8 or int8"));
  }

  void check_train() {
    const Config::Train& train = config_.train;
    if (subcommand_ != Subcommand::kTrain) return;
    if (config_.run.precision == PrecisionSetting::kFp8 || config_.run.precision == PrecisionSetting::kInt8)
      fault({"run.precision"}, text(told("run.precision"),
                                    ": training computes in bf16 on GPUs and in fp32 on the CPU; use auto"));
    if (train.warmup_steps > train.steps)
      fault({"train.warmup_steps", "train.steps"},
            text(told("train.warmup_steps"), " is more than ", told("train.steps")));
    if (train.final_learning_rate > train.learning_rate)
      fault({"train.final_learning_rate", "train.learning_rate"},
            text(told("train.final_learning_rate"), " is more than ", told("train.learning_rate"),
                 "; the learning rate falls after the warm-up"));
    if (train.schedule == ScheduleSetting::kWarmupStableDecay &&
        train.warmup_steps + train.decay_steps > train.steps)
      fault({"train.decay_steps", "train.warmup_steps", "train.steps"},
            text(told("train.warmup_steps"), " and ", told("train.decay_steps"), " are together more than ",
                 told("train.steps")));
  }

  void check_activations() {
    const Config::Activations& activations = config_.activations;
    if (activations.store == ActivationSetting::kOff && activations.every != 1)
      fault({"activations.every", "activations.store"},
            text(told("activations.every"), " has no effect with ", told("activations.store"),
                 ", which keeps all of every layer; remove one of the two"));
    const bool may_use_disk =
        activations.store == ActivationSetting::kNvme || activations.store == ActivationSetting::kAuto;
    if (!may_use_disk && !activations.directory.empty())
      fault({"activations.directory", "activations.store"},
            text(told("activations.directory"), " has no effect with ", told("activations.store"),
                 "; remove one of the two, or set activations.store: nvme"));
  }

  // What a job writes must not take the place of what it started from.
  void check_origin() {
    namespace fs = std::filesystem;
    if (subcommand_ != Subcommand::kTrain || config_.model.path.empty() || config_.output.directory.empty())
      return;
    std::error_code error;
    const fs::path origin = fs::weakly_canonical(config_.model.path, error);
    const fs::path output = fs::weakly_canonical(config_.output.directory, error);
    if (error || (origin != output / "model" && origin.parent_path() != output / "checkpoints")) return;
    fault({"model.path", "output.directory"},
          text(told("model.path"), " lies where ", told("output.directory"),
               " is to hold what this job makes; choose another output.directory, or copy the model"));
  }

  /// An empty text of a source counts as none.
  bool is_set(std::string_view key) const {
    return schema().find_key(key)->write(config_) != schema().find_key(key)->write(Config{});
  }

  /// "model.path is missing", or "is empty" where a source has it so.
  std::string missing(std::string_view key) const {
    return text(key, origins_.place.find(key) == origins_.place.end() ? " is missing" : " is empty");
  }

  struct Place {
    std::string_view key;
    std::filesystem::path path;  // a file, or a folder that is all its own
  };

  // Two writers of a file spoil it for each other, and the Prometheus file takes the place of what it names.
  void check_outputs(const std::filesystem::path& config_file) {
    if (subcommand_ != Subcommand::kInfer && subcommand_ != Subcommand::kTrain) return;
    const Place log{"run.log", log_path(config_)}, figures{"telemetry.prometheus", prometheus_path(config_)};
    std::vector<Place> taken = places_of_job();
    const Config::Input& input = config_.input;
    taken.push_back({"--config", config_file});
    taken.push_back({"input.tokens", input.tokens});
    taken.push_back({"input.prompts_file", input.prompts_file});
    for (const std::string& document : input.documents) {
      const std::filesystem::path path = document;
      // There may be many of them, on a slow file system.
      if (path.filename() == log.path.filename() || path.filename() == figures.path.filename())
        taken.push_back({"input.documents", path});
    }
    for (const Place& output : {log, figures})
      for (const std::filesystem::path& path : {output.path, whole_path(output.path)})
        if (!config_.model.path.empty() && is_of_model(path.filename()))
          taken.push_back({"model.path", std::filesystem::path(config_.model.path) / path.filename()});
    check_output(log, taken);
    if (!is_folder(log.path)) taken.push_back(log);
    check_output(figures, taken);
  }

  std::vector<Place> places_of_job() const {
    const std::filesystem::path output = config_.output.directory;
    if (output.empty()) return {};
    std::vector<const char*> names{"results.jsonl", "arrays", "results.previous.jsonl", "arrays.previous"};
    if (subcommand_ == Subcommand::kTrain) names = {"metrics.jsonl", "checkpoints", "model"};
    std::vector<Place> places;
    for (const char* name : names)
      places.push_back({"output.directory", output / name});
    return places;
  }

  // A place that nobody has named is in the output folder: the message says so, and how to name another.
  void check_output(const Place& output, const std::vector<Place>& taken) {
    namespace fs = std::filesystem;
    std::error_code error;
    const bool is_default = !is_set(output.key);
    const std::string name = text(output.key, is_default ? " (default)" : "");
    const std::string remedy =
        is_default ? text("; move that away, or set ", output.key, " to a file") : "; name a file";
    if (is_folder(output.path)) {
      fault({output.key, "output.directory"}, text(name, ": ", output.path.string(), " is a folder", remedy));
      return;
    }
    const bool exists = fs::exists(output.path, error);
    if (!exists && fs::is_symlink(output.path, error) && !can_be_made(end_of_links(output.path))) {
      fault({output.key, "output.directory"},
            text(name, ": ", output.path.string(), " is a link that leads nowhere", remedy));
      return;
    }
    if (exists && !fs::is_regular_file(output.path, error)) return;  // /dev/null
    const fs::path file = whole_path(output.path);
    for (const Place& place : taken) {
      const fs::path other = whole_path(place.path);
      if (other.empty() ||
          std::mismatch(other.begin(), other.end(), file.begin(), file.end()).first != other.end())
        continue;
      fault({output.key, place.key}, text(name, " and ", place.key, " would both have ", output.path.string(),
                                          "; choose another file for one of them"));
      return;
    }
  }

  bool is_folder(const std::filesystem::path& path) const {
    std::error_code error;
    const std::filesystem::path whole = whole_path(path);  // empty where the way to it is barred
    return std::filesystem::is_directory(path, error) ||
           (!whole.empty() && whole == whole_path(config_.output.directory));
  }

  bool can_be_made(const std::filesystem::path& file) const {
    std::error_code error;
    return !std::filesystem::is_symlink(file, error) &&
           is_folder(std::filesystem::absolute(file, error).parent_path());
  }

  static std::filesystem::path whole_path(const std::filesystem::path& path) {
    std::error_code error;
    const std::filesystem::path whole = std::filesystem::absolute(end_of_links(path), error);
    return path.empty() || error ? std::filesystem::path() : std::filesystem::weakly_canonical(whole, error);
  }

  void check_bench() {
    if (subcommand_ == Subcommand::kBenchStep && config_.bench.tokens == 1)
      fault({"bench.tokens"}, text(told("bench.tokens"), ": one token foretells nothing; a step needs two"));
    check_heads("bench", config_.bench.heads, config_.bench.kv_heads, config_.bench.head_dim);
    if ((config_.bench.outputs == 0) != (config_.bench.inputs == 0))
      fault({"bench.outputs", "bench.inputs"},
            text(told("bench.outputs"), " and ", told("bench.inputs"), ": give both of them, or none"));
  }

  bool does(Task task) const {
    return std::find(config_.tasks.begin(), config_.tasks.end(), task) != config_.tasks.end();
  }

  Subcommand subcommand_;
  const Config& config_;
  const KeyOrigins& origins_;
  ConfigFaults& faults_;
};

}  // namespace

void check_config(Subcommand subcommand, const Config& config, const KeyOrigins& origins,
                  ConfigFaults& faults) {
  Checker(subcommand, config, origins, faults).run();
}

void check_places(Subcommand subcommand, const Config& config, const std::filesystem::path& config_file,
                  const KeyOrigins& origins, ConfigFaults& faults) {
  Checker(subcommand, config, origins, faults).run_places(config_file);
}

}  // namespace longhalo
