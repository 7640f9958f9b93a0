#include "doctor/doctor_patience.hpp"

#include <unistd.h>

#include <chrono>

#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr unsigned kAbortSeconds = 10;  // MPI itself may hang

}  // namespace

Patience::Patience(const MpiSession& session, double seconds)
    : session_(session), seconds_(seconds), watcher_([this] { watch(); }) {}

Patience::~Patience() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

void Patience::begin(const std::string& check) {
  {
    const std::lock_guard lock(mutex_);
    check_ = check;
    ++number_;
  }
  changed_.notify_all();
}

void Patience::watch() {
  std::unique_lock lock(mutex_);
  while (!over_) {
    const int number = number_;
    const bool moved = changed_.wait_for(lock, std::chrono::duration<double>(seconds_),
                                         [&] { return over_ || number_ != number; });
    if (!moved) give_up(check_);
  }
}

void Patience::give_up(const std::string& check) const {
  log_error(
      text("the check '", check, "' was not over after ", seconds_, " s\n  where:  rank ", session_.rank(),
           " on host ", session_.host(),
           "\n  remedy: the rank that is not heard of, or its host, hangs: leave it out (sbatch --exclude); "
           "doctor.patience_seconds is this limit"));
  ::alarm(kAbortSeconds);
  session_.abort(ExitCode::kUserError);
}

}  // namespace longhalo
