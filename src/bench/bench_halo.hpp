// What `longhalo bench halo` measures, for host and for device memory: every rank sends to the one on its
// right and receives from the one on its left, all at once and without wrap-around, as halos travel in a
// layer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/bench_report.hpp"
#include "comm/mpi_session.hpp"
#include "config/config.hpp"

namespace longhalo {

/// Who this rank exchanges with in a turn; -1 is nobody.
struct HaloTurn {
  int to = -1, from = -1;
};
/// Even turns go right, odd ones left.
HaloTurn halo_turn(const MpiSession& session, int64_t turn);

/// One transport at work.
struct HaloWay {
  std::string transport;
  /// Exchanges `bytes` with the neighbours in turns 0 .. turns - 1 and waits for the end. What came from the
  /// left lies apart from what came from the right.
  std::function<void(int64_t bytes, int64_t turns)> exchange;
  std::function<void()> poison;              // the memory that receives
  std::function<bool(int64_t bytes)> right;  // has what both neighbours sent arrived?
};

/// Bytes of the longest message.
int64_t halo_bytes(const Config::Bench& bench);
/// What `rank` sends: random bytes that tell ranks and places apart. A shorter message is its beginning.
std::vector<uint8_t> halo_pattern(int rank, int64_t bytes);

BenchTable halo_table();

/// Throws UserError (on all ranks) when there is one rank alone. Collective.
void require_neighbours(const MpiSession& session);

/// Throws UserError (on all ranks) where a host has no memory for what its ranks send, receive and compare
/// with. Collective.
void require_halo_memory(const MpiSession& session, const Config::Bench& bench);

/// A row a message size from 8 bytes on. Returns whether everything arrived on every rank. Collective.
bool measure_halo(const MpiSession& session, const Config::Bench& bench, const HaloWay& way,
                  BenchTable& table);

}  // namespace longhalo
