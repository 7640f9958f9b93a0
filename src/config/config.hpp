// What a job is told to do: plain values, filled from a YAML file, the environment and --set.
//
// One schema (schema.cpp) names every key once, with its meaning, type, range and default; loading,
// validation, dump() and configs/reference.yaml all come from it. Rooms never see this struct: src/app hands
// each of them its own small options. Relative paths are relative to the current directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace longhalo {

enum class WeightsSource { kCheckpoint, kRandom };
enum class Task { kGenerate, kScore, kEmbed };
enum class IfExists { kError, kResume, kReplace };
enum class ProgressMode { kAuto, kBar, kLines, kOff };
enum class DeviceSetting { kAuto, kCpu, kCuda };
enum class PrecisionSetting { kAuto, kFp32, kBf16, kFp8, kInt8 };
enum class TransportSetting { kAuto, kNccl, kMpi, kStaged };
enum class KernelSetting { kAuto, kHopper, kPortable, kAll };
enum class ActivationSetting { kAuto, kDevice, kHost, kNvme, kOff };
enum class PackingSetting { kPacked, kOneDocument };
enum class ScheduleSetting { kCosine, kWarmupStableDecay };

/// What is run decides which keys are needed.
enum class Subcommand {
  kInfer,
  kTrain,
  kTokenize,
  kBenchAttention,
  kBenchCopy,
  kBenchGemm,
  kBenchHalo,
  kBenchLayer,
  kBenchPrefill,
  kBenchStep,
  kBenchStorage,
  kDoctor
};

/// `far` of a band that reaches back to the first token; "inf" in YAML.
inline constexpr int64_t kFarUnlimited = std::numeric_limits<int64_t>::max();

struct BandConfig {
  int64_t stride = 1;  // tokens a key
  int64_t near = 0;    // tokens
  int64_t far = kFarUnlimited;
  bool operator==(const BandConfig&) const = default;
};

struct Config {
  struct Model {
    struct Shape {
      int64_t layers = 2;
      int64_t hidden = 256;
      int64_t ffn = 768;
      int64_t heads = 4;
      int64_t kv_heads = 2;
      int64_t head_dim = 64;
      int64_t vocabulary = 49152;
      bool operator==(const Shape&) const = default;
    };
    std::string path;
    WeightsSource weights = WeightsSource::kCheckpoint;
    Shape shape;  // used with WeightsSource::kRandom; load() refuses it otherwise
    int64_t seed = 0;
    bool operator==(const Model&) const = default;
  };

  struct Attention {
    int64_t window = 2048;                // tokens
    int64_t landmark_stride = 256;        // tokens; 0 is no landmarks
    std::vector<BandConfig> bands;        // when not empty, replaces window and landmark_stride
    std::optional<double> landmark_bias;  // empty ("auto"): the checkpoint's own, else -3
    bool operator==(const Attention&) const = default;
  };

  struct Input {
    std::vector<std::string> documents;
    std::string tokens;
    std::string prompts_file;
    std::vector<std::string> prompts;
    std::string system_prompt;
    bool operator==(const Input&) const = default;
  };

  struct Generate {
    int64_t max_new_tokens = 128;
    double temperature = 0;  // 0 is greedy
    double top_p = 1;
    int64_t seed = 0;
    bool operator==(const Generate&) const = default;
  };

  struct Embed {
    int64_t chunk_tokens = 256;
    bool operator==(const Embed&) const = default;
  };

  struct Output {
    std::string directory;
    IfExists if_exists = IfExists::kError;
    bool operator==(const Output&) const = default;
  };

  struct Run {
    DeviceSetting device = DeviceSetting::kAuto;
    PrecisionSetting precision = PrecisionSetting::kAuto;
    TransportSetting transport = TransportSetting::kAuto;
    bool share_gpus = false;  // several ranks may use one GPU
    int64_t threads = 0;      // 0: the cores of the rank
    int64_t token_tile = 0;   // tokens; 0: by the device
    ProgressMode progress = ProgressMode::kAuto;
    std::string log;                                // see log_path()
    std::optional<double> stop_before_end_seconds;  // empty ("auto"): see app/job_end.hpp
    double deadline_seconds = 1800;                 // for which a rank may wait; 0 is for ever
    bool check_operations = false;
    bool operator==(const Run&) const = default;
  };

  struct Train {
    int64_t steps = 1000;
    int64_t sequence_tokens = 4096;
    PackingSetting packing = PackingSetting::kPacked;
    int64_t accumulation = 1;  // sequences a step
    double learning_rate = 3e-4;
    double final_learning_rate = 0;
    ScheduleSetting schedule = ScheduleSetting::kCosine;
    int64_t warmup_steps = 0;
    int64_t decay_steps = 100;  // with the warmup-stable-decay schedule
    double weight_decay = 0.1;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double epsilon = 1e-8;
    double clip = 1;    // norm of the whole gradient; 0 is none
    double z_loss = 0;  // weight
    int64_t seed = 0;
    double validation_share = 0;
    int64_t validate_every = 100;      // steps
    int64_t validation_sequences = 4;  // at most
    int64_t log_every = 1;             // steps
    int64_t save_every = 0;            // steps; 0 is at the end alone
    int64_t checkpoint_every = 100;    // steps; 0 is at the end and on signals alone
    int64_t checkpoint_keep = 2;
    int64_t most_skipped = 5;  // steps in a row
    bool deterministic = false;
    bool operator==(const Train&) const = default;
  };

