// The warps of a block of the Hopper kernel of attention's gradient that load: queries, d_out, and keys with
// values, each through barriers of its own.
#pragma once

#include "kernels/attention/hopper_backward_tiles.cuh"
#include "kernels/common/hopper.cuh"

namespace longhalo::hopper_backward {

// Whether all lanes have the same.
__device__ inline bool all_same(short2 range) {
  const int packed = static_cast<unsigned short>(range.x) | range.y << 16;
  return __all_sync(0xffffffff, packed == __shfl_sync(0xffffffff, packed, 0));
}

// Tells the warp that loads keys of an item, once it has read the one before.
template <class S>
__device__ void deal(SharedMemory<S>& shared, const Item& item, uint32_t phase, int lane) {
  hopper::mbarrier_wait(&shared.dealt_empty, phase ^ 1);
  __syncwarp();  // no lane is left to wait for a phase when the next one ends
  if (lane != 0) return;
  shared.dealt = item;
  hopper::mbarrier_arrive(&shared.dealt_full);
}

// Warp 0: the items, and of each step the queries, what they see, and what the step is for the other warps.
// What it knows of an item is read again at each step, for want of registers.
template <class S>
__device__ void produce_queries(const Parameters& p, SharedMemory<S>& shared, int lane) {
  Ring at;
  uint32_t phase = 0;
  Pace pace;
  Course& course = shared.course;
  for (Items items(p, lane); items.any(p); items.next(p, lane), phase ^= 1) {
    deal(shared, items.item, phase, lane);
    if (lane == 0) {
      course = course_of(p, items.item);
      items.in_rounds(p) ? pace.begin_round(p, items.round()) : pace.end(p);
    }
    __syncwarp();
    bool more = true;
    while (more) {
      const int row = course.tile * kQueryTile, last = min(row + kQueryTile, p.queries) - 1;
      const bool edge = row < course.full_begin || last >= course.full_end;
      // What queries see, found out before there is a place for it. It grows with them: all see the same if
      // the first and the last do.
      short2 first_half = {0, 0}, second_half = {0, 0};
#pragma unroll 1
      for (int look = edge ? 0 : 3; look < 3; ++look) {
        const int query = look == 0 ? lane == 0 ? row : last : min(row + 32 * (look - 1) + lane, last);
        const short2 seen = course.seen(p, query);
        if (look < 2) first_half = seen;
        if (look != 1) second_half = seen;
        if (look == 0 && all_same(seen)) break;
      }
      hopper::mbarrier_wait(&shared.q_empty[at.stage], at.phase ^ 1);
      if (edge) shared.seen[at.stage][lane] = first_half, shared.seen[at.stage][lane + 32] = second_half;
      __syncwarp();
      if (lane == 0) {
        uint64_t* const full = &shared.q_full[at.stage];
        constexpr int kFloats = kQueryTile * static_cast<int>(sizeof(float));
        const int head = course.head;
        shared.step[at.stage] = {(edge ? kEdge : 0) | course.next(), row / kQueryTile, head, 0};
        hopper::mbarrier_arrive_expect(full, S::kQueryBytes + 2 * kFloats);
#pragma unroll
        for (int part = 0; part < S::kDim / 64; ++part)
          hopper::tma_load(shared.q[at.stage] + part * kQueryTile * 128, &p.q, part * 64, head, row, full);
        const int64_t from = static_cast<int64_t>(head) * p.padded_queries + row;
        hopper::bulk_load(shared.lse_log2[at.stage], p.lse_log2 + from, kFloats, full);
        hopper::bulk_load(shared.delta[at.stage], p.delta + from, kFloats, full);
      } else {
        hopper::mbarrier_arrive(&shared.q_full[at.stage]);  // for what this lane wrote
      }
      __syncwarp();
      more = course.head <= course.last_head;
      at.next<S::kQueryStages>();
    }
  }
  deal(shared, {kNoBand, 0, 0, 0}, phase, lane);
  hopper::mbarrier_wait(&shared.q_empty[at.stage], at.phase ^ 1);
  if (lane == 0) {
    shared.step[at.stage].flags = kNoMore;
    pace.end(p);
  }
  hopper::mbarrier_arrive(&shared.q_full[at.stage]);
}

// Warp 2: d_out of the same steps.
template <class S>
__device__ void produce_d_out(const Parameters& p, SharedMemory<S>& shared, int lane) {
  Ring q, at;
  while (true) {
    hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
    const Step step = shared.step[q.stage];
    if (step.flags & kNoMore) return;
    __syncwarp();
    hopper::mbarrier_wait(&shared.out_empty[at.stage], at.phase ^ 1);
    hopper::mbarrier_arrive(&shared.q_empty[q.stage]);  // every lane has read the step
    if (lane == 0) {
      hopper::mbarrier_arrive_expect(&shared.out_full[at.stage], S::kQueryBytes);
#pragma unroll
      for (int part = 0; part < S::kDim / 64; ++part)
        hopper::tma_load(shared.d_out[at.stage] + part * kQueryTile * 128, &p.d_out, part * 64, step.head,
                         step.query_tile * kQueryTile, &shared.out_full[at.stage]);
    }
    __syncwarp();
    q.next<S::kQueryStages>();
    at.next<S::kOutStages>();
  }
}

// Warp 1: keys and values of the items.
template <class S>
__device__ void produce_keys(const Parameters& p, SharedMemory<S>& shared, int lane) {
  for (uint32_t phase = 0;; phase ^= 1) {
    hopper::mbarrier_wait(&shared.dealt_full, phase);
    const Item item = shared.dealt;
    hopper::mbarrier_arrive(&shared.dealt_empty);  // every lane has read it
    hopper::mbarrier_wait(&shared.keys_empty, phase ^ 1);
    if (lane == 0) {
      shared.item = item;
      hopper::mbarrier_arrive_expect(&shared.keys_full, item.band == kNoBand ? 0 : 2 * S::kKeyBytes);
#pragma unroll
      for (int part = 0; part < S::kDim / 64 && item.band != kNoBand; ++part) {
        const int offset = part * kKeyTile * 128, row = item.tile * kKeyTile;
        hopper::tma_load(shared.k + offset, &p.band[item.band].k, part * 64, item.kv_head, row,
                         &shared.keys_full);
        hopper::tma_load(shared.v + offset, &p.band[item.band].v, part * 64, item.kv_head, row,
                         &shared.keys_full);
      }
    }
    __syncwarp();
    if (item.band == kNoBand) return;
  }
}

}  // namespace longhalo::hopper_backward
