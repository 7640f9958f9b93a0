// longhalo: parse, dispatch, exit code. The jobs themselves are told in src/app, one file a subcommand.
//
// Exit codes: 0 done, 1 a fault of LongHalo, 2 bad config or input, 75 stopped on request with its state
// saved, 76 a rank waited for too long.
#include <csignal>
#include <exception>

#include "app/infer.hpp"
#include "app/signals.hpp"
#include "app/tokenize.hpp"
#include "app/train.hpp"
#include "app/training_setup.hpp"
#include "bench/bench.hpp"
#include "comm/job_hosts.hpp"
#include "comm/mpi_session.hpp"
#include "comm/watchdog.hpp"
#include "command_line/command_line.hpp"
#include "command_line/job_config.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/waiting.hpp"
#include "doctor/doctor.hpp"
#include "doctor/doctor_launch.hpp"
#include "kernels/matmul/blas_room.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

// Before main, and before libraries prepare themselves, which takes those of CUDA a tenth of a second: a
// signal that asks a job to stop shall find no moment at which it only kills it.
// OpenBLAS, where it has no room, would wait there for ever.
void before_libraries(int, char**, char** environment) {
  JobSignals::hold_back();
  require_room_for_blas(environment);
}
using BeforeMain = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const BeforeMain before_libraries_first = before_libraries;

ExitCode run(MpiSession& session, const CommandLine& command) {
  if (command.subcommand != Subcommand::kDoctor) refuse_unconnected_rank(session);  // a row of the doctor's
  const Config config = shared_config(session, command);
  session.set_check_operations(config.run.check_operations);
  set_deadline_seconds(config.run.deadline_seconds);
  if (command.print_config) {
    if (session.is_root()) print_text(dump_yaml(config));
    return ExitCode::kDone;
  }
  if (command.plan_only) {
    print_training_plan(session, config);
    return ExitCode::kDone;
  }
  JobSignals::reserve_before_end(config.run.stop_before_end_seconds);
  switch (command.subcommand) {
    case Subcommand::kInfer:
      return run_infer(session, config);
    case Subcommand::kTrain:
      return run_train(session, config);
    case Subcommand::kDoctor:
      return run_doctor(session, config);
    case Subcommand::kTokenize:
      break;  // needs no ranks: main() has dealt with it
    default:
      run_benchmark(session, command.subcommand, config);
  }
  return ExitCode::kDone;
}

int run_ranks(int argc, char** argv, const CommandLine& command) {
  set_deadline_seconds(deadline_before_start(command));
  Watchdog watchdog(-1, host_name(), JobSignals::has_stop_signal);  // outlives MPI
  MpiSession session(&argc, &argv);
  try {
    return static_cast<int>(session.or_end_all([&] {
      watchdog.set_rank(session.rank(), hosts_of_job(session));
      return run(session, command);
    }));
  } catch (const JointError& error) {  // every rank knows: leave together
    if (session.rank() == error.reporting_rank) {
      if (error.exit_code == ExitCode::kRequeue)
        log_info(error.what());
      else
        log_error(error.what());
    }
    return static_cast<int>(error.exit_code);
  }
}

// A launcher ends all ranks when the first one leaves with an error, perhaps before the one that explains it
// has spoken: so nobody leaves before all are here.
int leave_together(int argc, char** argv, int exit_code) {
  if (exit_code != static_cast<int>(ExitCode::kDone) && started_by_launcher())
    const MpiSession session(&argc, &argv);
  return exit_code;
}

}  // namespace
}  // namespace longhalo

int main(int argc, char** argv) {
  using namespace longhalo;
  claim_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes shall be an error of write(), which says where
  try {
    const CommandLine command = parse_command_line(argc, argv);
    if (command.hears_requests())
      std::signal(SIGPIPE, SIG_IGN);  // a job goes on when nobody reads its log any more
    else
      JobSignals::let_through();
    if (command.exit_code) return leave_together(argc, argv, *command.exit_code);
    if (command.subcommand != Subcommand::kTokenize) return run_ranks(argc, argv, command);
    run_tokenize(command.tokenize);
    return static_cast<int>(ExitCode::kDone);
  } catch (const std::exception& error) {
    const Ending ending = ending_of(error);
    log_error(ending.message);
    return static_cast<int>(ending.exit_code);
  }
}
