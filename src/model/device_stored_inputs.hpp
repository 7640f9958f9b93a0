// The inputs of checkpointed layers [n, D] in bf16 on their way from the GPU to an activation store during
// the forward pass, and back, last layer first, during the backward pass (stored_inputs.hpp is the CPU's
// form). Bytes move on the device's copy stream beside compute: a layer's input while this layer and those
// after it run, up to the next one that is stored, and in the backward pass while the layers behind it go
// back.
//
// A fault of the store hits one rank; it is met by all of them together.
#pragma once

#include <cstdint>
#include <optional>

#include "comm/mpi_session.hpp"
#include "core/bfloat16.hpp"
#include "device/device.hpp"
#include "device/device_buffer.hpp"
#include "model/kept_layers.hpp"
#include "storage/activation_store.hpp"

namespace longhalo {

/// The layers whose inputs are stored, bf16.
ActivationShape device_stored_inputs_shape(const KeptLayers& layers, int64_t tokens, int64_t hidden);

class DeviceStoredInputs {
 public:
  /// `store` keeps `shape`. All arguments but the shape must outlive this.
  DeviceStoredInputs(const MpiSession& session, ActivationStore& store, Device& device,
                     const ActivationShape& shape);
  /// Waits until the store no longer reads what it was given.
  ~DeviceStoredInputs();
  DeviceStoredInputs(const DeviceStoredInputs&) = delete;
  DeviceStoredInputs& operator=(const DeviceStoredInputs&) = delete;

  /// Before a stored layer's kernels are queued, behind those that make its input.
  void mark();
  /// When they are queued, so that the copy runs beside them and beside what is queued later: takes its input
  /// and gives another array in its place, which may be written by kernels queued from now on. Waits until
  /// the one before is stored. Throws JointError. Collective.
  void put(int64_t layer, DeviceBuffer<BFloat16>& x);
  /// After the last layer: begins to read what backward wants first. Throws JointError. Collective.
  void turn();
  /// The input of a stored layer, those of later layers first, for kernels queued from now on; valid until
  /// the second take() after this one. Begins to read the one before it. Throws JointError. Collective.
  const BFloat16* take(int64_t layer);

  /// For which the host stood waiting for the store, or for other ranks to agree on its state.
  double seconds() const { return seconds_; }

 private:
  void finish_put();

  const MpiSession& session_;
  ActivationStore& store_;
  ActivationShape shape_;
  cudaStream_t compute_, copy_;
  bool registered_ = false;  // whether the store's memory is page-locked here
  std::optional<int> put_;   // a layer that the store may still be reading
  Event ready_[2], arrived_;
  int mark_ = 0;     // the newer of ready_
  Event queued_[2];  // on the compute stream, at the last two take()
  // [n, D]; in the forward pass [0] is free or being stored, in the backward pass both are inputs taken back.
  DeviceBuffer<BFloat16> arrays_[2];
  int turn_ = 0;
  double seconds_ = 0;
};

}  // namespace longhalo
