#include "config/schema.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace longhalo {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostSeed = std::numeric_limits<int64_t>::max();

const std::vector<std::string> kTaskNames = {"generate", "score", "embed"};

/// `field` gives the member of a Config that `codec` reads and writes.
template <class Codec, class Field>
ConfigKey key(std::string path, const Codec& codec, Field field, std::string doc) {
  return {.path = std::move(path),
          .doc = std::move(doc),
          .type = codec.type(),
          .read = [codec, field](const YAML::Node& node, const ValueContext& context,
                                 Config& config) { return codec.read(node, context, field(config)); },
          .write = [codec, field](const Config& config) { return codec.write(field(config)); }};
}

#define FIELD(member)         \
  [](auto& config) -> auto& { \
    return config.member;     \
  }

void add_train_keys(ConfigSchema& all) {
  const auto whole = [](int64_t least, int64_t most) { return WholeNumber{least, most}; };
  constexpr int64_t kMostSteps = int64_t{1} << 40;
  constexpr auto kOpen = RealNumber::Edge::kOpen;
  all.sections.push_back({"train", "How longhalo train learns."});
  all.keys.push_back(key("train.steps", whole(1, kMostSteps), FIELD(train.steps), "Optimizer steps in all."));
  all.keys.push_back(key("train.sequence_tokens", whole(2, kMostTokens), FIELD(train.sequence_tokens),
                         "Length of a sequence, which all ranks share."));
  all.keys.push_back(key("train.packing", Choice<PackingSetting>{{"packed", "one_document"}},
                         FIELD(train.packing),
                         "packed fills a sequence with documents, which do not see each other; one_document "
                         "takes one, cut into several sequences where it is longer and filled up with what "
                         "does not count where it is shorter."));
  all.keys.push_back(
      key("train.accumulation", whole(1, 1 << 20), FIELD(train.accumulation),
          "Sequences a step, one after the other; the loss is the mean over all their tokens."));
  all.keys.push_back(key("train.learning_rate", RealNumber{0, 100, kOpen}, FIELD(train.learning_rate),
                         "Learning rate after the warm-up."));
  all.keys.push_back(key("train.final_learning_rate", RealNumber{0, 100}, FIELD(train.final_learning_rate),
                         "Learning rate at the last step."));
  all.keys.push_back(key("train.schedule", Choice<ScheduleSetting>{{"cosine", "warmup_stable_decay"}},
                         FIELD(train.schedule),
                         "How the learning rate falls after the warm-up: along half a cosine, or not at all "
                         "but over the last decay_steps, linearly."));
  all.keys.push_back(key("train.warmup_steps", whole(0, kMostSteps), FIELD(train.warmup_steps),
                         "Steps over which the learning rate grows linearly from 0."));
  all.keys.push_back(key("train.decay_steps", whole(0, kMostSteps), FIELD(train.decay_steps),
                         "Steps over which the learning rate falls with schedule: warmup_stable_decay."));
  all.keys.push_back(key("train.weight_decay", RealNumber{0, 100}, FIELD(train.weight_decay),
                         "Decoupled weight decay of matrices; norms and landmark vectors have none."));
  all.keys.push_back(
      key("train.beta1", RealNumber{0, 0.99999}, FIELD(train.beta1), "AdamW's decay of the first moment."));
  all.keys.push_back(
      key("train.beta2", RealNumber{0, 0.99999}, FIELD(train.beta2), "AdamW's decay of the second moment."));
  all.keys.push_back(key("train.epsilon", RealNumber{0, 1, kOpen}, FIELD(train.epsilon), "AdamW's epsilon."));
  all.keys.push_back(key("train.clip", RealNumber{0, 1e9}, FIELD(train.clip),
                         "Largest norm of the whole gradient, which is scaled down to it; 0 is no limit."));
  all.keys.push_back(key("train.z_loss", RealNumber{0, 1}, FIELD(train.z_loss),
                         "Weight of the squared logarithm of the softmax's denominator in the loss."));
  all.keys.push_back(
      key("train.seed", whole(0, kMostSeed), FIELD(train.seed), "Seed of the order of the sequences."));
  all.keys.push_back(key("train.validation_share", RealNumber{0, 0.9}, FIELD(train.validation_share),
                         "Share of the tokens, at the end of the input, that is only validated on."));
  all.keys.push_back(
      key("train.validate_every", whole(1, kMostSteps), FIELD(train.validate_every),
          "Steps between validations; the state before the first step and after the last one is always "
          "validated."));
  all.keys.push_back(key("train.validation_sequences", whole(1, kMostSteps),
                         FIELD(train.validation_sequences),
                         "Sequences of a validation, at most; always the same ones."));
  all.keys.push_back(key("train.log_every", whole(1, kMostSteps), FIELD(train.log_every),
                         "Steps between two records of metrics.jsonl."));
  all.keys.push_back(key("train.save_every", whole(0, kMostSteps), FIELD(train.save_every),
                         "Steps between two saved models; 0 saves at the end alone."));
  all.keys.push_back(key("train.checkpoint_every", whole(0, kMostSteps), FIELD(train.checkpoint_every),
                         "Steps between two checkpoints, from which output.if_exists: resume goes on; 0 "
                         "writes one at the end and on signals alone."));
  all.keys.push_back(key("train.checkpoint_keep", whole(2, 1000), FIELD(train.checkpoint_keep),
                         "Checkpoints that are kept, the last written ones; two at least, because the newest "
                         "may turn out damaged."));
  all.keys.push_back(
      key("train.most_skipped", whole(0, 1 << 20), FIELD(train.most_skipped),
          "Steps in a row that may be skipped because loss or gradient are not finite; one more "
          "stops the job."));
  all.keys.push_back(key(
      "train.deterministic", Switch{}, FIELD(train.deterministic),
      "On GPUs: gradients with the same bits on every repeat, so that a resumed run equals one that was "
      "never stopped bit for bit; attention's gradient then takes about twice as long, and matrix "
      "products are made in the way that the library names first, not the one that is fastest here. On the "
      "CPU it is always so."));
}