  struct Activations {
    ActivationSetting store = ActivationSetting::kAuto;
    double every = 1;       // layers
    std::string directory;  // empty: $SLURM_TMPDIR, else $TMPDIR, else /tmp
    bool operator==(const Activations&) const = default;
  };

  struct Telemetry {
    std::string prometheus;                               // file; empty: see prometheus_path()
    std::string link_counters = "/sys/class/infiniband";  // folder
    double straggler_ratio = 1.2;                         // to the median rank; 0: nobody is named
    bool operator==(const Telemetry&) const = default;
  };

  struct Bench {
    int64_t tokens = 16384;
    int64_t repeats = 5;
    int64_t heads = 9;
    int64_t kv_heads = 3;
    int64_t head_dim = 64;
    int64_t first_query = 0;  // token position
    KernelSetting kernel = KernelSetting::kAuto;
    bool backward = false;
    int64_t outputs = 0;  // of one matrix product; 0: the products of an 8B layer, on the CPU none
    int64_t inputs = 0;
    int64_t bytes = 0;  // 0: by the benchmark
    std::string json;   // empty: no JSON output
    bool operator==(const Bench&) const = default;
  };

  struct Doctor {
    std::string json;                         // empty: no JSON output
    int64_t halo_bytes = int64_t{32} << 20;   // of a message between two ranks
    double least_halo_gb_per_second = 0;      // 0: no floor
    int64_t disk_bytes = int64_t{256} << 20;  // written and read, a host
    double least_scratch_gb_per_second = 0;   // 0: no floor
    double least_output_gb_per_second = 0;    // 0: no floor
    int64_t shm_bytes = 0;                    // a rank; 0: by the device
    double patience_seconds = 300;            // for one check
    std::string nvml = "libnvidia-ml.so.1";
    std::string sysfs = "/sys";
    bool operator==(const Doctor&) const = default;
  };

  Model model;
  Attention attention;
  Input input;
  std::vector<Task> tasks;
  Generate generate;
  Embed embed;
  Output output;
  Run run;
  Train train;
  Activations activations;
  Telemetry telemetry;
  Bench bench;
  Doctor doctor;
  bool operator==(const Config&) const = default;
};

/// Whether the places that a config names are looked at, for what the job would spoil there. It takes a look
/// at files, so one process does it for all.
enum class LookAtPlaces { kNo, kYes };

/// Where values come from; a later member beats an earlier one.
struct ConfigSources {
  std::optional<std::filesystem::path> file;
  std::vector<std::pair<std::string, std::string>> environment;  // (name, value); see config_environment()
  std::vector<std::string> overrides;                            // "attention.window=4096", as after --set
  /// Asked while a file that is a pipe gives nothing; StopRequest is thrown when it says yes.
  std::function<bool()> asked_to_stop = nullptr;
  LookAtPlaces look_at_places = LookAtPlaces::kYes;
};

/// The variables of this process that begin with LONGHALO_. Of these load_config() reads the ones with a
/// double underscore: LONGHALO_ATTENTION__WINDOW is attention.window. Of the others it refuses those that are
/// likely to be meant so, such as LONGHALO_ATTENTION_WINDOW.
std::vector<std::pair<std::string, std::string>> config_environment();

/// Reads and validates. Throws one UserError that lists every fault of every source, each with its place
/// (file:line:column, variable, or --set) and, for an unknown key, the nearest known one.
Config load_config(Subcommand subcommand, const ConfigSources& sources);

/// The same for YAML text, such as dump_yaml() of another rank, which has looked at its places. `name` stands
/// for the file in messages.
Config load_config_text(Subcommand subcommand, std::string_view yaml, std::string_view name);

/// The effective config with every key; loads again to an equal Config.
std::string dump_yaml(const Config& config);

/// The same as one line of JSON for the log. An unlimited `far` is the string "inf", an automatic bias
/// "auto".
std::string dump_json(const Config& config);

/// configs/reference.yaml: every key with its meaning, type and default.
std::string reference_yaml();

/// run.log, or else log.jsonl in output.directory, or else empty (no log).
std::string log_path(const Config& config);

/// telemetry.prometheus, or else metrics.prom in output.directory, or else empty (no such file).
std::string prometheus_path(const Config& config);

/// Names as written in YAML and in results: "generate", "score", "embed".
std::string_view task_name(Task task);

}  // namespace longhalo
