#include "model/device_optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "core/waiting.hpp"
#include "device/nvtx.hpp"
#include "kernels/adamw/adamw_step.hpp"
#include "kernels/elementwise/elementwise.hpp"

namespace longhalo {
namespace {

enum class Which { kMatrices, kVectors };

bool is(const DeviceParameter& parameter, Which which) {
  return (parameter.matrix != nullptr) == (which == Which::kMatrices);
}

int64_t padded(const DeviceParameter& parameter) {
  return (parameter.size + 7) / 8 * 8;
}

// Elements of such parameters in front of element `at` of a section: where it stands when they alone lie one
// after the other.
int64_t before(const DeviceSection& section, int64_t at, Which which) {
  int64_t elements = 0;
  for (const DeviceParameter& parameter : section.parameters)
    if (is(parameter, which)) elements += std::clamp<int64_t>(at - parameter.at, 0, padded(parameter));
  return elements;
}

// What a rank owns of a section of `size` elements, but for the last ranks' shorter parts.
int64_t part_size(int64_t size, int ranks) {
  return ((size + ranks - 1) / ranks + 7) / 8 * 8;
}

}  // namespace

DeviceOptimizer::DeviceOptimizer(const DeviceRoom& room, const MpiSession& session,
                                 DeviceGradients& gradients, const AdamWOptions& options)
    : room_(room),
      session_(session),
      gradients_(gradients),
      options_(options),
      compute_(room.device.compute()),
      communication_(room.device.communication()),
      ready_(gradients.sections().size()),
      free_(gradients.sections().size()),
      norm_(1, "the norm of gradients", compute_),
      norm_workspace_(kSquaredNormBytes, "the norm of gradients", compute_) {
  check(session.rank() == room.transport.rank() && session.ranks() == room.transport.ranks(),
        "transport and session are those of the same ranks");
  const auto sections = static_cast<int64_t>(gradients.sections().size());
  int64_t most_part = 0, most_matrices = 0, most_vectors = 0;
  owned_before_.push_back(0);
  for (int64_t s = 0; s < sections; ++s) {
    const DeviceSection& section = gradients.sections()[static_cast<size_t>(s)];
    owned_before_.push_back(owned_before_.back() + part(s, session.rank()).size());
    most_part = std::max(most_part, part_size(section.size, session.ranks()));
    most_matrices = std::max(most_matrices, before(section, section.size, Which::kMatrices));
    most_vectors = std::max(most_vectors, before(section, section.size, Which::kVectors));
  }
  const int64_t owned = owned_before_.back();
  master_ = DeviceBuffer<float>(owned, "master weights", compute_);
  m_ = DeviceBuffer<float>(owned, "first moments", compute_);
  v_ = DeviceBuffer<float>(owned, "second moments", compute_);
  sums_ = DeviceBuffer<float>(owned, "summed gradients", compute_);
  arrived_ = DeviceBuffer<float>((session.ranks() - 1) * most_part, "gradients of other ranks", compute_);
  matrices_ = DeviceBuffer<BFloat16>(most_matrices, "new weights", compute_);
  vectors_ = DeviceBuffer<float>(most_vectors, "new weights", compute_);
  for (DeviceBuffer<float>* state : {&master_, &m_, &v_})
    if (owned > 0)
      check_cuda(cudaMemsetAsync(state->data(), 0, static_cast<size_t>(state->bytes()), compute_),
                 "clearing an optimizer's state");
  for (int64_t s = 0; s < sections; ++s)
    for_each_owned(s, [&](const DeviceParameter& parameter, int64_t at, int64_t count, int64_t own) {
      const int64_t first = at - parameter.at;
      owned_.push_back({{parameter.flat + first, parameter.flat + first + count}, own});
      if (parameter.matrix != nullptr)
        convert(compute_, count, parameter.matrix + first, master_.data() + own);
      else
        copy_async(master_.data() + own, parameter.vector + first, count, compute_);
    });
}

ElementRange DeviceOptimizer::part(int64_t section, int rank) const {
  const int64_t size = gradients_.sections()[static_cast<size_t>(section)].size;
  const int64_t one = part_size(size, session_.ranks());
  return {std::min(size, rank * one), std::min(size, (rank + 1) * one)};
}

template <class Visit>
void DeviceOptimizer::for_each_owned(int64_t section, const Visit& visit) const {
  const ElementRange own = part(section, session_.rank());
  for (const DeviceParameter& parameter : gradients_.sections()[static_cast<size_t>(section)].parameters) {
    const int64_t begin = std::max(own.begin, parameter.at);
    const int64_t end = std::min(own.end, parameter.at + parameter.size);
    if (begin < end)
      visit(parameter, begin, end - begin, owned_before_[static_cast<size_t>(section)] + begin - own.begin);
  }
}

OptimizerLayout DeviceOptimizer::layout() const {
  OptimizerLayout layout{{}, owned_};
  for (const DeviceSection& section : gradients_.sections()) {
    const int64_t begin = layout.elements();
    layout.groups.push_back({begin, begin});
    for (const DeviceParameter& parameter : section.parameters)
      layout.groups.back().end += parameter.size;
  }
  return layout;
}

void DeviceOptimizer::begin_step() {
  if (!sums_.empty())
    check_cuda(cudaMemsetAsync(sums_.data(), 0, static_cast<size_t>(sums_.bytes()), compute_),
               "clearing summed gradients");
}

SectionHooks DeviceOptimizer::hooks() {
  return {[this](int64_t section) { begin(section); }, [this](int64_t section) { reduce(section); }};
}

void DeviceOptimizer::begin(int64_t section) {
  // Whoever had this memory before, the same section of the sequence before included. An event that was never
  // recorded is not waited for.
  for (size_t s = 0; s < free_.size(); ++s)
    if (gradients_.section(static_cast<int64_t>(s)) == gradients_.section(section))
      free_[s].make_wait(compute_);
  gradients_.clear_section(section, compute_);
}

void DeviceOptimizer::reduce(int64_t section) {
  const NvtxRange range("reduction of gradients");
  const int self = session_.rank(), ranks = session_.ranks();
  const ElementRange own = part(section, self);
  float* const values = gradients_.section(section);
  std::vector<DeviceMessage> sends, receives;
  std::vector<const float*> parts;
  float* to = arrived_.data();
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) {
      parts.push_back(values + own.begin);
      continue;
    }
    const ElementRange theirs = part(section, peer);
    sends.push_back({peer, values + theirs.begin, theirs.size() * int64_t{sizeof(float)}});
    receives.push_back({peer, to, own.size() * int64_t{sizeof(float)}});
    cost_.sent_bytes += sends.back().bytes;
    cost_.received_bytes += receives.back().bytes;
    parts.push_back(to);
    to += own.size();
  }
  Event& ready = ready_[static_cast<size_t>(section)];
  ready.record(compute_);
  ready.make_wait(communication_);
  if (ranks > 1) room_.transport.exchange(sends, receives, communication_);
  for (const float* from : parts)
    add(communication_, own.size(), from, sums_.data() + owned_before_[static_cast<size_t>(section)]);
  free_[static_cast<size_t>(section)].record(communication_);
}

