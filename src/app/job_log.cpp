#include "app/job_log.hpp"

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
