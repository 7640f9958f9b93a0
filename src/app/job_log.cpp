#include "app/job_log.hpp"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/hdf5.hpp"

namespace longhalo {
namespace {

std::string mpi_version() {
  char words[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(words, &length);
  const std::string all(words, static_cast<size_t>(length));
  return all.substr(0, all.find(','));
}

}  // namespace

void require_job_log(const MpiSession& session, const Config& config) {
  namespace fs = std::filesystem;
  session.together([&] {
    const fs::path file = log_path(config), output = config.output.directory;
    if (!session.is_root() || file.empty()) return;
    std::error_code error;
    const fs::path beside = fs::weakly_canonical(fs::absolute(output / "log.jsonl", error), error);
    const fs::path whole = fs::weakly_canonical(fs::absolute(file, error), error);
    const bool comes_with_the_output =
        !output.empty() && !fs::exists(output, error) && whole.parent_path() == beside.parent_path();
    if (!comes_with_the_output) RunLog::require_usable(file);
  });
}

std::unique_ptr<RunLog> open_job_log(const MpiSession& session, const Config& config,
                                     const std::string& command, int threads, const Computing& computing) {
  RunHeader header;
  header.command = command;
  header.config = nlohmann::json::parse(dump_json(config));
  header.versions = {{"longhalo", LONGHALO_VERSION},
                     {"mpi", mpi_version()},
                     {"hdf5", hdf5_version()},
                     {"compiler", compiler_version()}};
  header.ranks = session.ranks();
  header.hosts = session.hosts();
  header.extra = {{"threads_per_rank", threads},
                  {"transport", computing.transport},
                  {"devices", gather_text(session, computing.device)},
                  {"precision", name_of(computing.precision)}};
  std::unique_ptr<RunLog> log;
  session.together([&] {
    const std::string path = log_path(config);
    log = session.is_root() && !path.empty() ? std::make_unique<RunLog>(path, header)
                                             : std::make_unique<RunLog>();
  });
  if (session.is_root())
    log_info(text("longhalo ", LONGHALO_VERSION, " ", command, ": ", session.ranks(), " ranks, ", threads,
                  " threads each, ", computing.device, " in ", name_of(computing.precision), ", ",
                  mpi_version(), "; halos: ", computing.transport));
  return log;
}

}  // namespace longhalo
