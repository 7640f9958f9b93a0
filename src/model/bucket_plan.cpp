#include "model/bucket_plan.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace longhalo {

BucketPlan::BucketPlan(int64_t elements, int ranks, int64_t bucket_elements)
    : elements_(elements), ranks_(ranks), bucket_elements_(bucket_elements) {
  check(elements >= 0 && ranks >= 1 && bucket_elements >= 1,
        "a bucket plan has elements >= 0, ranks >= 1, bucket_elements >= 1");
}

int64_t BucketPlan::buckets() const {
  return (elements_ + bucket_elements_ - 1) / bucket_elements_;
}

ElementRange BucketPlan::bucket(int64_t index) const {
  return {index * bucket_elements_, std::min(elements_, (index + 1) * bucket_elements_)};
}

ElementRange BucketPlan::part(int64_t index, int rank) const {
  const ElementRange whole = bucket(index);
  const int64_t each = whole.size() / ranks_, more = whole.size() % ranks_;
  const int64_t begin = whole.begin + rank * each + std::min<int64_t>(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

int64_t BucketPlan::owned_before(int64_t index, int rank) const {
  if (index == 0) return 0;
  // All buckets but the last are alike.
  return (index - 1) * part(0, rank).size() + part(index - 1, rank).size();
}

int64_t BucketPlan::complete_buckets(int64_t elements) const {
  check(elements >= 0 && elements <= elements_, "there are so many elements");
  return elements == elements_ ? buckets() : elements / bucket_elements_;
}

}  // namespace longhalo