double DeviceOptimizer::finish_gradients() {
  for (const Event& event : free_)
    event.make_wait(compute_);
  squared_norm(compute_, sums_.size(), sums_.data(), norm_.data(), norm_workspace_.data());
  const Waiting waiting("the norm of the gradient");
  double own = 0;
  to_host<double>({&own, 1}, norm_.data(), compute_);
  room_.transport.check_health();
  std::vector<double> squares(static_cast<size_t>(session_.ranks()));
  check_mpi(MPI_Allgather(&own, 1, MPI_DOUBLE, squares.data(), 1, MPI_DOUBLE, session_.comm()),
            "MPI_Allgather");
  double sum = 0;
  for (const double one : squares)
    sum += one;
  return std::sqrt(sum);
}

void DeviceOptimizer::update(double learning_rate, double gradient_scale) {
  const NvtxRange range("optimizer");
  ++steps_;
  AdamWStep step{options_.beta1, options_.beta2, options_.epsilon, learning_rate, 0, steps_, gradient_scale};
  for (int64_t s = 0; s < static_cast<int64_t>(free_.size()); ++s) {
    const DeviceSection& section = gradients_.sections()[static_cast<size_t>(s)];
    for_each_owned(s, [&](const DeviceParameter& parameter, int64_t at, int64_t count, int64_t own) {
      step.weight_decay = parameter.decay == Decay::kYes ? options_.weight_decay : 0;
      const bool matrix = parameter.matrix != nullptr;
      adamw_step(compute_, step, count, sums_.data() + own, master_.data() + own, m_.data() + own,
                 v_.data() + own,
                 matrix ? matrices_.data() + before(section, at, Which::kMatrices) : nullptr);
      if (!matrix)
        copy_async(vectors_.data() + before(section, at, Which::kVectors), master_.data() + own, count,
                   compute_);
    });
    share_section(s);
  }
}

void DeviceOptimizer::restore(int64_t steps) {
  steps_ = steps;
  for (int64_t s = 0; s < static_cast<int64_t>(free_.size()); ++s) {
    const DeviceSection& section = gradients_.sections()[static_cast<size_t>(s)];
    for_each_owned(s, [&](const DeviceParameter& parameter, int64_t at, int64_t count, int64_t own) {
      if (parameter.matrix != nullptr)
        convert(compute_, count, master_.data() + own,
                matrices_.data() + before(section, at, Which::kMatrices));
      else
        copy_async(vectors_.data() + before(section, at, Which::kVectors), master_.data() + own, count,
                   compute_);
    });
    share_section(s);
  }
}

void DeviceOptimizer::share_section(int64_t index) {
  const DeviceSection& section = gradients_.sections()[static_cast<size_t>(index)];
  if (session_.ranks() > 1) {
    Event& ready = ready_[static_cast<size_t>(index)];
    ready.record(compute_);
    ready.make_wait(communication_);
    for (const Which which : {Which::kMatrices, Which::kVectors}) {
      const int64_t bytes = which == Which::kMatrices ? sizeof(BFloat16) : sizeof(float);
      std::vector<ByteRange> parts;
      for (int rank = 0; rank < session_.ranks(); ++rank) {
        const ElementRange theirs = part(index, rank);
        const int64_t first = before(section, theirs.begin, which), end = before(section, theirs.end, which);
        parts.push_back({first * bytes, (end - first) * bytes});
      }
      void* const data = which == Which::kMatrices ? static_cast<void*>(matrices_.data()) : vectors_.data();
      const int64_t sent = room_.transport.sent_bytes(), received = room_.transport.received_bytes();
      room_.transport.all_gather(data, parts, communication_);
      cost_.sent_bytes += room_.transport.sent_bytes() - sent;
      cost_.received_bytes += room_.transport.received_bytes() - received;
    }
    Event& done = free_[static_cast<size_t>(index)];
    done.record(communication_);
    done.make_wait(compute_);
  }
  for (const DeviceParameter& parameter : section.parameters) {
    if (parameter.matrix != nullptr)
      copy_async(parameter.matrix, matrices_.data() + before(section, parameter.at, Which::kMatrices),
                 parameter.size, compute_);
    else
      copy_async(parameter.vector, vectors_.data() + before(section, parameter.at, Which::kVectors),
                 parameter.size, compute_);
  }
}

}  // namespace longhalo
