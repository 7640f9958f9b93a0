// The warps of a block of the Hopper attention kernel that move data: queries and keys, with what queries see
// of tiles at an edge; values; results.
#pragma once

#include "kernels/attention/hopper_tiles.cuh"
#include "kernels/common/hopper.cuh"

namespace longhalo::hopper_attention {

// Loads 128 rows of keys or values of one head. In a cluster each block fetches its share of the rows for
// all.
template <class S>
__device__ void load_tile(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* barrier,
                          int block) {
  hopper::mbarrier_arrive_expect(barrier, S::kKeyBytes);
  constexpr int kRows = kKeyTile / S::kCluster;
  const int first = block * kRows;
#pragma unroll
  for (int part = 0; part < S::kDim / 64; ++part) {
    uint8_t* box = to + part * kKeyTile * 128 + first * 128;
    if constexpr (S::kCluster == 1)
      hopper::tma_load(box, map, part * 64, head, row, barrier);
    else
      hopper::tma_load_multicast(box, map, part * 64, head, row + first, barrier, (1 << S::kCluster) - 1);
  }
}

// What each query sees of a key tile, and each warpgroup.
template <class S>
__device__ void find_seen(const Parameters& p, const Item& item, const Cursor& at, EdgeTile<S>& edge,
                          int lane) {
  const BandSpan& span = item.span[at.band];
  const int first = span.begin + at.tile * kKeyTile;
  int blind = 0;  // bit w: some query of warpgroup w sees no key of the tile
#pragma unroll 1
  for (int row = lane; row < S::kQueryTile; row += 32) {
    const int own = min(row, p.queries - 1 - item.first_query);
    const int begin =
        row_begin(p, span, p.band[at.band].band.stride, p.band[at.band].first_key, item.first_query, own);
    const int end = row_end(span, own);
    const short2 seen = make_short2(static_cast<short>(min(max(begin - first, 0), kKeyTile)),
                                    static_cast<short>(min(max(end - first, 0), kKeyTile)));
    edge.seen[row] = seen;
    if (__any_sync(0xffffffff, seen.x >= seen.y)) blind |= 1 << row / 64;
  }
  __syncwarp();
  if (lane >= S::kConsumers) return;
  const short2 of_first = edge.seen[64 * lane], of_last = edge.seen[64 * lane + 63];  // both ends grow
  int view = 0;
  if (of_first.x >= kHalfTile)
    view |= kSecondHalf;
  else if (of_last.y <= kHalfTile)
    view |= kFirstHalf;
  if (of_last.x > 0 || of_first.y < kHalfTile) view |= kMaskFirst;
  if (of_last.x > kHalfTile || of_first.y < kKeyTile) view |= kMaskSecond;
  if (!(blind >> lane & 1)) view |= kAllSee;
  edge.view[lane] = view;
}

// Warp 0: works out what each item sees, and loads its queries and keys.
template <class S>
__device__ void produce_keys(const Parameters& p, SharedMemory<S>& shared, int lane, int block) {
  Ring q, k, edge;
  for (Items items(p); items.any(); items.next()) {
    Item& item = shared.item[q.stage];
    hopper::mbarrier_wait(&shared.q_empty[q.stage], q.phase ^ 1);
    const int first_query = (p.query_tiles - 1 - items.index / p.heads) * S::kQueryTile;
    const int head = items.index % p.heads;
    if (lane == 0) item.first_query = first_query, item.head = head;
    if (lane < p.bands)
      item.span[lane] = span_of(p, lane, first_query, min(S::kQueryTile, p.queries - first_query));
    __syncwarp();
    if (lane == 0) {
      bool nothing = true;
      for (int band = 0; band < p.bands; ++band)
        nothing = nothing && item.span[band].tiles == 0;
      if (nothing) {
        BandSpan& span = item.span[p.fallback_band];
        span.tiles = 1, span.begin = 0, span.full_to = 0;
      }
      hopper::mbarrier_arrive_expect(&shared.q_full[q.stage], S::kQueryBytes);
#pragma unroll
      for (int part = 0; part < S::kDim / 64; ++part)
        hopper::tma_load(shared.q[q.stage] + part * S::kQueryTile * 128, &p.q, part * 64, head, first_query,
                         &shared.q_full[q.stage]);
    } else {
      hopper::mbarrier_arrive(&shared.q_full[q.stage]);  // for what this lane wrote
    }
    __syncwarp();
    Cursor at;
    at.start(p, item);
    do {
      hopper::mbarrier_wait(&shared.k_empty[k.stage], k.phase ^ 1);
      if (lane == 0)
        load_tile<S>(shared.k[k.stage], &p.k[at.band], head / p.group,
                     item.span[at.band].begin + at.tile * kKeyTile, &shared.k_full[k.stage], block);
      if (at.edge(item)) {
        hopper::mbarrier_wait(&shared.edge_empty[edge.stage], edge.phase ^ 1);
        find_seen<S>(p, item, at, shared.edge[edge.stage], lane);
        hopper::mbarrier_arrive(&shared.edge_full[edge.stage]);  // for what this lane wrote
        edge.next<S::kEdgeStages>();
      }
      __syncwarp();
      k.next<S::kKeyStages>();
    } while (at.next(p, item));
    q.next<S::kQueryStages>();
  }
}

// Warp 1: loads the values of the same tiles.
template <class S>
__device__ void produce_values(const Parameters& p, SharedMemory<S>& shared, int lane, int block) {
  Ring q, v;
  for (Items items(p); items.any(); items.next()) {
    const Item& item = shared.item[q.stage];
    hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
    Cursor at;
    at.start(p, item);
    do {
      hopper::mbarrier_wait(&shared.v_empty[v.stage], v.phase ^ 1);
      if (lane == 0)
        load_tile<S>(shared.v[v.stage], &p.v[at.band], item.head / p.group,
                     item.span[at.band].begin + at.tile * kKeyTile, &shared.v_full[v.stage], block);
      __syncwarp();
      v.next<S::kValueStages>();
    } while (at.next(p, item));
    if (lane == 0) hopper::mbarrier_arrive(&shared.q_empty[q.stage]);
    q.next<S::kQueryStages>();
  }
}

// Warp 2: stores the results, which take the queries' place.
template <class S>
__device__ void store_output(const Parameters& p, SharedMemory<S>& shared, int lane) {
  Ring q;
  for (Items items(p); items.any(); items.next()) {
    hopper::mbarrier_wait(&shared.out_full[q.stage], q.phase);
    if (lane == 0) {
      const Item& item = shared.item[q.stage];
#pragma unroll
      for (int part = 0; part < S::kDim / 64; ++part)
        hopper::tma_store(&p.out, part * 64, item.head, item.first_query,
                          shared.q[q.stage] + part * S::kQueryTile * 128);
      hopper::bulk_commit();
      hopper::bulk_wait_read();
      hopper::mbarrier_arrive(&shared.q_empty[q.stage]);
    }
    __syncwarp();
    q.next<S::kQueryStages>();
  }
  if (lane == 0) hopper::bulk_wait();
}

}  // namespace longhalo::hopper_attention
