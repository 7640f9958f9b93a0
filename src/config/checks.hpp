// Faults that no single value shows: missing keys of a subcommand, and values that cannot go together.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "config/config.hpp"
#include "config/faults.hpp"

namespace longhalo {

/// Which key was set where, and which keys hold a fault already (their values say nothing).
struct KeyOrigins {
  std::map<std::string, std::string, std::less<>> place;
  std::set<std::string, std::less<>> faulty;
  std::string config_name;  // stands for the place of a key that is nowhere set
};

void check_config(Subcommand subcommand, const Config& config, const KeyOrigins& origins,
                  ConfigFaults& faults);

/// What takes a look at files: whether the job would write over what it reads, or over its own output.
/// `config_file` is empty where there is none.
void check_places(Subcommand subcommand, const Config& config, const std::filesystem::path& config_file,
                  const KeyOrigins& origins, ConfigFaults& faults);

}  // namespace longhalo