void add_activation_keys(ConfigSchema& all) {
  all.sections.push_back(
      {"activations", "What training's forward pass keeps for its backward pass, and where."});
  all.keys.push_back(key(
      "activations.store", Choice<ActivationSetting>{{"auto", "device", "host", "nvme", "off"}},
      FIELD(activations.store),
      "device, host and nvme keep the inputs of layers, in the memory of the device, of the host, or in a "
      "file of activations.directory, and compute the rest again; on the CPU device and host are both this "
      "process's memory. off keeps all that backward needs and computes nothing again. auto is the first of "
      "off, device, host, nvme that fits; --plan says which one and why."));
  all.keys.push_back(
      key("activations.every", RealNumber{1, 10000}, FIELD(activations.every),
          "Keeps the input of every so many-th layer, of layer floor(i * every), so that 1.25 keeps "
          "four of five. With 1 one forward pass is made again; with k, L/k + k inputs are held "
          "instead of L + 1, for 2 - 1/k passes made again."));
  all.keys.push_back(key("activations.directory", TextValue{}, FIELD(activations.directory),
                         "Folder on node-local scratch for nvme; empty is $SLURM_TMPDIR, else $TMPDIR, else "
                         "/tmp. What killed jobs left in it is removed."));
}

void add_telemetry_keys(ConfigSchema& all) {
  all.sections.push_back({"telemetry", "What a job tells of itself while it runs."});
  all.keys.push_back(key("telemetry.prometheus", TextValue{}, FIELD(telemetry.prometheus),
                         "File with the newest figures in Prometheus' text format, replaced as a whole at "
                         "each record; for node_exporter a name that ends in .prom. Empty is metrics.prom in "
                         "output.directory."));
  all.keys.push_back(key("telemetry.link_counters", TextValue{}, FIELD(telemetry.link_counters),
                         "Folder in which the kernel shows what the ports of network cards count. A count of "
                         "errors that grows is a warning; empty looks nowhere."));
  all.keys.push_back(
      key("telemetry.straggler_ratio", RealNumber{0, 1000}, FIELD(telemetry.straggler_ratio),
          "A rank whose own compute takes so many times as long as the median rank's, in three "
          "records in a row, is named; 0 names none."));
}

