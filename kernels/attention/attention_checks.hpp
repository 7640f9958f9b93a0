// What must hold of an attention problem before any key is read; both the kernel and its reference ask here.
#pragma once

#include "core/error.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_backward.hpp"

namespace longhalo {

inline constexpr int64_t kMaxHeadDim = 256;

/// Throws InvariantError on a problem that no caller may pose. Cost: O(bands).
template <class T>
void check_attention(const Attention<T>& p) {
  check(p.heads > 0 && p.kv_heads > 0 && p.heads % p.kv_heads == 0,
        "the number of query heads is a positive multiple of the number of KV heads");
  check(p.head_dim > 0 && p.head_dim % 8 == 0 && p.head_dim <= kMaxHeadDim,
        "the head dimension is a multiple of 8 up to 256");
  check(p.queries >= 0 && p.first_query >= 0, "query counts and positions are not negative");
  check(!p.bands.empty() && p.bands.size() <= static_cast<size_t>(kMaxBands), "attention takes 1 to 4 bands");
  for (const BandKeys<T>& keys : p.bands) {
    check(keys.band.stride >= 1 && keys.band.near >= 0 && keys.band.far >= 0,
          "a band has a stride of at least 1 and distances that are not negative");
    check(keys.count >= 0 && keys.first_key >= 0, "key counts and positions are not negative");
    check(keys.count == 0 || (keys.k != nullptr && keys.v != nullptr), "a band with keys has k and v");
  }
  check(p.queries == 0 || (p.q != nullptr && p.out != nullptr), "attention with queries has q and out");
}

template <class T>
void check_attention_gradient(const AttentionGradient<T>& gradient) {
  const Attention<T>& p = gradient.forward;
  check_attention(p);
  check(p.queries == 0 || (gradient.d_out != nullptr && gradient.dq != nullptr),
        "attention's gradient has d_out and dq");
  check(gradient.d_bands.size() == p.bands.size(), "attention's gradient has dk and dv for every band");
  for (size_t b = 0; b < p.bands.size(); ++b)
    check(p.bands[b].count == 0 || (gradient.d_bands[b].dk != nullptr && gradient.d_bands[b].dv != nullptr),
          "attention's gradient has dk and dv for every band");
}

}  // namespace longhalo
