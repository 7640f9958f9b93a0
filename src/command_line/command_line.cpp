#include "command_line/command_line.hpp"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "bench/bench.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr const char* kFooter =
    "Start with ranks: mpirun -np 2 longhalo infer --config configs/demo.yaml\n"
    "All keys with their meaning and default: configs/reference.yaml.\n"
    "Exit codes: 0 done, 2 bad config or input, 75 stopped on request with its state saved, 76 a rank "
    "waited for too long, others fatal.";

// This process's number as the launcher gave it; nothing without a launcher.
std::optional<int> launched_rank() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* rank = std::getenv(variable)) return std::atoi(rank);
  return std::nullopt;
}

// Every rank parses the same line; only the first prints what is wrong with it.
bool is_first_process() {
  return launched_rank().value_or(0) == 0;
}

class Parser {
 public:
  explicit Parser(CommandLine& result) : result_(result) {
    app_.set_version_flag("--version", std::string("longhalo ") + LONGHALO_VERSION);
    app_.footer(kFooter);
    app_.require_subcommand(1);
    app_.option_defaults()->group("Options");

    CLI::App* infer = add_job(app_, "infer", Subcommand::kInfer,
                              "Read documents with a model: answer prompts, score tokens, embed chunks");
    (void)infer;
    add_job(app_, "train", Subcommand::kTrain, "Train a model on sequences that all ranks share")
        ->add_flag("--plan", result_.plan_only,
                   "Print memory by item, disk and time of a step, and where activations go, and stop");
    CLI::App* bench = app_.add_subcommand("bench", "Measure a part beside the machine's own rate");
    bench->require_subcommand(1);
    for (const Benchmark& one : benchmarks()) {
      CLI::App* job = add_job(*bench, one.name, one.subcommand, one.help);
      for (const Shortcut& shortcut : one.shortcuts)
        add_shortcut(*job, shortcut);
    }
    CLI::App* doctor =
        add_job(app_, "doctor", Subcommand::kDoctor, "Check ranks, GPUs, links and disks before a long job");
    add_shortcut(*doctor, {"--json", "doctor.json", "Write the report as JSON to this file"});
    add_tokenize();
  }

  void parse(int argc, const char* const* argv) {
    check_subcommand(app_, argc, argv, 1);
    app_.parse(argc, argv);
  }
  int explain(const CLI::ParseError& error) {
    const bool help = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success);
    if (is_first_process()) {
      std::ostringstream out;
      app_.exit(error, out, std::cerr);
      print_text(out.str());
      if (!help)
        std::cerr
            << "  remedy: longhalo --help lists the subcommands, longhalo SUBCOMMAND --help its options\n";
    }
    return static_cast<int>(help ? ExitCode::kDone : ExitCode::kUserError);
  }

 private:
  // CLI11 would say only that a subcommand is required, not that it does not know the one given.
  static void check_subcommand(const CLI::App& app, int argc, const char* const* argv, int at) {
    const std::vector<const CLI::App*> known = app.get_subcommands([](const CLI::App*) { return true; });
    if (known.empty() || at >= argc || argv[at][0] == '-') return;
    std::string names;
    for (const CLI::App* one : known) {
      if (one->get_name() == argv[at]) return check_subcommand(*one, argc, argv, at + 1);
      names += text(names.empty() ? "" : ", ", one->get_name());
    }
    throw CLI::ExtrasError(
        text("there is no subcommand '", argv[at], "' of ", app.get_name(), "; there are ", names),
        CLI::ExitCodes::ExtrasError);
  }

  CLI::App* add_job(CLI::App& parent, const char* name, Subcommand subcommand, const char* help) {
    CLI::App* job = parent.add_subcommand(name, help);
    job->add_option_function<std::string>(
        "--config", [this](const std::string& path) { result_.sources.file = path; },
        "YAML file with the settings");
    job->add_option("--set", result_.sources.overrides,
                    "Set one key, e.g. --set attention.window=4096; beats the file")
        ->allow_extra_args(false);
    job->add_flag("--print-config", result_.print_config, "Print the effective settings and stop");
    job->callback([this, subcommand] { result_.subcommand = subcommand; });
    return job;
  }

  void add_shortcut(CLI::App& job, const Shortcut& shortcut) {
    job.add_option_function<std::string>(
        shortcut.option,
        [this, key = std::string(shortcut.key)](const std::string& value) {
          result_.sources.overrides.push_back(text(key, "=", value));
        },
        text(shortcut.help, " (", shortcut.key, ")"));
  }

  void add_tokenize() {
    TokenizeOptions& options = result_.tokenize;
    CLI::App* job =
        app_.add_subcommand("tokenize", "Text files to an HDF5 token file, or back with --decode");
    job->add_option("--model", options.model, "Model directory with the tokenizer")->required();
    job->add_option("--output", options.output, "Token file to write; with --decode the folder for the texts")
        ->required();
    job->add_option("--decode", options.decode, "Token file to turn back into texts");
    job->add_flag_callback(
        "--force", [&options] { options.if_exists = IfOutputExists::kReplace; },
        "Replace what stands at the output, but nothing that is read");
    job->add_option("files", options.inputs, "Text files");
    job->callback([this] { result_.subcommand = Subcommand::kTokenize; });
  }

  CommandLine& result_;
  CLI::App app_{"LongHalo: transformers over million-token sequences, on MPI ranks", "longhalo"};
};

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine result;
  Parser parser(result);
  try {
    parser.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    result.exit_code = parser.explain(error);
  }
  result.sources.environment = config_environment();
  return result;
}

bool started_by_launcher() {
  return launched_rank().has_value();
}

}  // namespace longhalo