void add_doctor_keys(ConfigSchema& all) {
  const auto whole = [](int64_t least, int64_t most) { return WholeNumber{least, most}; };
  constexpr int64_t kMostBytes = int64_t{1} << 40;
  const RealNumber rate{0, 1e6};
  all.sections.push_back({"doctor", "What longhalo doctor measures, and what it takes for good enough."});
  all.keys.push_back(
      key("doctor.json", TextValue{}, FIELD(doctor.json),
          "File for the report as JSON, in place of an earlier one; empty prints a table only."));
  all.keys.push_back(key("doctor.halo_bytes", whole(8, int64_t{1} << 36), FIELD(doctor.halo_bytes),
                         "Bytes of a message between two ranks."));
  all.keys.push_back(
      key("doctor.least_halo_gb_per_second", rate, FIELD(doctor.least_halo_gb_per_second),
          "Two ranks that exchange halos slower than this, in GB/s each way, are a failure. 0 only "
          "warns of those below half of the median."));
  all.keys.push_back(
      key("doctor.disk_bytes", whole(int64_t{1} << 20, kMostBytes), FIELD(doctor.disk_bytes),
          "Bytes that each host writes to scratch and to output.directory and reads again; at most a "
          "tenth of what is free there."));
  all.keys.push_back(
      key("doctor.least_scratch_gb_per_second", rate, FIELD(doctor.least_scratch_gb_per_second),
          "Scratch (activations.directory) that a host writes or reads slower is a failure; 0 is no "
          "floor."));
  all.keys.push_back(key("doctor.least_output_gb_per_second", rate, FIELD(doctor.least_output_gb_per_second),
                         "The same of output.directory, where checkpoints go."));
  all.keys.push_back(
      key("doctor.shm_bytes", whole(0, kMostBytes), FIELD(doctor.shm_bytes),
          "Bytes of /dev/shm that have to be free for each rank of a host; 0 is 8 MiB on the CPU and "
          "64 MiB on CUDA."));
  all.keys.push_back(key("doctor.patience_seconds", RealNumber{1, 1e6}, FIELD(doctor.patience_seconds),
                         "A check that takes longer ends the job with its name."));
  all.keys.push_back(key("doctor.nvml", TextValue{}, FIELD(doctor.nvml),
                         "NVIDIA's management library: a name that the loader finds, or a path."));
  all.keys.push_back(key("doctor.sysfs", TextValue{}, FIELD(doctor.sysfs),
                         "Where the kernel shows its modules and network adapters."));
}

