// Seconds spent in named phases ("load", "prefill", "halo wait"), summed over all their scopes. One rank's
// numbers; min/avg/max over ranks are taken from phases() by the caller. Phases may nest: each counts its own
// whole time, so a phase's time includes the phases inside it. For one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/clock.hpp"

namespace longhalo {

class PhaseTimer {
  struct Phase {
    std::string name;
    double seconds = 0;
    int64_t count = 0;
    int depth = 0;  // scopes open now; a phase inside itself is counted once
    Stopwatch watch;
  };

 public:
  class Scope {
   public:
    explicit Scope(Phase& phase) : phase_(phase) {
      if (phase_.depth++ == 0) phase_.watch.restart();
    }
    ~Scope() {
      if (--phase_.depth == 0) phase_.seconds += phase_.watch.seconds();
      ++phase_.count;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Phase& phase_;
  };

  /// Time until the returned scope ends counts for `name`: `const auto timing = timer.scope("prefill");`
  [[nodiscard]] Scope scope(std::string_view name) { return Scope(phase(name)); }
  /// Adds time that was measured elsewhere.
  void add(std::string_view name, double seconds) {
    Phase& to = phase(name);
    to.seconds += seconds;
    ++to.count;
  }
  /// 0 if there was no such phase.
  double seconds(std::string_view name) const {
    for (const Phase& phase : phases_) {
      if (phase.name == name) return phase.seconds;
    }
    return 0;
  }
  /// Closed scopes and add() calls of `name` so far.
  int64_t count(std::string_view name) const {
    for (const Phase& phase : phases_) {
      if (phase.name == name) return phase.count;
    }
    return 0;
  }
  /// Name and seconds of every phase in the order of first use (the same on every rank if the code path is).
  std::vector<std::pair<std::string, double>> phases() const {
    std::vector<std::pair<std::string, double>> result;
    for (const Phase& phase : phases_)
      result.emplace_back(phase.name, phase.seconds);
    return result;
  }
  void reset() { phases_.clear(); }  // no scope may be open

 private:
  Phase& phase(std::string_view name) {
    for (Phase& known : phases_) {
      if (known.name == name) return known;
    }
    Phase& added = phases_.emplace_back();
    added.name = name;
    return added;
  }

  std::deque<Phase> phases_;  // a deque: scopes keep references to its elements
};

}  // namespace longhalo
