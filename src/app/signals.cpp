#include "app/signals.hpp"

#include <array>
#include <atomic>
#include <cmath>
#include <csignal>

#include "app/job_end.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr std::array<int, 3> kSignals{SIGTERM, SIGUSR1, SIGUSR2};

std::atomic<bool> asked_to_stop_flag{false}, asked_to_save_flag{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may set it");

std::optional<double> reserve_seconds;
std::optional<JobEnd> job_end;

void on_signal(int number) {
  (number == SIGUSR1 ? asked_to_save_flag : asked_to_stop_flag) = true;
}

sigset_t all_signals() {
  sigset_t all;
  ::sigemptyset(&all);
  for (const int number : kSignals)
    ::sigaddset(&all, number);
  return all;
}

}  // namespace

void JobSignals::hold_back() {
  const sigset_t all = all_signals();
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
}

void JobSignals::let_through() {
  const sigset_t all = all_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
}

JobSignals::JobSignals(Say say) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // calls of libraries that do not expect signals go on
  ::sigemptyset(&action.sa_mask);
  asked_to_stop_flag = false;
  asked_to_save_flag = false;
  job_end.emplace(job_end_of_environment(say), reserve_seconds, now_seconds());
  for (const int number : kSignals)
    ::sigaction(number, &action, nullptr);
  let_through();
}

void JobSignals::reserve_before_end(std::optional<double> seconds) {
  reserve_seconds = seconds;
}

void JobSignals::saving_takes(double seconds) {
  if (job_end) job_end->saving_takes(seconds);
}

bool JobSignals::asked_to_stop() {
  const double now = now_seconds();
  // Said by every rank that sees it: clocks differ, and the one that sees it first stops them all.
  if (job_end && job_end->is_near(now) && !asked_to_stop_flag.exchange(true))
    log_info(text("the job's time is over in ", std::floor(job_end->left(now)), " s: stopping"));
  return asked_to_stop_flag;
}

bool JobSignals::has_stop_signal() {
  sigset_t waiting;
  return asked_to_stop_flag || (::sigpending(&waiting) == 0 && (::sigismember(&waiting, SIGTERM) == 1 ||
                                                                ::sigismember(&waiting, SIGUSR2) == 1));
}

bool JobSignals::take_asked_to_save() {
  return asked_to_save_flag.exchange(false);
}

}  // namespace longhalo
