#include "model/device_stored_inputs.hpp"

#include "core/clock.hpp"
#include "core/error.hpp"

namespace longhalo {

ActivationShape device_stored_inputs_shape(const KeptLayers& layers, int64_t tokens, int64_t hidden) {
  ActivationShape shape{{}, tokens, hidden, ActivationType::kBfloat16};
  for (const int64_t layer : layers.all())
    shape.layers.push_back(static_cast<int>(layer));
  return shape;
}

DeviceStoredInputs::DeviceStoredInputs(const MpiSession& session, ActivationStore& store, Device& device,
                                       const ActivationShape& shape)
    : session_(session), store_(store), shape_(shape), compute_(device.compute()), copy_(device.copy()) {
  check(shape.type == ActivationType::kBfloat16, "activations on a GPU are bf16");
  for (DeviceBuffer<BFloat16>& buffer : arrays_)
    buffer = DeviceBuffer<BFloat16>(shape.tokens * shape.hidden, "the input of a layer", compute_);
  // Copies to memory that could not be locked are right, but slow.
  const std::span<std::byte> memory = store.transfer_memory();
  registered_ = !memory.empty() &&
                cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterDefault) == cudaSuccess;
  if (!registered_) cudaGetLastError();
}

DeviceStoredInputs::~DeviceStoredInputs() {
  try {
    if (put_) store_.finish_put(*put_);
  } catch (const std::exception&) {
    // Whoever destroys this in the middle of a step has an error of its own to tell.
  }
  if (registered_)
    log_cuda_failure(cudaHostUnregister(store_.transfer_memory().data()), "unlocking an activation store");
}

void DeviceStoredInputs::mark() {
  mark_ = 1 - mark_;  // the store may still wait for the mark before
  ready_[mark_].record(compute_);
}

void DeviceStoredInputs::put(int64_t layer, DeviceBuffer<BFloat16>& x) {
  finish_put();
  const Stopwatch watch;
  std::swap(x, arrays_[0]);
  session_.together([&] {
    put_ = static_cast<int>(layer);
    // On threads of the store too, several at a time: each has its own idea of which device is current.
    const int device = current_device_info().index;
    store_.put_from(*put_, [this, device, &ready = ready_[mark_]](int64_t offset, std::span<std::byte> into) {
      check_cuda(cudaSetDevice(device), "cudaSetDevice");
      ready.synchronize();
      copy_async(into.data(), reinterpret_cast<const std::byte*>(arrays_[0].data()) + offset,
                 static_cast<int64_t>(into.size()), copy_);
      wait_for_stream(copy_, "a layer's input, from this rank's GPU");
    });
  });
  seconds_ += watch.seconds();
}

void DeviceStoredInputs::finish_put() {
  if (!put_) return;
  const Stopwatch watch;
  const int layer = *put_;
  put_.reset();
  session_.together([&] { store_.finish_put(layer); });
  seconds_ += watch.seconds();
}

void DeviceStoredInputs::turn() {
  finish_put();
  session_.together([&] { store_.start_fetch(shape_.layers.back()); });
}

const BFloat16* DeviceStoredInputs::take(int64_t layer) {
  const Stopwatch watch;
  turn_ = 1 - turn_;
  BFloat16* const to = arrays_[turn_].data();
  // The layers that used this memory were queued before the last take(); those queued since use the other.
  queued_[1 - turn_].make_wait(copy_);
  queued_[turn_].record(compute_);
  session_.together([&] {
    store_.get_to(static_cast<int>(layer), [&](int64_t offset, std::span<const std::byte> from) {
      copy_async(reinterpret_cast<std::byte*>(to) + offset, from.data(), static_cast<int64_t>(from.size()),
                 copy_);
      wait_for_stream(copy_, "a layer's input, to this rank's GPU");
    });
    const int slot = shape_.slot_of(static_cast<int>(layer));
    if (slot > 0) store_.start_fetch(shape_.layers[static_cast<size_t>(slot - 1)]);
  });
  arrived_.record(copy_);
  arrived_.make_wait(compute_);
  seconds_ += watch.seconds();
  return to;
}

}  // namespace longhalo
