// Angles of the rotary embedding. The product position * frequency and its reduction to one turn are made in
// double, the cosine and sine of what remains in fp32: at position 10^7 the angle is exact to about 1e-8
// radians.
#pragma once

#include "kernels/common/bf16_vector.cuh"

namespace longhalo {

/// {cosine, sine} of position * frequency radians.
__device__ inline float2 turn_of(double position, double frequency) {
  constexpr double kTurnsPerRadian = 0.15915494309189533577;
  const double turns = position * frequency * kTurnsPerRadian;
  const auto rest = static_cast<float>(turns - rint(turns));
  float sine, cosine;
  sincospif(2 * rest, &sine, &cosine);
  return make_float2(cosine, sine);
}

/// Turns the pairs (first[i], second[i]) by {cosine[i], sine[i]}.
__device__ inline void turn_pairs(const float (&cosine)[8], const float (&sine)[8], float (&first)[8],
                                  float (&second)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float was = first[i];
    first[i] = was * cosine[i] - second[i] * sine[i];
    second[i] = second[i] * cosine[i] + was * sine[i];
  }
}

// A table of turns in shared memory holds for each token `half` cosines, then `half` sines. Eight
// neighbouring pairs are read as two 16-byte accesses; their halves stand apart so that neighbouring threads
// read neighbouring words.
__device__ inline int turn_slot(int pair, int half) {
  return pair % 8 / 4 * (half / 2) + pair / 8 * 4 + pair % 4;
}

/// Puts the turn of one pair into a token's part of the table.
__device__ inline void set_turn(float* token_turns, int pair, int half, float2 turn) {
  const int slot = turn_slot(pair, half);
  token_turns[slot] = turn.x;
  token_turns[half + slot] = turn.y;
}

/// Reads the turns of pairs 8 * column to 8 * column + 7.
__device__ inline void get_turns(const float* token_turns, int column, int half, float (&cosine)[8],
                                 float (&sine)[8]) {
  const auto* from = reinterpret_cast<const float4*>(token_turns);
  const int high = half / 8, sines = half / 4;
  const float4 c0 = from[column], c1 = from[column + high];
  const float4 s0 = from[column + sines], s1 = from[column + sines + high];
  cosine[0] = c0.x, cosine[1] = c0.y, cosine[2] = c0.z, cosine[3] = c0.w;
  cosine[4] = c1.x, cosine[5] = c1.y, cosine[6] = c1.z, cosine[7] = c1.w;
  sine[0] = s0.x, sine[1] = s0.y, sine[2] = s0.z, sine[3] = s0.w;
  sine[4] = s1.x, sine[5] = s1.y, sine[6] = s1.z, sine[7] = s1.w;
}

}  // namespace longhalo
