#include "core/waiting.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/clock.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

struct Going {
  uint64_t number;
  const char* operation;
  std::vector<int> ranks;
  Stopwatch since;
};

struct Board {
  std::mutex mutex;
  uint64_t begun = 0;
  std::vector<Going> going;  // in the order of their beginnings
  std::string last;
  const char* unit = nullptr;
  int64_t number = 0, layer = -1;
  Stopwatch quiet;
  double deadline = 0, patience = 0;
  std::mutex health_mutex;
  std::vector<std::pair<const void*, std::function<std::string()>>> health;
};

// NOTE: never destroyed, because threads of libraries may still wait while the process leaves.
Board& board() {
  static auto* const all = new Board;
  return *all;
}

}  // namespace

void at_work(const char* unit, int64_t number) {
  Board& b = board();
  const std::scoped_lock lock(b.mutex);
  b.unit = unit, b.number = number, b.layer = -1;
  b.quiet.restart();
}

void at_layer(int64_t layer) {
  Board& b = board();
  const std::scoped_lock lock(b.mutex);
  b.layer = layer;
  b.quiet.restart();
}

Waiting::Waiting(const char* operation, std::span<const int> ranks) {
  Board& b = board();
  const std::scoped_lock lock(b.mutex);
  number_ = ++b.begun;
  b.going.push_back({number_, operation, {ranks.begin(), ranks.end()}, Stopwatch()});
  b.quiet.restart();
}

Waiting::~Waiting() {
  Board& b = board();
  const std::scoped_lock lock(b.mutex);
  const auto at = std::find_if(b.going.begin(), b.going.end(),
                               [this](const Going& going) { return going.number == number_; });
  if (at != b.going.end()) {
    b.last = text("#", at->number, ", ", at->operation);
    b.going.erase(at);
  }
  b.quiet.restart();
}

WorkState work_state() {
  Board& b = board();
  const std::scoped_lock lock(b.mutex);
  WorkState state;
  if (b.unit != nullptr) state.place = text(b.unit, " ", b.number);
  if (b.layer >= 0) state.place += text(state.place.empty() ? "" : ", ", "layer ", b.layer);
  if (!b.going.empty()) {
    const Going& first = b.going.front();
    state.longest = {first.number, first.operation, first.ranks, first.since.seconds()};
  }
  state.last = b.last;
  state.quiet_seconds = b.quiet.seconds();
  return state;
}

void set_deadline_seconds(double seconds) {
  const std::scoped_lock lock(board().mutex);
  board().deadline = seconds;
}

double deadline_seconds() {
  const std::scoped_lock lock(board().mutex);
  return board().deadline > 0 ? board().deadline + board().patience : 0;
}

MorePatience::MorePatience(double seconds) : seconds_(seconds) {
  const std::scoped_lock lock(board().mutex);
  board().patience += seconds_;
}

MorePatience::~MorePatience() {
  const std::scoped_lock lock(board().mutex);
  board().patience -= seconds_;
}

HealthCheck::HealthCheck(std::function<std::string()> fault) {
  const std::scoped_lock lock(board().health_mutex);
  board().health.emplace_back(this, std::move(fault));
}

HealthCheck::~HealthCheck() {
  const std::scoped_lock lock(board().health_mutex);
  std::erase_if(board().health, [this](const auto& check) { return check.first == this; });
}

std::string health_fault() {
  const std::scoped_lock lock(board().health_mutex);
  for (const auto& [owner, fault] : board().health)
    if (std::string words = fault(); !words.empty()) return words;
  return {};
}

}  // namespace longhalo