ConfigSchema make_schema() {
  const TextValue text;
  const TextList texts;
  const auto whole = [](int64_t least, int64_t most) { return WholeNumber{least, most}; };
  ConfigSchema all;

  all.sections.push_back({"model", "The transformer that reads the document."});
  all.keys.push_back(key("model.path", text, FIELD(model.path),
                         "Directory of a Hugging Face model of the Llama family (config.json, *.safetensors, "
                         "tokenizer). With random weights only its tokenizer is used."));
  all.keys.push_back(key("model.weights", Choice<WeightsSource>{{"checkpoint", "random"}},
                         FIELD(model.weights),
                         "checkpoint reads the weights of model.path; random draws them, in the shape of "
                         "model.shape, to measure speed."));
  all.keys.push_back(
      key("model.seed", whole(0, kMostSeed), FIELD(model.seed), "Seed of the random weights."));
  all.sections.push_back({"model.shape", "The shape of a model with random weights."});
  all.keys.push_back(key("model.shape.layers", whole(1, 10000), FIELD(model.shape.layers), "Layers."));
  all.keys.push_back(key("model.shape.hidden", whole(1, 1 << 20), FIELD(model.shape.hidden), "Hidden size."));
  all.keys.push_back(key("model.shape.ffn", whole(1, 1 << 22), FIELD(model.shape.ffn), "Feed-forward size."));
  all.keys.push_back(key("model.shape.heads", whole(1, 4096), FIELD(model.shape.heads), "Query heads."));
  all.keys.push_back(key("model.shape.kv_heads", whole(1, 4096), FIELD(model.shape.kv_heads),
                         "Key/value heads; divides the query heads."));
  all.keys.push_back(key("model.shape.head_dim", whole(8, 256), FIELD(model.shape.head_dim),
                         "Head dimension; a multiple of 8."));
  all.keys.push_back(
      key("model.shape.vocabulary", whole(1, 1 << 24), FIELD(model.shape.vocabulary), "Vocabulary."));

  all.sections.push_back({"attention",
                          "Which keys a token sees: exact ones near it, summaries (landmarks) of all "
                          "before them."});
  all.keys.push_back(key("attention.window", whole(1, kMostTokens), FIELD(attention.window),
                         "Tokens seen exactly: the token itself and the window - 1 before it."));
  all.keys.push_back(
      key("attention.landmark_stride", whole(0, kMostTokens), FIELD(attention.landmark_stride),
          "Tokens that one landmark summarises, at most the window; 0 is no landmarks: nothing "
          "out of the window is seen."));
  all.keys.push_back(key("attention.bands", BandList{}, FIELD(attention.bands),
                         "Replaces window and landmark_stride when not empty: token i sees the key of tokens "
                         "[g*stride, (g+1)*stride) when it begins at i - near or before and reaches beyond "
                         "i - far."));
  all.keys.push_back(
      key("attention.landmark_bias", AutoOrNumber{{-1000, 1000}}, FIELD(attention.landmark_bias),
          "Added to the scores of landmarks. auto takes the checkpoint's own, and -3 where it has "
          "none."));

  all.sections.push_back({"input", "What is read and what is asked."});
  all.keys.push_back(
      key("input.documents", texts, FIELD(input.documents), "Text files (UTF-8), a document each."));
  all.keys.push_back(key("input.tokens", text, FIELD(input.tokens),
                         "HDF5 token file (written by longhalo tokenize), instead of documents."));
  all.keys.push_back(key("input.prompts_file", text, FIELD(input.prompts_file),
                         "Text file with one prompt a line, instead of prompts."));
  all.keys.push_back(key("input.prompts", texts, FIELD(input.prompts),
                         "Asked about each document; the model's chat template places document and prompt."));
  all.keys.push_back(key("input.system_prompt", text, FIELD(input.system_prompt),
                         "The system message; empty leaves it to the chat template."));

  all.keys.push_back(key("tasks", ChoiceList<Task>{kTaskNames}, FIELD(tasks),
                         "What to do with each document: generate answers the prompts, score gives the "
                         "log-probability of every token, embed a vector for every chunk."));

  all.sections.push_back({"generate", "How answers are drawn."});
  all.keys.push_back(key("generate.max_new_tokens", whole(1, int64_t{1} << 31),
                         FIELD(generate.max_new_tokens), "Longest answer, in tokens."));
  all.keys.push_back(key("generate.temperature", RealNumber{0, 100}, FIELD(generate.temperature),
                         "0 takes the most likely token (greedy)."));
  all.keys.push_back(key("generate.top_p", RealNumber{0, 1, RealNumber::Edge::kOpen}, FIELD(generate.top_p),
                         "Draws from the most likely tokens that together have this probability."));
  all.keys.push_back(key("generate.seed", whole(0, kMostSeed), FIELD(generate.seed),
                         "Seed of the draws. Each answer's own comes from it, the document's name and the "
                         "prompt: their order and the number of ranks change no answer."));

  all.sections.push_back({"embed", "How vectors are made."});
  all.keys.push_back(key("embed.chunk_tokens", whole(1, kMostTokens), FIELD(embed.chunk_tokens),
                         "Tokens whose final hidden states are averaged to one vector."));

  all.sections.push_back({"output", "Where results go."});
  all.keys.push_back(
      key("output.directory", text, FIELD(output.directory),
          "Folder of the results (results.jsonl and HDF5 arrays, or metrics.jsonl, checkpoints and the "
          "trained model); made when missing."));
  all.keys.push_back(
      key("output.if_exists", Choice<IfExists>{{"error", "resume", "replace"}}, FIELD(output.if_exists),
          "What to do with results that are there already: stop with an error, keep them and do "
          "the rest (training goes on from the newest good checkpoint), or replace them."));

  all.sections.push_back({"run", "How the job runs."});
  all.keys.push_back(key("run.device", Choice<DeviceSetting>{{"auto", "cpu", "cuda"}}, FIELD(run.device),
                         "auto is cuda where this build and every rank's host have a GPU, else cpu."));
  all.keys.push_back(
      key("run.precision", Choice<PrecisionSetting>{{"auto", "fp32", "bf16", "fp8", "int8"}},
          FIELD(run.precision),
          "auto is fp32 on the CPU and bf16 on CUDA, and there is no other on the CPU; fp8 "
          "makes the layers' matrix products in e4m3, fitted to the documents' beginnings and "
          "but for some 7% in bf16, int8 in int8 after a rotation that spreads outliers, which "
          "loses less; all else in bf16."));
  all.keys.push_back(key("run.transport", Choice<TransportSetting>{{"auto", "nccl", "mpi", "staged"}},
                         FIELD(run.transport),
                         "How ranks exchange device memory: by NCCL, by an MPI that takes device pointers, "
                         "or through host memory; auto is the first of them that works. CPU ranks use MPI."));
  all.keys.push_back(key("run.share_gpus", Switch{}, FIELD(run.share_gpus),
                         "Several ranks may use one GPU, for tests; otherwise that is an error."));
  all.keys.push_back(key("run.threads", whole(0, 4096), FIELD(run.threads),
                         "Threads of a rank; 0 is OMP_NUM_THREADS, else the cores that the launcher binds "
                         "the rank to, else its share of the host's."));
  all.keys.push_back(key("run.token_tile", whole(0, 1 << 20), FIELD(run.token_tile),
                         "Tokens that go through a layer at once; temporaries grow with it. 0 is 1024 on the "
                         "CPU, 128 for each multiprocessor on CUDA, less where memory is short."));
  all.keys.push_back(key("run.progress", Choice<ProgressMode>{{"auto", "bar", "lines", "off"}},
                         FIELD(run.progress), "auto is a bar on a terminal and plain lines elsewhere."));
  all.keys.push_back(
      key("run.log", text, FIELD(run.log), "File of the JSONL log; empty is log.jsonl in output.directory."));
  all.keys.push_back(key(
      "run.stop_before_end_seconds", AutoOrNumber{{0, 1e6}}, FIELD(run.stop_before_end_seconds),
      "A job whose time is limited ($SLURM_JOB_END_TIME) saves its state and stops so early, and one more "
      "step or document, before its end. auto is 120, or a tenth of the job's time where that is less; "
      "and twice what a checkpoint has taken where that is more."));
  all.keys.push_back(key(
      "run.deadline_seconds", RealNumber{0, 1e7}, FIELD(run.deadline_seconds),
      "How long a rank may wait in one operation for other ranks or for its GPU. Then it says at which step, "
      "layer and operation, and for whom, and the job ends with exit code 76. 0 waits for ever. More than a "
      "GPU takes for the layers of one sequence, and than a rank takes for one query's answer."));
  all.keys.push_back(key("run.check_operations", Switch{}, FIELD(run.check_operations),
                         "Before each operation of all ranks they compare what it is and how large, and name "
                         "the first that differs. For finding faults: it costs a message each time."));

  add_train_keys(all);
  add_activation_keys(all);
  add_telemetry_keys(all);

  all.sections.push_back({"bench", "What longhalo bench measures."});
  all.keys.push_back(key("bench.tokens", whole(1, kMostTokens), FIELD(bench.tokens),
                         "Tokens: queries of the attention benchmark, rows of a matrix product."));
  all.keys.push_back(key("bench.repeats", whole(1, 100000), FIELD(bench.repeats), "Timed repetitions."));
  all.keys.push_back(
      key("bench.heads", whole(1, 4096), FIELD(bench.heads), "Query heads of the attention benchmark."));
  all.keys.push_back(key("bench.kv_heads", whole(1, 4096), FIELD(bench.kv_heads),
                         "Key/value heads of the attention benchmark; divides the query heads."));
  all.keys.push_back(key("bench.head_dim", whole(8, 256), FIELD(bench.head_dim),
                         "Head dimension of the attention benchmark; a multiple of 8, on CUDA 64 or 128."));
  all.keys.push_back(key("bench.first_query", whole(0, kMostTokens), FIELD(bench.first_query),
                         "Position of the first query, as of a shard in the middle of a longer sequence."));
  all.keys.push_back(
      key("bench.kernel", Choice<KernelSetting>{{"auto", "hopper", "portable", "all"}}, FIELD(bench.kernel),
          "Attention kernel on CUDA: auto is the fastest that the GPU has, all each in turn."));
  all.keys.push_back(key("bench.backward", Switch{}, FIELD(bench.backward),
                         "The attention benchmark measures the gradient too, on CUDA."));
  all.keys.push_back(key("bench.outputs", whole(0, 1 << 22), FIELD(bench.outputs),
                         "Outputs of the one matrix product to measure; 0 is the products of an 8B layer, "
                         "on the CPU none."));
  all.keys.push_back(key("bench.inputs", whole(0, 1 << 22), FIELD(bench.inputs),
                         "Inputs of the one matrix product to measure; 0 is the products of an 8B layer, "
                         "on the CPU none."));
  all.keys.push_back(
      key("bench.bytes", whole(0, int64_t{1} << 40), FIELD(bench.bytes),
          "Bytes that the copy benchmark moves, the halo benchmark's longest message, or what each "
          "rank stores in the storage benchmark; 0 is 4 GiB on CUDA and 512 MiB on the CPU for "
          "copy, 256 MiB for halo, 2 GiB for storage."));
  all.keys.push_back(
      key("bench.json", text, FIELD(bench.json),
          "File for the results as JSON, in place of an earlier report; empty prints a table only."));
  add_doctor_keys(all);
  return all;
}

