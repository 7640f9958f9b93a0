// What a config is refused for, each fault checked for place and remedy, and odd YAML. What the job would
// spoil at the places it names: config_places_test.cpp.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

#include "config/config.hpp"
#include "config_fixture.hpp"

namespace longhalo {
namespace {

using namespace test;

constexpr const char* kGood = R"(model: {path: m}
input:
  documents: [a.txt]
  prompts: [Why]
tasks: [generate, score]
output: {directory: out}
)";

std::string faults(std::string_view yaml) {
  return message_of(Subcommand::kBenchAttention, yaml);
}

std::string faults_of_sets(std::vector<std::string> overrides, Environment environment = {}) {
  return message_of(Subcommand::kBenchAttention,
                    ConfigSources{{}, std::move(environment), std::move(overrides)});
}

TEST(ConfigFaults, EveryFaultIsNamedAtOnceWithItsPlace) {
  const std::string message = message_of(Subcommand::kInfer, R"(attention:
  windwo: 4096
  window: big
  landmark_stride: -1
  landmark_bias: .nan
modle: {path: m}
model:
  weights: rondom
  seed: 1e30
generate:
  top_p: 0
  temperature: -0.5
  max_new_tokens: 99999999999999999999
run:
  progress: lnes
  threads: [1]
  threads: 2
)");
  for (const char* part : {
           "the config has 16 faults",
           "x.yaml:2:3: unknown key 'attention.windwo'; did you mean attention.window?",
           "x.yaml:3:11: attention.window is 'big', not a whole number; it takes a whole number, 1 to",
           "x.yaml:4:20: attention.landmark_stride is '-1', out of range",
           "x.yaml:5:18: attention.landmark_bias is '.nan', not a number",
           "x.yaml:6:1: unknown key 'modle'; did you mean model?",
           "x.yaml:8:12: model.weights is 'rondom'; did you mean 'random'?",
           "x.yaml:9:9: model.seed is '1e30', not a whole number",
           "x.yaml:11:10: generate.top_p is '0', out of range; it takes a number above 0, at most 1",
           "x.yaml:12:16: generate.temperature is '-0.5', out of range",
           "x.yaml:13:19: generate.max_new_tokens is '99999999999999999999', out of range",
           "x.yaml:15:13: run.progress is 'lnes'; did you mean 'lines'?",
           "x.yaml:16:12: run.threads is a list",
           "x.yaml:17:3: 'run.threads' is given twice, first on line 16",
           "x.yaml: there is no input",
           "x.yaml: output.directory is missing",
           "x.yaml: tasks is missing or empty",
           "where:  x.yaml",
           "configs/reference.yaml",
       }) {
    EXPECT_TRUE(holds(message, part));
  }
}

TEST(ConfigFaults, AFaultyValueHidesNoOtherAndCausesNoOther) {
  const std::string message = faults("attention: {window: x, landmark_stride: 4096}\n");
  EXPECT_EQ(count_faults(message), 1)
      << message;  // the stride is not compared with a window that is not known
  EXPECT_TRUE(holds(message, "the config has a fault:"));
}

TEST(ConfigFaults, NothingIsMissingFromAFileThatCannotBeRead) {
  const std::string message = message_of(Subcommand::kInfer, "run: {threads: 1\n");
  EXPECT_EQ(count_faults(message), 1) << message;
  EXPECT_EQ(
      count_faults(message_of(Subcommand::kInfer, ConfigSources{"/nowhere/x.yaml", {}, {"run.threads=x"}})),
      2);
}

TEST(ConfigFaults, HintsKnowTheSection) {
  EXPECT_TRUE(holds(faults("window: 5"), "x.yaml:1:1: unknown key 'window'; did you mean attention.window?"));
  EXPECT_TRUE(holds(faults("generate: {chunk_token: 5}"), "did you mean embed.chunk_tokens?"));
  EXPECT_TRUE(holds(faults("bench: {sead: 5}"), "did you mean "));
  EXPECT_TRUE(holds(faults("generate: {sead: 5}"), "did you mean generate.seed?"));
  EXPECT_TRUE(holds(faults("model: {layers: 5}"), "did you mean model.shape.layers?"));
  EXPECT_TRUE(holds(faults("run: {qqqqqqqq: 5}"),
                    "'run.qqqqqqqq'; run has device, precision, transport, share_gpus, threads, token_tile"));
  EXPECT_TRUE(holds(faults("zzzzzzzzzz: 5"), "the config has model, attention, input"));
}

TEST(ConfigFaults, OverridesAreNamedAsTyped) {
  EXPECT_TRUE(
      holds(faults_of_sets({"attention.windwo=4"}),
            "--set attention.windwo=4: unknown key 'attention.windwo'; did you mean attention.window?"));
  EXPECT_TRUE(
      holds(faults_of_sets({"attention.window=x"}), "--set attention.window=x: attention.window is 'x'"));
  EXPECT_TRUE(holds(faults_of_sets({"attention.window"}), "is not of the form section.key=value"));
  EXPECT_TRUE(holds(faults_of_sets({"=4"}), "is not of the form section.key=value"));
  EXPECT_TRUE(
      holds(faults_of_sets({"attention=4"}), "attention is a section, not a value; its keys are window"));
  EXPECT_TRUE(holds(faults_of_sets({"attention.window="}), "attention.window is empty, not a whole number"));
  EXPECT_TRUE(holds(faults_of_sets({"input.prompts=[a"}), "--set input.prompts=[a: is not YAML"));
  EXPECT_TRUE(holds(faults_of_sets({"input.prompts=What: is this?"}), "put quotes around"));
  EXPECT_TRUE(holds(faults_of_sets({"run.log=" + std::string(500, 'a') + "\xff"}), "not UTF-8"));
  EXPECT_EQ(count_faults(faults_of_sets({"a=1", "b=2", "attention.c=3"})), 3);
}

TEST(ConfigFaults, VariablesAreNamedAndSpeltAsVariables) {
  EXPECT_TRUE(holds(faults_of_sets({}, {{"LONGHALO_ATTENTION__WINDWO", "4"}}),
                    "environment variable LONGHALO_ATTENTION__WINDWO: names no config key; did you mean "
                    "LONGHALO_ATTENTION__WINDOW?"));
  EXPECT_TRUE(holds(faults_of_sets({}, {{"LONGHALO_ATTENTION__WINDOW", "x"}}),
                    "environment variable LONGHALO_ATTENTION__WINDOW: LONGHALO_ATTENTION__WINDOW is 'x'"));
  // `export LONGHALO_...=` is how many mean to unset one.
  EXPECT_TRUE(
      holds(faults_of_sets({}, {{"LONGHALO_ATTENTION__WINDOW", ""}}),
            "LONGHALO_ATTENTION__WINDOW is empty, not a whole number; it takes a whole number, 1 to "));
  for (const char* name : {"LONGHALO_ATTENTION__WINDOW", "LONGHALO_RUN__DEVICE", "LONGHALO_TRAIN__CLIP",
                           "LONGHALO_RUN__CHECK_OPERATIONS", "LONGHALO_TASKS", "LONGHALO_INPUT__DOCUMENTS"}) {
    const std::string message = faults_of_sets({}, {{name, ""}});
    EXPECT_TRUE(holds(message, text("environment variable ", name, ": ", name, " is empty")));
    EXPECT_TRUE(holds(message, ", or unset the variable"));
  }
  EXPECT_TRUE(holds(message_of(Subcommand::kTrain, ConfigSources{{}, {{"LONGHALO_MODEL__PATH", ""}}, {}}),
                    "environment variable LONGHALO_MODEL__PATH: model.path is empty: the directory"));
  EXPECT_TRUE(holds(faults_of_sets({}, {{"LONGHALO_X__", "4"}}), "names no config key"));
  EXPECT_TRUE(
      holds(faults_of_sets({}, {{"LONGHALO_MODEL__SHAPE__HEAD", "4"}}), "LONGHALO_MODEL__SHAPE__HEADS?"));
  EXPECT_TRUE(holds(faults_of_sets({}, {{"LONGHALO_RUN__DEVISE", "cpu"}}),
                    "environment variable LONGHALO_RUN__DEVISE: names no config key; did you mean "
                    "LONGHALO_RUN__DEVICE?"));
}

TEST(ConfigFaults, VariablesWithoutASectionThatAreNearlyAKey) {
  for (const auto& [given, meant] : {std::pair{"LONGHALO_RUN_DEVICE", "LONGHALO_RUN__DEVICE"},
                                     {"LONGHALO_RUN_DEVISE", "LONGHALO_RUN__DEVICE"},
                                     {"LONGHALO_MODEL_SHAPE_HEADS", "LONGHALO_MODEL__SHAPE__HEADS"},
                                     {"LONGHALO_MODEL__SHAPE_HEADS", "LONGHALO_MODEL__SHAPE__HEADS"},
                                     {"LONGHALO__RUN__DEVICE", "LONGHALO_RUN__DEVICE"},
                                     {"LONGHALO_ACTIVATIONS_DIRECTORY", "LONGHALO_ACTIVATIONS__DIRECTORY"},
                                     {"LONGHALO_TASK", "LONGHALO_TASKS"}})
    EXPECT_TRUE(
        holds(faults_of_sets({}, {{given, "4"}}),
              text("environment variable ", given, ": names no config key; did you mean ", meant, "?")))
        << given;
  EXPECT_TRUE(holds(faults_of_sets({}, {{"LONGHALO_MODEL_PATH", "/site/models"}}), "unset it for this job"));
}

// Those of the build, the scripts and the tests, and what a site's modules may set.
TEST(ConfigFaults, VariablesThatBelongToSomeoneElse) {
  for (const char* name : {"EXECUTABLE",    "MPIEXEC",  "SLURM_MPI",  "TESTS_AT_ONCE",
                           "TESTS_KILLS",   "TEST_RUN", "FAKE_NVML",  "FAKE_NVML_LIBRARY",
                           "SYNC_LAUNCHES", "CUDA",     "TESTS",      "FUZZ",
                           "SANITIZE",      "PYTHON",   "SOURCE_DIR", "VERSION",
                           "ROOT",          "HOME",     "DIR",        "PATH",
                           "BASE",          "MODEL",    "SOMETHING",  "MASKS",
                           "TASKED",        "DISKS",    "RUN_ALL",    ""})
    EXPECT_EQ(faults_of_sets({}, {{text("LONGHALO_", name), "4"}}), "") << name;
}

TEST(ConfigFaults, AttentionThatCannotBe) {
  EXPECT_TRUE(
      holds(faults("attention:\n  window: 100\n  landmark_stride: 101\n"),
            "x.yaml:3:3: attention.landmark_stride 101 (x.yaml:3:3) is larger than attention.window 100 "
            "(x.yaml:2:3)"));
  EXPECT_TRUE(holds(faults("attention: {window: 100}"), "attention.landmark_stride 256 (default) is larger"));
  EXPECT_EQ(faults("attention: {window: 100, landmark_stride: 100}"), "");
  EXPECT_EQ(faults("attention: {window: 1, landmark_stride: 0}"), "");
  EXPECT_TRUE(holds(faults("attention: {window: 0}"), "attention.window is '0', out of range"));
  EXPECT_TRUE(holds(faults("attention: {window: 1099511627776, landmark_stride: 1099511627775}"),
                    "least common multiple"));
}

TEST(ConfigFaults, BandsThatCannotBe) {
  const auto bands = [](const std::string& list) { return faults("attention: {bands: " + list + "}"); };
  EXPECT_EQ(bands("[[1, 0, inf]]"), "");
  EXPECT_EQ(bands("[[1, 0, 64], [64, 64, 128], [128, 128, 256], [256, 256, inf]]"), "");
  EXPECT_TRUE(holds(bands("[[1, 0, 4], [8, 8, 16], [8, 16, 32], [8, 32, 64], [8, 64, inf]]"),
                    "has 5 bands; at most 4"));
  EXPECT_TRUE(holds(bands("[[1, 0, 4], [8, 7, inf]]"), "band 2, [8, 7, inf], has near below its stride"));
  EXPECT_TRUE(holds(bands("[[1, 0, 4], [8, 9, 9]]"), "band 2, [8, 9, 9], sees nothing"));
  EXPECT_TRUE(holds(bands("[[1, 1, 4]]"), "a token must see itself"));
  EXPECT_TRUE(holds(bands("[[0, 0, 4]]"), "attention.bands is '0', out of range"));
  EXPECT_TRUE(holds(bands("[[1, -1, 4]]"), "attention.bands is '-1', out of range"));
  EXPECT_TRUE(holds(bands("[[1, 0]]"), "has a band of 2 numbers; a band is [stride, near, far]"));
  EXPECT_TRUE(holds(bands("[[1, 0, far]]"), "is 'far', not a whole number"));
  EXPECT_TRUE(holds(bands("[1, 0, inf]"), "has a band that is '1'; a band is"));
  EXPECT_TRUE(holds(bands("all"), "it takes a list of at most 4"));
  EXPECT_TRUE(
      holds(bands("[[1, 0, 9], [1048573, 1048573, inf], [1048571, 1048571, inf]]"), "least common multiple"));
  EXPECT_TRUE(holds(faults("attention: {window: 4, bands: [[1, 0, inf]]}"),
                    "attention.window 4 (x.yaml:1:13) has no effect beside attention.bands"));
}

TEST(ConfigFaults, ModelsThatCannotBe) {
  EXPECT_TRUE(holds(faults("model: {shape: {layers: 3}}"),
                    "x.yaml:1:17: model.shape.layers 3 (x.yaml:1:17) has no effect"));
  EXPECT_TRUE(holds(faults("model: {weights: random, shape: {heads: 5, kv_heads: 2}}"),
                    "model.shape.kv_heads 2 (x.yaml:1:44) does not divide model.shape.heads 5"));
  EXPECT_TRUE(holds(faults("model: {weights: random, shape: {head_dim: 63}}"), "model.shape.head_dim 63"));
  EXPECT_TRUE(holds(faults("model: {weights: random, shape: {layers: 1000000000}}"), "out of range"));
  EXPECT_TRUE(
      holds(faults("bench: {heads: 9, kv_heads: 4}"), "bench.kv_heads 4 (x.yaml:1:19) does not divide"));
}

TEST(ConfigFaults, DevicesThatCannotBe) {
  const auto run = [](const std::string& keys) { return faults("run: {" + keys + "}"); };
  for (const char* good :
       {"device: cuda", "device: cpu", "device: cpu, precision: fp32", "device: cpu, transport: mpi",
        "device: cuda, precision: fp8, transport: nccl", "precision: bf16", "precision: fp32",
        "precision: int8", "share_gpus: true", "share_gpus: false",
        "device: cuda, share_gpus: true, transport: staged", "token_tile: 0"}) {
    EXPECT_EQ(run(good), "") << good;
  }
  EXPECT_TRUE(holds(run("device: cpu, precision: bf16"),
                    "x.yaml:1:20: run.precision \"bf16\" (x.yaml:1:20) is for GPUs, but run.device \"cpu\" "
                    "(x.yaml:1:7); the CPU computes in fp32"));
  EXPECT_TRUE(holds(run("device: cpu, precision: fp8"), "run.precision \"fp8\""));
  EXPECT_TRUE(holds(run("device: cpu, precision: int8"), "run.precision \"int8\""));
  EXPECT_TRUE(holds(run("device: cuda, precision: fp32"),
                    "run.precision \"fp32\" (x.yaml:1:21) is for the CPU, but run.device \"cuda\""));
  EXPECT_TRUE(holds(run("device: cpu, transport: nccl"), "run.transport \"nccl\""));
  EXPECT_TRUE(holds(run("device: cpu, transport: staged"), "run.transport \"staged\""));
  EXPECT_TRUE(holds(run("device: cpu, share_gpus: true"), "run.share_gpus true (x.yaml:1:20) is for GPUs"));
  EXPECT_TRUE(holds(faults("{run: {device: cpu}, bench: {kernel: hopper}}"), "bench.kernel \"hopper\""));
  EXPECT_TRUE(holds(run("device: gpu"), "run.device is 'gpu'"));
  EXPECT_TRUE(holds(run("precision: fp16"), "run.precision is 'fp16'"));
  for (const char* value : {"yes", "1", "'true'", "[true]", "", "True"})
    EXPECT_TRUE(holds(run(text("share_gpus: ", value)), "it takes true or false")) << value;
  EXPECT_EQ(count_faults(run("device: cpu, precision: bf16, transport: nccl, share_gpus: true")), 3);
  EXPECT_EQ(count_faults(run("device: gpu, precision: fp32")), 1) << "what is not known rules nothing out";
  EXPECT_TRUE(holds(faults("bench: {outputs: 8}"), "give both of them, or none"));
  EXPECT_EQ(faults("bench: {outputs: 8, inputs: 8}"), "");
}

TEST(ConfigFaults, ActivationsThatCannotBe) {
  for (const char* good :
       {"store: auto", "store: device, every: 3", "store: host", "store: nvme, directory: /d", "store: off",
        "directory: /d", "every: 4, directory: /d"}) {
    EXPECT_EQ(faults(text("activations: {", good, "}")), "") << good;
  }
  EXPECT_TRUE(holds(faults("activations: {store: off, every: 2}"),
                    "activations.every 2.0 (x.yaml:1:27) has no effect with activations.store \"off\""));
  EXPECT_TRUE(holds(faults("activations: {store: host, directory: /d}"),
                    "activations.directory \"/d\" (x.yaml:1:28) has no effect"));
  EXPECT_TRUE(holds(faults("activations: {store: disk}"), "activations.store is 'disk'"));
  EXPECT_TRUE(holds(faults("activations: {every: 0}"), "out of range"));
}

TEST(ConfigFaults, RequirementsDependOnTheSubcommand) {
  EXPECT_EQ(message_of(Subcommand::kInfer, kGood), "");
  EXPECT_EQ(message_of(Subcommand::kBenchAttention, ""), "");
  EXPECT_EQ(count_faults(message_of(Subcommand::kBenchPrefill, "")), 1);
  EXPECT_EQ(message_of(Subcommand::kBenchPrefill, "model: {weights: random}"), "");
  EXPECT_EQ(count_faults(message_of(Subcommand::kBenchStep, "")), 1);
  EXPECT_EQ(message_of(Subcommand::kBenchStorage, ""), "");
  EXPECT_EQ(count_faults(message_of(Subcommand::kInfer, "")),
            4);  // model.path, input, output.directory, tasks
  EXPECT_EQ(count_faults(message_of(Subcommand::kTokenize, "")), 3);
  EXPECT_EQ(
      message_of(Subcommand::kTokenize, "{model: {path: m}, input: {tokens: t.h5}, output: {directory: o}}"),
      "");
  // Random weights over a token file need no tokenizer, until text is to be read or written.
  const std::string random = "{model: {weights: random}, output: {directory: o}, ";
  EXPECT_EQ(message_of(Subcommand::kInfer, random + "tasks: score, input: {tokens: t.h5}}"), "");
  EXPECT_TRUE(holds(message_of(Subcommand::kInfer, random + "tasks: score, input: {documents: a}}"),
                    "of the tokenizer"));
  EXPECT_TRUE(
      holds(message_of(Subcommand::kInfer, random + "tasks: generate, input: {tokens: t, prompts: a}}"),
            "of the tokenizer"));
}

TEST(ConfigFaults, InputThatCannotBe) {
  const auto with = [](const std::string& set) {
    const TemporaryFile file(kGood);
    return message_of(Subcommand::kInfer, ConfigSources{file.path(), {}, {set}});
  };
  EXPECT_TRUE(holds(with("input.tokens=t.h5"),
                    "input.tokens \"t.h5\" (--set input.tokens=t.h5) and input.documents"));
  EXPECT_TRUE(holds(with("input.prompts_file=p"), "are both given; remove one of the two"));
  EXPECT_TRUE(holds(with("input.prompts=[]"), "the task generate has nothing to answer"));
  EXPECT_TRUE(holds(with("input.prompts=[a, ' ']"), "input.prompts: entry 2 is empty"));
  EXPECT_TRUE(holds(with("input.documents="),
                    "input.documents is empty; it takes a list of texts, or one text, and [] for none"));
  EXPECT_TRUE(holds(with("run.device=none"), "run.device is 'none'; it takes one of auto, "));
  EXPECT_TRUE(
      holds(with("run.device=cqu"), "run.device is 'cqu'; did you mean 'cpu'? It takes one of auto, "));
  EXPECT_TRUE(holds(with("input.documents=['']"), "input.documents: entry 1 is empty"));
  EXPECT_TRUE(holds(with("tasks=[score, score]"), "tasks names 'score' twice"));
  EXPECT_TRUE(holds(with("tasks=[sum]"), "tasks is 'sum'"));
  EXPECT_TRUE(holds(with("tasks=[]"), "tasks is missing or empty"));
  EXPECT_TRUE(holds(with("generate.top_p=0.5"),
                    "has no effect with generate.temperature 0.0 (default), which is greedy"));
}

TEST(ConfigFaults, NumbersThatAreNone) {
  for (const char* value :
       {"1e30", "1e400", "-5", "0x10", "1_000", "2048.0", "16k", "\"64\"", "true", "null", "",
        "9223372036854775808", "-9223372036854775809", "{a: 1}", "[]", "+-3", "inf"}) {
    const std::string message = faults(text("embed: {chunk_tokens: ", value, "}"));
    EXPECT_EQ(count_faults(message), 1) << value;
    EXPECT_TRUE(holds(message, ": embed.chunk_tokens ")) << value;
    EXPECT_TRUE(holds(message, "x.yaml:1:")) << value;
  }
  for (const char* value : {"1e400", "-1e400", "nan", "inf", "-inf", "hot", "0x1p3", "\"0.5\"", "101"}) {
    const std::string message = faults(text("generate: {temperature: ", value, "}"));
    EXPECT_EQ(count_faults(message), 1) << value;
    EXPECT_TRUE(holds(message, "generate.temperature is")) << value;
  }
}

TEST(ConfigFaults, TextThatIsNone) {
  EXPECT_TRUE(holds(faults("model:\n  path:\n"), "model.path has no value; it takes a text"));
  EXPECT_TRUE(holds(faults("model: {path: [a]}"), "model.path is a list"));
  EXPECT_TRUE(holds(faults("input: {prompts: [a, {b: c}]}"), "x.yaml:1:22: input.prompts is a map"));
  EXPECT_TRUE(holds(faults("input: {prompts: [a, ~]}"), "input.prompts has no value"));
}

TEST(ConfigYaml, AnchorsAndAliasesWork) {
  const Config config = load_config_text(Subcommand::kBenchAttention,
                                         "embed: {chunk_tokens: &n 100}\nrun: {token_tile: *n}\n", "x.yaml");
  EXPECT_EQ(config.run.token_tile, 100);
}

TEST(ConfigYaml, OddYamlIsRefusedWithItsPlace) {
  EXPECT_TRUE(holds(faults("base: &b {window: 4}\nattention:\n  <<: *b\n"), "x.yaml:3:3: YAML merge keys"));
  EXPECT_TRUE(holds(faults("attention:\n\twindow: 4\n"), "x.yaml:2:"));
  EXPECT_TRUE(holds(faults("attention: {window: 4\n"), "is not YAML"));
  EXPECT_TRUE(holds(faults("attention: *nowhere\n"), "x.yaml:1:12: is not YAML"));
  EXPECT_TRUE(holds(faults("- a\n- b\n"), "the config is a section, not a value"));
  EXPECT_TRUE(holds(faults("just words"), "the config is a section, not a value"));
  EXPECT_TRUE(holds(faults("? [a, b]\n: c\n"), "a key is not text"));
  EXPECT_TRUE(
      holds(faults("run: {threads: 1}\n---\nrun: {threads: 2}\n"), "here begins what belongs to no key"));
  EXPECT_TRUE(holds(faults("run:\n  threads: 1\nrun:\n  threads: 2\n"),
                    "x.yaml:3:1: 'run' is given twice, first on line 1"));
  EXPECT_TRUE(holds(faults(std::string_view("run:\n  log: a\0b\n", 15)), "x.yaml:2:9: holds a NUL byte"));
  EXPECT_TRUE(
      holds(faults("run:\n  log: \"a\\0b\"\n"), "x.yaml:2:8: run.log is a text that holds a NUL byte"));
  EXPECT_TRUE(holds(faults("input:\n  documents: [a, \"b\\0\"]\n"), "holds a NUL byte"));
  EXPECT_TRUE(holds(faults("run:\n  log: \xc3\x28\n"), "x.yaml:2:8: holds bytes that are not UTF-8"));
  EXPECT_TRUE(holds(faults("run:\n  log: \xed\xa0\x80\n"), "not UTF-8"));
  EXPECT_TRUE(holds(faults("model: &a {shape: *a}\n"), "x.yaml:1:"));
  for (const char* stray :
       {",", "# comment\n, a\nrun: {threads: 1}\n", "run: {threads: 1}\n]\n", "]", "}", "a: b\n}\n"}) {
    EXPECT_EQ(count_faults(faults(stray)), 1) << stray;
  }
  EXPECT_TRUE(holds(faults("# comment\n, a\nrun: {threads: 1}\n"), "x.yaml:2:1: "));
  EXPECT_TRUE(holds(faults(std::string(5000, '[')), "is not YAML"));
  EXPECT_TRUE(holds(faults("a: " + std::string(5000, '{')), "is not YAML"));
}

TEST(ConfigYaml, AliasBombsAreRefusedQuickly) {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 20; ++i) {
    const std::string last = text("*a", i - 1);
    bomb += text("a", i, ": &a", i, " [", last, ", ", last, ", ", last, ", ", last, ", ", last, "]\n");
  }
  EXPECT_EQ(count_faults(faults(bomb + "input: {prompts: *a19}\n")), 25);
}

