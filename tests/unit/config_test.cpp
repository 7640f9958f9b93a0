// Loading, precedence and the two ways back (dump, reference). What is refused: config_faults_test.cpp.
#include "config/config.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "config_fixture.hpp"

namespace longhalo {
namespace {

using namespace test;

Config from_sets(std::vector<std::string> overrides, Environment environment = {}) {
  return load_config(Subcommand::kBenchAttention, {{}, std::move(environment), std::move(overrides)});
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// A config with every key away from its default.
Config unusual_config() {
  Config config;
  config.model = {.path = "models/ü \"x\": #y\n\t\\z",
                  .weights = WeightsSource::kRandom,
                  .shape = {3, 128, 300, 8, 4, 32, 1000},
                  .seed = 9223372036854775807};
  config.attention = {.window = 2048,
                      .landmark_stride = 256,
                      .bands = {{1, 0, 4096}, {64, 4096, 65536}, {2048, 65536, kFarUnlimited}},
                      .landmark_bias = -1.0 / 3};
  config.input = {
      .documents = {"a.txt", "off", "- b", "1e5", "null", "inf", "~"},
      .tokens = "",
      .prompts_file = "",
      .prompts = {"What: is # this?", " two  spaces ", "'quoted'", "emoji \U0001F600 \x7f\x01 end",
                  "line\nbreak\r\n", "{a: b}", "[x", "&a", "*a", "!t", "%", "@", "`", "---"},
      .system_prompt = "---"};
  config.tasks = {Task::kEmbed, Task::kGenerate};
  config.generate = {.max_new_tokens = 7, .temperature = 0.1, .top_p = 1e-7, .seed = 12};
  config.embed.chunk_tokens = 33;
  config.output = {.directory = "/out/dir", .if_exists = IfExists::kResume};
  config.run = {.device = DeviceSetting::kCuda,
                .precision = PrecisionSetting::kFp8,
                .transport = TransportSetting::kStaged,
                .share_gpus = true,
                .threads = 3,
                .token_tile = 99,
                .progress = ProgressMode::kOff,
                .log = "yes",
                .stop_before_end_seconds = 7.5,
                .deadline_seconds = 12.25,
                .check_operations = true};
  config.bench = {.tokens = 5,
                  .repeats = 6,
                  .heads = 12,
                  .kv_heads = 2,
                  .head_dim = 128,
                  .first_query = 3,
                  .kernel = KernelSetting::kPortable,
                  .outputs = 16,
                  .inputs = 32,
                  .bytes = 9,
                  .json = "b.json"};
  config.doctor = {.json = "d.json",
                   .halo_bytes = 64,
                   .least_halo_gb_per_second = 0.5,
                   .disk_bytes = 1 << 21,
                   .least_scratch_gb_per_second = 1.5,
                   .least_output_gb_per_second = 2.5,
                   .shm_bytes = 4096,
                   .patience_seconds = 8,
                   .nvml = "n.so",
                   .sysfs = "/x"};
  return config;
}

TEST(Config, DefaultsAreThoseOfTheStruct) {
  EXPECT_EQ(load_config(Subcommand::kBenchAttention, {}), Config{});
  EXPECT_EQ(load_config_text(Subcommand::kBenchAttention, "", "x.yaml"), Config{});
  EXPECT_EQ(load_config_text(Subcommand::kBenchAttention, "# a comment\n---\n", "x.yaml"), Config{});
  EXPECT_EQ(load_config_text(Subcommand::kBenchAttention, "attention:\nrun:\n", "x.yaml"), Config{});
}

TEST(Config, ReadsEveryKindOfValue) {
  const Config config = load_config_text(Subcommand::kInfer, R"(
model: {path: m, weights: random, shape: {layers: 5, heads: 6, kv_heads: 3}}
attention:
  bands: [[1, 0, 4096], [64, 4096, .inf]]
  landmark_bias: -2.5
input:
  documents: one.txt
  prompts:
    - first
    - "second: with a colon"
tasks: [embed, generate]
generate: {temperature: 0.7, top_p: .9, max_new_tokens: +5}
output: {directory: 2024, if_exists: resume}
run: {progress: lines, device: cuda, precision: fp8, transport: staged, share_gpus: true}
)",
                                         "x.yaml");
  EXPECT_EQ(config.model.weights, WeightsSource::kRandom);
  EXPECT_EQ(config.model.shape.layers, 5);
  EXPECT_EQ(config.model.shape.vocabulary, 49152);
  EXPECT_EQ(config.attention.bands, (std::vector<BandConfig>{{1, 0, 4096}, {64, 4096, kFarUnlimited}}));
  EXPECT_EQ(config.attention.landmark_bias, -2.5);
  EXPECT_EQ(config.input.documents, std::vector<std::string>{"one.txt"});
  EXPECT_EQ(config.input.prompts, (std::vector<std::string>{"first", "second: with a colon"}));
  EXPECT_EQ(config.tasks, (std::vector<Task>{Task::kEmbed, Task::kGenerate}));
  EXPECT_EQ(config.generate.temperature, 0.7);
  EXPECT_EQ(config.generate.top_p, 0.9);
  EXPECT_EQ(config.generate.max_new_tokens, 5);
  EXPECT_EQ(config.output.directory, "2024");
  EXPECT_EQ(config.output.if_exists, IfExists::kResume);
  EXPECT_EQ(config.run.progress, ProgressMode::kLines);
  EXPECT_EQ(config.run.device, DeviceSetting::kCuda);
  EXPECT_EQ(config.run.precision, PrecisionSetting::kFp8);
  EXPECT_EQ(config.run.transport, TransportSetting::kStaged);
  EXPECT_TRUE(config.run.share_gpus);
}

TEST(Config, OverrideBeatsEnvironmentBeatsFileBeatsDefault) {
  const TemporaryFile file("attention: {window: 1000, landmark_stride: 10}\nembed: {chunk_tokens: 20}\n");
  const Config config =
      load_config(Subcommand::kBenchAttention,
                  {file.path(),
                   {{"LONGHALO_ATTENTION__WINDOW", "2000"},
                    {"LONGHALO_EMBED__CHUNK_TOKENS", "30"},
                    {"LONGHALO_MODEL__SHAPE__LAYERS", "4"},
                    {"LONGHALO_MODEL__WEIGHTS", "random"},
                    {"LONGHALO_TASKS", "[score]"},
                    {"LONGHALO_CUDA", "ON"},
                    {"PATH__X", "ignored"}},
                   {"attention.window=3000", "attention.window=4000", "input.prompts=[a, b]"}});
  EXPECT_EQ(config.attention.window, 4000);
  EXPECT_EQ(config.embed.chunk_tokens, 30);
  EXPECT_EQ(config.attention.landmark_stride, 10);
  EXPECT_EQ(config.model.shape.layers, 4);
  EXPECT_EQ(config.tasks, std::vector<Task>{Task::kScore});
  EXPECT_EQ(config.input.prompts, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(config.run.token_tile, 0);
}

TEST(Config, OverridesTakeSectionsListsAndEmptyText) {
  const Config config = from_sets(
      {"attention={window: 64, landmark_stride: 8}", "input.system_prompt=", "run.log=a=b", "run.log=c=d"});
  EXPECT_EQ(config.attention.window, 64);
  EXPECT_EQ(config.attention.landmark_stride, 8);
  EXPECT_EQ(config.input.system_prompt, "");
  EXPECT_EQ(config.run.log, "c=d");
}

TEST(Config, ReadsTheEnvironmentOfTheProcess) {
  ::setenv("LONGHALO_RUN__TOKEN_TILE", "77", 1);
  const auto environment = config_environment();
  ::unsetenv("LONGHALO_RUN__TOKEN_TILE");
  EXPECT_EQ(from_sets({}, environment).run.token_tile, 77);
}

TEST(Config, DumpLoadsAgainToTheSameConfig) {
  const Config config = unusual_config();
  EXPECT_EQ(load_config_text(Subcommand::kInfer, dump_yaml(config), "dump"), config) << dump_yaml(config);
  EXPECT_EQ(load_config_text(Subcommand::kBenchAttention, dump_yaml(Config{}), "dump"), Config{});
}

TEST(Config, DumpsJsonOnOneLine) {
  const std::string json = dump_json(unusual_config());
  EXPECT_EQ(json.find('\n'), std::string::npos);
  EXPECT_TRUE(holds(json, R"("bands":[[1,0,4096],[64,4096,65536],[2048,65536,"inf"]])"));
  EXPECT_TRUE(holds(json, R"("shape":{"layers":3,)"));
  EXPECT_TRUE(holds(json, R"("tasks":["embed","generate"])"));
  EXPECT_TRUE(holds(dump_json(Config{}), R"("landmark_bias":"auto")"));
}

TEST(Config, StoredReferenceIsWhatTheSchemaSays) {
  const std::filesystem::path stored = std::filesystem::path(LONGHALO_SOURCE_DIR) / "configs/reference.yaml";
  EXPECT_EQ(read_file(stored), reference_yaml()) << "run: cmake --build <folder> --target config_reference";
  EXPECT_EQ(load_config(Subcommand::kBenchAttention, {stored, {}, {}}), Config{});
}

TEST(Config, StoredDemoIsGood) {
  const std::filesystem::path stored = std::filesystem::path(LONGHALO_SOURCE_DIR) / "configs/demo.yaml";
  const Config config = load_config(Subcommand::kInfer, {stored, {}, {}});
  EXPECT_EQ(config.tasks.size(), 3U);
  EXPECT_EQ(log_path(config), "results/demo/log.jsonl");
}

TEST(Config, LogPathFollowsTheOutput) {
  Config config;
  EXPECT_EQ(log_path(config), "");
  config.output.directory = "out/";
  EXPECT_EQ(log_path(config), "out/log.jsonl");
  config.run.log = "other.jsonl";
  EXPECT_EQ(log_path(config), "other.jsonl");
}

}  // namespace
}  // namespace longhalo
