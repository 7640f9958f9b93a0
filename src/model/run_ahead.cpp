#include "model/run_ahead.hpp"

namespace longhalo {

void RunAhead::queued(int64_t work) {
  Event event = spare_.empty() ? Event() : std::move(spare_.back());
  if (!spare_.empty()) spare_.pop_back();
  event.record(stream_);
  portions_.push_back({work, std::move(event)});
  while (!portions_.empty() && (portions_.size() > most_ || portions_.front().done.done()))
    take_oldest();
}

void RunAhead::finish() {
  while (!portions_.empty())
    take_oldest();
}

void RunAhead::take_oldest() {
  portions_.front().done.synchronize();
  done_ += portions_.front().work;
  spare_.push_back(std::move(portions_.front().done));
  portions_.pop_front();
  if (report_) report_(done_);
}

}  // namespace longhalo
