// The inputs of checkpointed layers [n, D] on their way to an activation store during the forward pass, and
// back, last layer first, during the backward pass. Layers 0, every, 2 * every, ... are stored.
//
// A fault of the store (full disk, damaged bytes) hits one rank; it is met by all of them together, between
// two layers, where no message is on its way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "comm/mpi_session.hpp"
#include "model/kept_layers.hpp"
#include "storage/activation_store.hpp"

namespace longhalo {

/// The layers whose inputs are stored, fp32.
ActivationShape stored_inputs_shape(const KeptLayers& layers, int64_t tokens, int64_t hidden);

class StoredInputs {
 public:
  /// `store` keeps stored_inputs_shape(). Both must outlive this.
  StoredInputs(const MpiSession& session, ActivationStore& store, const KeptLayers& layers);
  /// Waits until the store no longer reads what it was given.
  ~StoredInputs();
  StoredInputs(const StoredInputs&) = delete;
  StoredInputs& operator=(const StoredInputs&) = delete;

  /// Before each layer of the forward pass, with its input. Where that is stored, `x` must not change before
  /// the next call. Throws JointError. Collective.
  void before_layer(int64_t layer, std::span<const float> x);
  /// After the last layer: begins to read what backward wants first. Throws JointError. Collective.
  void turn();
  /// The input of a stored layer, those of later layers first; begins to read the one before it. Throws
  /// JointError. Collective.
  void take(int64_t layer, std::span<float> x);

  /// For which this rank stood waiting for the store, or for other ranks to agree on its state.
  double seconds() const { return seconds_; }

 private:
  void finish_put();

  const MpiSession& session_;
  ActivationStore& store_;
  KeptLayers layers_;
  std::optional<int> put_;  // a layer that the store may still be reading
  double seconds_ = 0;
};

}  // namespace longhalo
