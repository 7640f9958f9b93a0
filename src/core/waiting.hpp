// What this process is at and what it waits for: told by the job as it goes on, read by the watchdog's thread
// (comm/watchdog.hpp), which says it when nothing moves any more. Any thread may call any of this.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace longhalo {

/// The job begins step or document `number`; `unit` is a literal, "step".
void at_work(const char* unit, int64_t number);
/// It computes this layer, or queues it on a GPU.
void at_layer(int64_t layer);

/// While one exists, its thread stands still until other ranks, or this rank's GPU, have done their part.
class Waiting {
 public:
  /// `operation` is a literal: "a halo". `ranks`: whom it waits for; empty is all, or nobody in particular.
  explicit Waiting(const char* operation, std::span<const int> ranks = {});
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  uint64_t number_;
};

struct WorkState {
  struct Wait {
    uint64_t number = 0;  // operations of this process, counted from 1
    const char* operation = "";
    std::vector<int> ranks;
    double seconds = 0;
  };
  std::string place;            // "step 12, layer 5", or empty
  std::optional<Wait> longest;  // of those that go on, the one that began first
  std::string last;             // "#7, a halo": the operation that ended last, or empty
  double quiet_seconds = 0;     // since an operation began or ended, a layer or a step began
};
WorkState work_state();

/// For how long a rank may wait; 0 is for ever. The one setting of the process, run.deadline_seconds.
void set_deadline_seconds(double seconds);
/// With what work in progress adds to it.
double deadline_seconds();

/// While one exists, ranks may wait for `seconds` longer: one of them does for all what may take that, such
/// as writing a model. The same on all ranks.
class MorePatience {
 public:
  explicit MorePatience(double seconds);
  ~MorePatience();
  MorePatience(const MorePatience&) = delete;
  MorePatience& operator=(const MorePatience&) = delete;

 private:
  double seconds_;
};

/// While one exists, the watchdog asks now and then what is wrong; anything but an empty text ends the job.
class HealthCheck {
 public:
  explicit HealthCheck(std::function<std::string()> fault);
  ~HealthCheck();
  HealthCheck(const HealthCheck&) = delete;
  HealthCheck& operator=(const HealthCheck&) = delete;
};

/// What the checks say is wrong; empty where nothing is.
std::string health_fault();

}  // namespace longhalo
