#include "model/device_gradient_return.hpp"

#include "kernels/elementwise/elementwise.hpp"

namespace longhalo {
namespace {

int64_t rows_of(const std::vector<RowTransfer>& transfers) {
  int64_t rows = 0;
  for (const RowTransfer& transfer : transfers)
    rows += transfer.range.size();
  return rows;
}

}  // namespace

DeviceGradientReturn::DeviceGradientReturn(Transport& transport, ReturnPlan plan, int64_t row_elements,
                                           cudaStream_t compute)
    : transport_(transport),
      plan_(std::move(plan)),
      row_elements_(row_elements),
      arrived_(rows_of(plan_.receives) * row_elements, "gradients of keys from other ranks", compute) {}

void DeviceGradientReturn::start(float* rows, int64_t first, cudaStream_t compute,
                                 cudaStream_t communication) {
  const int64_t row_bytes = row_elements_ * int64_t{sizeof(float)};
  std::vector<DeviceMessage> sends, receives;
  for (const RowTransfer& send : plan_.sends) {
    sends.push_back(
        {send.peer, rows + (send.range.begin - first) * row_elements_, send.range.size() * row_bytes});
    cost_.sent_bytes += sends.back().bytes;
  }
  float* to = arrived_.data();
  for (const RowTransfer& receive : plan_.receives) {
    receives.push_back({receive.peer, to, receive.range.size() * row_bytes});
    cost_.received_bytes += receives.back().bytes;
    to += receive.range.size() * row_elements_;
  }
  handover_.begin(compute, communication);
  if (!sends.empty() || !receives.empty()) transport_.exchange(sends, receives, communication);
  handover_.end(communication);
}

void DeviceGradientReturn::add(float* rows, int64_t first, cudaStream_t compute) {
  handover_.make_wait(compute);
  const float* from = arrived_.data();
  for (const RowTransfer& receive : plan_.receives) {
    const int64_t elements = receive.range.size() * row_elements_;
    longhalo::add(compute, elements, from, rows + (receive.range.begin - first) * row_elements_);
    from += elements;
  }
}

CommCost DeviceGradientReturn::cost() {
  handover_.collect(cost_);
  return cost_;
}

}  // namespace longhalo
