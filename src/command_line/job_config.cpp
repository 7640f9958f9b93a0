#include "command_line/job_config.hpp"

#include <exception>
#include <filesystem>

#include "app/signals.hpp"

namespace longhalo {

Config shared_config(const MpiSession& session, const CommandLine& command) {
  std::string yaml;
  ConfigSources sources = command.sources;
  sources.asked_to_stop = JobSignals::has_stop_signal;
  session.together([&] {
    if (session.is_root()) yaml = dump_yaml(load_config(command.subcommand, sources));
  });
  yaml = broadcast_text(session, yaml);
  return load_config_text(command.subcommand, yaml, "the effective config");
}

double deadline_before_start(const CommandLine& command) {
  std::error_code ignored;
  if (command.sources.file && !std::filesystem::is_regular_file(*command.sources.file, ignored))
    return Config().run.deadline_seconds;  // a pipe is read once, by rank 0
  ConfigSources sources = command.sources;
  sources.look_at_places = LookAtPlaces::kNo;  // for rank 0, which says what it finds
  try {
    return load_config(command.subcommand, sources).run.deadline_seconds;
  } catch (const std::exception&) {
    return Config().run.deadline_seconds;
  }
}

}  // namespace longhalo
