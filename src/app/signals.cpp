#include "app/signals.hpp"

#include <array>
#include <atomic>
#include <csignal>

namespace longhalo {
namespace {

constexpr std::array<int, 3> kSignals{SIGTERM, SIGUSR1, SIGUSR2};

std::atomic<bool> asked_to_stop_flag{false}, asked_to_save_flag{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may set it");

std::array<struct sigaction, kSignals.size()> actions_before;

void on_signal(int number) {
  (number == SIGUSR1 ? asked_to_save_flag : asked_to_stop_flag) = true;
}

}  // namespace

JobSignals::JobSignals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // calls of libraries that do not expect signals go on
  ::sigemptyset(&action.sa_mask);
  asked_to_stop_flag = false;
  asked_to_save_flag = false;
  for (size_t i = 0; i < kSignals.size(); ++i)
    ::sigaction(kSignals[i], &action, &actions_before[i]);
}

JobSignals::~JobSignals() {
  for (size_t i = 0; i < kSignals.size(); ++i)
    ::sigaction(kSignals[i], &actions_before[i], nullptr);
}

bool JobSignals::asked_to_stop() {
  return asked_to_stop_flag;
}

bool JobSignals::take_asked_to_save() {
  return asked_to_save_flag.exchange(false);
}

}  // namespace longhalo
