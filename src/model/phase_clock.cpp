#include "model/phase_clock.hpp"

namespace longhalo {
namespace {

constexpr size_t kMostMarks = 2048;  // more than the host runs ahead of the device (run_ahead.hpp)

}  // namespace

void PhaseClock::enter(Phase phase) {
  if (!marks_.empty() && marks_.back().phase == phase) return;
  if (marks_.size() == kMostMarks) take_oldest();
  Event event = spare_.empty() ? Event(Timing::kOn) : std::move(spare_.back());
  if (!spare_.empty()) spare_.pop_back();
  event.record(stream_);
  marks_.push_back({phase, std::move(event)});
  while (marks_.size() > 2 && marks_[1].event.done())
    take_oldest();
}

void PhaseClock::take_oldest() {
  marks_[1].event.synchronize();
  seconds_[static_cast<size_t>(marks_[0].phase)] += seconds_between(marks_[0].event, marks_[1].event);
  spare_.push_back(std::move(marks_.front().event));
  marks_.pop_front();
}

LayerTimes PhaseClock::times() {
  while (marks_.size() > 1)
    take_oldest();
  const auto of = [&](Phase phase) { return seconds_[static_cast<size_t>(phase)]; };
  return {of(Phase::kKeys), of(Phase::kQueries), of(Phase::kAttention), of(Phase::kMlp)};
}

}  // namespace longhalo
