#include "comm/watchdog.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

constexpr double kMostBetweenLooks = 1, kLeastBetweenLooks = 0.02;
constexpr double kStandstillSeconds = 1;  // of this process itself
constexpr std::chrono::milliseconds kOthersSpeak(1500);
// Hosts are asked whether they are there when a wait has become suspicious, and not for longer than this.
constexpr double kAsksAfterShare = 0.25, kLongestAsking = 30;

std::string rounded(double seconds) {
  return text(seconds < 10 ? std::round(10 * seconds) / 10 : std::round(seconds), " s");
}

std::string place_of(const WorkState& state) {
  return state.place.empty() ? std::string("before the first step") : state.place;
}

}  // namespace

Watchdog::Watchdog(int rank, std::string host, std::function<bool()> told_to_end)
    : rank_(rank), host_(std::move(host)), told_to_end_(std::move(told_to_end)) {
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    Stopwatch awake, since_look;
    while (true) {
      const double deadline = deadline_seconds();
      const std::chrono::duration<double> between(
          deadline > 0 ? std::clamp(deadline / 20, kLeastBetweenLooks, kMostBetweenLooks)
                       : kMostBetweenLooks);
      if (wake_.wait_for(lock, between, [this] { return is_over_; })) return;
      // Stopped, or the machine was: what it waited for may have come long ago.
      if (since_look.seconds() > between.count() + kStandstillSeconds) awake.restart();
      since_look.restart();
      if (deadline > 0) look(deadline, awake.seconds());
    }
  });
}

Watchdog::~Watchdog() {
  {
    const std::scoped_lock lock(mutex_);
    is_over_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Watchdog::look(double deadline, double awake_seconds) {
  WorkState state = work_state();
  state.quiet_seconds = std::min(state.quiet_seconds, awake_seconds);
  const double waited = state.longest ? std::min(state.longest->seconds, awake_seconds) : 0;
  if (waited > std::max(kAsksAfterShare * deadline, deadline - kLongestAsking))
    peers_.ask();
  else
    peers_.stop_asking();
  if (waited > deadline)
    end(text("nothing moves: waited ", rounded(state.longest->seconds), " for ",
             names_of(state.longest->ranks), " in operation #", state.longest->number, ", ",
             state.longest->operation, "; ", place_of(state)),
        deadline);
  if (const std::string fault = health_fault(); !fault.empty())
    end(text(fault, "; ", place_of(state),
             state.longest ? text(", in operation #", state.longest->number, ", ", state.longest->operation)
                           : std::string()),
        deadline);
  // Another rank's end, perhaps for want of this one: who stands still says where.
  if (!has_spoken_ && told_to_end_() && state.quiet_seconds > std::max(deadline / 4, 1.0)) {
    has_spoken_ = true;
    log_error(text("told to end at ", place_of(state), ", where nothing has moved for ",
                   rounded(state.quiet_seconds),
                   state.longest ? text(": waiting for ", names_of(state.longest->ranks), " in operation #",
                                        state.longest->number, ", ", state.longest->operation)
                                 : text(": computing, or at a file",
                                        state.last.empty() ? "" : "; its last operation was ", state.last),
                   place()));
  }
}

void Watchdog::set_rank(int rank, JobHosts hosts) {
  const std::scoped_lock lock(mutex_);
  rank_ = rank;
  peers_.set_hosts(std::move(hosts));
}

std::string Watchdog::names_of(const std::vector<int>& ranks) const {
  return ranks.empty() ? "the other ranks or this rank's device" : peers_.hosts().name_ranks(ranks);
}

std::string Watchdog::place() const {
  const std::string network = peers_.describe();
  return text("\n  where:  ", rank_ < 0 ? std::string("a rank") : text("rank ", rank_), " on host ", host_,
              network.empty() ? "" : "\n  network: ", network);
}

void Watchdog::end(const std::string& words, double deadline) const {
  log_error(text(words, place(),
                 "\n  remedy: look at the ranks that say nothing like this, and at the network between them; "
                 "run.deadline_seconds is how long a rank may wait, here ",
                 rounded(deadline),
                 " with what work in progress adds. A training job goes on "
                 "from its last checkpoint with output.if_exists: resume"));
  std::this_thread::sleep_for(kOthersSpeak);  // a launcher ends the others as soon as the first has left
  std::_Exit(static_cast<int>(ExitCode::kHung));
}

}  // namespace longhalo
