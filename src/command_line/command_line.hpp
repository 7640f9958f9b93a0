// The command line: `longhalo infer|train|bench|doctor|tokenize ...`, parsed by CLI11.
#pragma once

#include <optional>
#include <string>

#include "app/tokenize.hpp"
#include "config/config.hpp"

namespace longhalo {

struct CommandLine {
  Subcommand subcommand = Subcommand::kInfer;
  ConfigSources sources;
  bool print_config = false;
  bool plan_only = false;  // train --plan
  TokenizeOptions tokenize;
  /// Set when there is nothing to run: after --help or --version, or after a fault, which has then been
  /// printed.
  std::optional<int> exit_code;

  /// Whether it is a job that saves its state when a signal asks it to.
  bool hears_requests() const {
    const bool is_job = subcommand == Subcommand::kInfer || subcommand == Subcommand::kTrain;
    return is_job && !exit_code && !print_config && !plan_only;
  }
};

CommandLine parse_command_line(int argc, const char* const* argv);

/// Whether mpirun, srun or the like started this process, possibly with others.
bool started_by_launcher();

}  // namespace longhalo