#undef FIELD

}  // namespace

const ConfigKey* ConfigSchema::find_key(std::string_view path) const {
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& one) { return one.path == path; });
  return found == keys.end() ? nullptr : &*found;
}

const ConfigSection* ConfigSchema::find_section(std::string_view path) const {
  static const ConfigSection whole{"", "The whole config."};
  if (path.empty()) return &whole;
  const auto found = std::find_if(sections.begin(), sections.end(),
                                  [&](const ConfigSection& one) { return one.path == path; });
  return found == sections.end() ? nullptr : &*found;
}

std::vector<std::string> ConfigSchema::key_paths() const {
  std::vector<std::string> paths;
  for (const ConfigKey& one : keys)
    paths.push_back(one.path);
  return paths;
}

std::vector<std::string> ConfigSchema::all_paths() const {
  std::vector<std::string> paths;
  for (const ConfigSection& section : sections)
    paths.push_back(section.path);
  for (std::string& path : key_paths())
    paths.push_back(std::move(path));
  return paths;
}

std::vector<std::string> ConfigSchema::names_in(std::string_view section) const {
  const std::string prefix = section.empty() ? std::string() : std::string(section) + ".";
  std::vector<std::string> names;
  for (const std::string& path : all_paths()) {
    if (path.starts_with(prefix) && path.find('.', prefix.size()) == std::string::npos) {
      names.push_back(path.substr(prefix.size()));
    }
  }
  return names;
}

const ConfigSchema& schema() {
  static const ConfigSchema all = make_schema();
  return all;
}

std::string_view task_name(Task task) {
  return kTaskNames[static_cast<size_t>(task)];
}

}  // namespace longhalo
