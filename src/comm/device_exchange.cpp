#include "comm/device_exchange.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

uint8_t* row(void* rows, int64_t index, int64_t row_bytes) {
  return static_cast<uint8_t*>(rows) + index * row_bytes;
}

}  // namespace

void Handover::begin(cudaStream_t compute, cudaStream_t communication) {
  check(!in_flight_, "a transfer is waited for before it starts again");
  in_flight_ = true;
  ready_.record(compute);
  ready_.make_wait(communication);
  if (timing_ == Timing::kOff) return;
  collect_finished();
  if (spare_.empty()) {
    turns_.emplace_back();
  } else {
    turns_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  turns_.back().begun.record(communication);
}

void Handover::end(cudaStream_t communication) {
  // First, so that whoever is past done_ is past this, too.
  if (timing_ == Timing::kOn) turns_.back().done.record(communication);
  done_.record(communication);
}

void Handover::make_wait(cudaStream_t compute) {
  check(in_flight_, "a transfer is started before it is waited for");
  in_flight_ = false;
  if (timing_ == Timing::kOn) turns_.back().reached.record(compute);
  done_.make_wait(compute);
}

// Takes the times of the turns that the device is past; those of a turn in flight are not all recorded yet.
void Handover::collect_finished() {
  while (turns_.size() > (in_flight_ ? 1 : 0) && turns_.front().done.done() &&
         turns_.front().reached.done()) {
    Turn& turn = turns_.front();
    transfer_seconds_ += seconds_between(turn.begun, turn.done);
    exposed_seconds_ += std::max(0.0, seconds_between(turn.reached, turn.done));
    spare_.push_back(std::move(turn));
    turns_.pop_front();
  }
}

void Handover::collect(CommCost& cost) {
  check(!in_flight_, "the cost of transfers is asked for when they are waited for");
  if (!turns_.empty()) {
    turns_.back().done.synchronize();
    turns_.back().reached.synchronize();
  }
  collect_finished();
  cost.transfer_seconds += std::exchange(transfer_seconds_, 0);
  cost.exposed_seconds += std::exchange(exposed_seconds_, 0);
}

DeviceHaloExchange::DeviceHaloExchange(Transport& transport, HaloPlan plan, int64_t row_bytes, Timing timing)
    : transport_(transport), plan_(std::move(plan)), row_bytes_(row_bytes), handover_(timing) {
  check(row_bytes >= 1, "a row has at least one byte");
}

void DeviceHaloExchange::start(void* rows, int64_t first, StreamHandle compute, StreamHandle communication) {
  const auto messages = [&](const std::vector<RowTransfer>& transfers, int64_t& bytes) {
    std::vector<DeviceMessage> all;
    for (const RowTransfer& transfer : transfers) {
      all.push_back({transfer.peer, row(rows, transfer.range.begin - first, row_bytes_),
                     transfer.range.size() * row_bytes_});
      bytes += all.back().bytes;
    }
    return all;
  };
  const std::vector<DeviceMessage> receives = messages(plan_.receives, cost_.received_bytes);
  const std::vector<DeviceMessage> sends = messages(plan_.sends, cost_.sent_bytes);
  handover_.begin(compute, communication);
  transport_.exchange(sends, receives, communication);
  handover_.end(communication);
}

void DeviceHaloExchange::make_wait(StreamHandle compute) {
  handover_.make_wait(compute);
}

CommCost DeviceHaloExchange::cost() {
  handover_.collect(cost_);
  return cost_;
}

DeviceLandmarkGather::DeviceLandmarkGather(Transport& transport, const ShardPlan& shards, int64_t stride,
                                           int64_t row_bytes, Timing timing)
    : transport_(transport),
      own_(shards.segments(transport.rank(), stride)),
      segments_(shards.tokens() / stride),
      handover_(timing) {
  check(shards.ranks() == transport.ranks(), "every rank has its shard");
  int64_t next = 0;
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    const TokenRange range = shards.segments(rank, stride);
    const int64_t count = range.empty() ? 0 : range.size();
    check(count == 0 || range.begin == next, "the segments of all ranks follow each other without gaps");
    parts_.push_back({next * row_bytes, count * row_bytes});
    next += count;
  }
  check(next == segments_, "every complete segment has an owner");
}

void DeviceLandmarkGather::start(void* rows, StreamHandle compute, StreamHandle communication) {
  handover_.begin(compute, communication);
  const int64_t sent = transport_.sent_bytes(), received = transport_.received_bytes();
  transport_.all_gather(rows, parts_, communication);
  cost_.sent_bytes += transport_.sent_bytes() - sent;
  cost_.received_bytes += transport_.received_bytes() - received;
  handover_.end(communication);
}

void DeviceLandmarkGather::make_wait(StreamHandle compute) {
  handover_.make_wait(compute);
}

CommCost DeviceLandmarkGather::cost() {
  handover_.collect(cost_);
  return cost_;
}

DeviceRowBroadcast::DeviceRowBroadcast(Transport& transport, const ShardPlan& shards, TokenRange range,
                                       int64_t row_bytes, Timing timing)
    : transport_(transport),
      range_(range),
      parts_(rows_by_owner(shards, range)),
      row_bytes_(row_bytes),
      handover_(timing) {
  check(shards.ranks() == transport.ranks(), "every rank has its shard");
}

void DeviceRowBroadcast::start(const void* own, int64_t own_first, void* all, StreamHandle compute,
                               StreamHandle communication) {
  handover_.begin(compute, communication);
  const int64_t sent = transport_.sent_bytes(), received = transport_.received_bytes();
  for (const RowTransfer& part : parts_) {
    uint8_t* const target = row(all, part.range.begin - range_.begin, row_bytes_);
    const int64_t bytes = part.range.size() * row_bytes_;
    if (part.peer == transport_.rank())
      check_cuda(
          cudaMemcpyAsync(target, row(const_cast<void*>(own), part.range.begin - own_first, row_bytes_),
                          static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, communication),
          "copying on the GPU");
    transport_.broadcast(target, bytes, part.peer, communication);
  }
  cost_.sent_bytes += transport_.sent_bytes() - sent;
  cost_.received_bytes += transport_.received_bytes() - received;
  handover_.end(communication);
}

void DeviceRowBroadcast::make_wait(StreamHandle compute) {
  handover_.make_wait(compute);
}

CommCost DeviceRowBroadcast::cost() {
  handover_.collect(cost_);
  return cost_;
}

}  // namespace longhalo
