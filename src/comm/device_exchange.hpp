// Halo, landmarks and context in DEVICE memory, moved beside compute: start() hands over from the compute
// stream to the communication stream by an event, make_wait() hands back. The host never waits.
//
//   halo.start(rows, first, compute, communication);   // after the kernels that fill this rank's rows
//   ... kernels of the interior queries ...
//   halo.make_wait(compute);                           // before the kernels that read the halo
//
// A row is keys AND values of one token or landmark, row_bytes = 2 * H_kv * d * sizeof(BFloat16), [2, H_kv,
// d]; rows of consecutive tokens lie one after the other in ONE buffer, so a halo arrives in place in front
// of the shard.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "comm/comm_cost.hpp"
#include "comm/halo_plan.hpp"
#include "comm/transport.hpp"
#include "device/stream.hpp"

namespace longhalo {

/// The hand-over between the two streams, and its clock. With Timing::kOn each turn is timed on the device:
/// the transfer (which includes waiting for a peer that is late), and how long the compute stream stood still
/// for it.
class Handover {
 public:
  explicit Handover(Timing timing) : timing_(timing) {}

  /// Makes `communication` wait for what `compute` has queued so far; the transfer is queued after it.
  void begin(cudaStream_t compute, cudaStream_t communication);
  /// Ends what begin() began.
  void end(cudaStream_t communication);
  /// Makes `compute` wait for the transfer. Once a turn.
  void make_wait(cudaStream_t compute);
  /// Adds the seconds of all turns since the last call to `cost`; waits for the device to be past them.
  void collect(CommCost& cost);

 private:
  struct Turn {
    Event begun{Timing::kOn}, done{Timing::kOn}, reached{Timing::kOn};
  };
  void collect_finished();

  Timing timing_;
  bool in_flight_ = false;
  Event ready_, done_;
  std::deque<Turn> turns_;   // in order; the last may still be in flight
  std::vector<Turn> spare_;  // events are reused
  double transfer_seconds_ = 0, exposed_seconds_ = 0;
};

class DeviceHaloExchange {
 public:
  DeviceHaloExchange(Transport& transport, HaloPlan plan, int64_t row_bytes, Timing timing = Timing::kOff);

  const HaloPlan& plan() const { return plan_; }
  /// `rows` [halo | own, row_bytes]: its row 0 is token `first`. Until `compute` is past make_wait(), the
  /// halo must not be read and the shard not be changed. Sends and receives along the plan; where the plan is
  /// empty nothing is queued but events.
  void start(void* rows, int64_t first, StreamHandle compute, StreamHandle communication);
  void make_wait(StreamHandle compute);
  /// Bytes so far; seconds of all turns so far with Timing::kOn, when the device is past them.
  CommCost cost();

 private:
  Transport& transport_;
  HaloPlan plan_;
  int64_t row_bytes_;
  Handover handover_;
  CommCost cost_;
};

class DeviceLandmarkGather {
 public:
  /// One band of `stride` tokens a segment.
  DeviceLandmarkGather(Transport& transport, const ShardPlan& shards, int64_t stride, int64_t row_bytes,
                       Timing timing = Timing::kOff);

  int64_t segments() const { return segments_; }  // G: complete segments of the whole sequence
  TokenRange own() const { return own_; }         // this rank's segments

  /// `rows` [G, row_bytes]; this rank has filled rows own(). Collective. Untouched until `compute` is past
  /// make_wait().
  void start(void* rows, StreamHandle compute, StreamHandle communication);
  void make_wait(StreamHandle compute);
  CommCost cost();

 private:
  Transport& transport_;
  TokenRange own_;
  int64_t segments_ = 0;
  std::vector<ByteRange> parts_;  // by rank
  Handover handover_;
  CommCost cost_;
};

/// The context at the end of a prefill: the rows of a token range on EVERY rank, each part from its owner.
class DeviceRowBroadcast {
 public:
  DeviceRowBroadcast(Transport& transport, const ShardPlan& shards, TokenRange range, int64_t row_bytes,
                     Timing timing = Timing::kOff);

  /// `own`: this rank's rows, row 0 is token `own_first`. `all` [range.size(), row_bytes] receives the range.
  /// Collective. Neither must be touched until `compute` is past make_wait().
  void start(const void* own, int64_t own_first, void* all, StreamHandle compute, StreamHandle communication);
  void make_wait(StreamHandle compute);
  CommCost cost();

 private:
  Transport& transport_;
  TokenRange range_;
  std::vector<RowTransfer> parts_;
  int64_t row_bytes_;
  Handover handover_;
  CommCost cost_;
};

}  // namespace longhalo
