// What a process says to people. Plain text log on standard error, one line a message, each line written
// whole: "12:03:44 longhalo[rank 1] warning: ...". The machine-readable log is telemetry's.
#pragma once

#include <string_view>

namespace longhalo {

enum class LogLevel { kInfo, kWarning, kError };

/// Whether this rank is to tell the user what every rank finds: one says it, mostly the first.
enum class Say { kNo, kYes };

/// Names this process in every later line. Rank -1 (before MPI starts) prints no rank.
void set_log_rank(int rank);

/// Lines below `level` are dropped. The default is kInfo.
void set_log_level(LogLevel level);

void log_info(std::string_view message);
void log_warning(std::string_view message);
void log_error(std::string_view message);

/// What a command answers, to standard output, whole. Throws UserError.
void print_text(std::string_view text);

/// Opens /dev/null at each of the descriptors 0, 1 and 2 that the caller left closed. Otherwise the next file
/// opened gets that number, and log lines go into the data. To be called first of all.
void claim_standard_streams();

}  // namespace longhalo
