// How the gradients of all parameters, laid one after the other, are cut into buckets that travel together,
// and which part of each bucket a rank owns. Pure arithmetic, no MPI.
//
// Every rank owns an equal part of EVERY bucket, not one long range: so all ranks receive while any bucket
// flies, and nobody waits for a single owner.
#pragma once

#include <cstdint>

namespace longhalo {

/// Half-open range of elements.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

class BucketPlan {
 public:
  /// elements >= 0, ranks >= 1, bucket_elements >= 1.
  BucketPlan(int64_t elements, int ranks, int64_t bucket_elements);

  int64_t buckets() const;
  ElementRange bucket(int64_t index) const;
  /// What `rank` owns of a bucket; parts of ranks follow each other and differ by at most one element.
  ElementRange part(int64_t index, int rank) const;
  /// Elements that `rank` owns in all buckets before `index`: where its part begins in its own arrays.
  int64_t owned_before(int64_t index, int rank) const;
  int64_t owned(int rank) const { return owned_before(buckets(), rank); }
  /// Buckets that are complete when the first `elements` elements are.
  int64_t complete_buckets(int64_t elements) const;

 private:
  int64_t elements_;
  int ranks_;
  int64_t bucket_elements_;
};

}  // namespace longhalo
