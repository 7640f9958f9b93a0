#include "model/stored_inputs.hpp"

#include <cstring>

#include "core/clock.hpp"

namespace longhalo {

ActivationShape stored_inputs_shape(const KeptLayers& layers, int64_t tokens, int64_t hidden) {
  ActivationShape shape{{}, tokens, hidden, ActivationType::kFloat32};
  for (const int64_t layer : layers.all())
    shape.layers.push_back(static_cast<int>(layer));
  return shape;
}

StoredInputs::StoredInputs(const MpiSession& session, ActivationStore& store, const KeptLayers& layers)
    : session_(session), store_(store), layers_(layers) {}

StoredInputs::~StoredInputs() {
  try {
    finish_put();
  } catch (const std::exception&) {
    // Whoever destroys this in the middle of a step has an error of its own to tell.
  }
}

void StoredInputs::finish_put() {
  if (!put_) return;
  const int layer = *put_;
  put_.reset();
  store_.finish_put(layer);
}

void StoredInputs::before_layer(int64_t layer, std::span<const float> x) {
  const bool stores = layers_.keeps(layer);
  if (!stores && !put_) return;
  const Stopwatch watch;
  session_.together([&] {
    finish_put();
    if (!stores) return;
    put_ = static_cast<int>(layer);
    store_.put_from(*put_, [bytes = std::as_bytes(x)](int64_t offset, std::span<std::byte> into) {
      std::memcpy(into.data(), bytes.data() + offset, into.size());
    });
  });
  seconds_ += watch.seconds();
}

void StoredInputs::turn() {
  const Stopwatch watch;
  session_.together([&] { store_.start_fetch(static_cast<int>(layers_.all().back())); });
  seconds_ += watch.seconds();
}

void StoredInputs::take(int64_t layer, std::span<float> x) {
  const Stopwatch watch;
  session_.together([&] {
    finish_put();
    store_.get(static_cast<int>(layer), std::as_writable_bytes(x));
    const int64_t slot = layers_.slot(layer);
    if (slot > 0) store_.start_fetch(static_cast<int>(layers_.all()[static_cast<size_t>(slot - 1)]));
  });
  seconds_ += watch.seconds();
}

}  // namespace longhalo