TEST(ConfigYaml, FilesThatCannotBeRead) {
  const auto load = [](const std::filesystem::path& path) {
    return message_of(Subcommand::kBenchAttention, ConfigSources{path, {}, {}});
  };
  EXPECT_TRUE(holds(load("/nowhere/x.yaml"), "/nowhere/x.yaml: there is no such config file"));
  EXPECT_TRUE(holds(load(std::filesystem::temp_directory_path()), "is a directory"));
  const TemporaryFile large("# " + std::string(10 << 20, 'x'));
  EXPECT_TRUE(holds(load(large.path()), "too large for a config"));
  EXPECT_TRUE(holds(load("/dev/fd/987"), "ranks do not inherit what the shell opened"));
  EXPECT_FALSE(holds(load("/nowhere/x.yaml"), "the shell"));
}

TEST(ConfigYaml, AFileThatIsASocket) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  EXPECT_TRUE(holds(message_of(Subcommand::kBenchAttention, ConfigSources{text("/dev/fd/", ends[0]), {}, {}}),
                    "is a socket, which cannot be read as a file"));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(ConfigYaml, PlacesInAFileNameItsPath) {
  const TemporaryFile file("run:\n  thread: 4\n");
  EXPECT_TRUE(holds(message_of(Subcommand::kBenchAttention, ConfigSources{file.path(), {}, {}}),
                    file.path().string() + ":2:3: unknown key 'run.thread'; did you mean run.threads?"));
}

}  // namespace
}  // namespace longhalo
