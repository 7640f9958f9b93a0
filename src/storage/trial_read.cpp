#include "storage/trial_read.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

[[noreturn]] void be_child(double most_seconds, const std::function<void()>& read) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // What the parent does at a crash, a report on many lines, would say that the job crashed.
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGXCPU})
    ::signal(number, SIG_DFL);
  sigset_t none;  // a job that starts holds back the signals that ask it to stop
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const rlimit no_core{0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const auto seconds = static_cast<rlim_t>(std::ceil(most_seconds));
  const rlimit time{seconds, seconds + 1};
  ::setrlimit(RLIMIT_CPU, &time);
  const int nowhere = ::open("/dev/null", O_WRONLY);
  if (nowhere >= 0) {
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
  }
  try {
    read();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the parent meets the same and says it
  }
  ::_exit(0);
}

}  // namespace

void try_to_read(const std::filesystem::path& file, double most_seconds, const std::function<void()>& read) {
  const pid_t child = ::fork();
  if (child == 0) be_child(most_seconds, read);
  if (child < 0) {
    log_info(text(file.string(), " is read without a trial: ", std::strerror(errno)));
    return;
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return;  // someone else waits for all children of this process
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  const bool endless = WIFSIGNALED(status) && (WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL);
  throw UserError(text("the file is damaged: the library that reads it ",
                       endless ? "does not come to an end" : "crashes"),
                  file.string(), "make the file again, or take a whole copy");
}

}  // namespace longhalo
