#include "storage/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "storage/posix.hpp"

namespace longhalo {
namespace {

// The standard defines its constants as the first 32 bits of the fractional parts of the square roots of the
// first 8 primes and of the cube roots of the first 64. Computing them is shorter than listing them; both
// roots are taken as exact integers.
constexpr std::array<uint32_t, 64> first_primes() {
  std::array<uint32_t, 64> primes{};
  size_t found = 0;
  for (uint32_t candidate = 2; found < primes.size(); ++candidate) {
    bool prime = true;
    for (size_t i = 0; i < found; ++i)
      prime = prime && candidate % primes[i] != 0;
    if (prime) primes[found++] = candidate;
  }
  return primes;
}

__extension__ using Wide = unsigned __int128;

// floor(root(prime) * 2^32), by bisection, keeping the 32 bits after the point. power is 2 or 3.
constexpr uint32_t root_fraction(uint32_t prime, int power) {
  uint64_t low = 0;
  uint64_t high = uint64_t{1} << 37;  // every root is below 2^5
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    // Compare middle^power with prime * 2^(32 power); for the cube 37 * 3 = 111 bits suffice.
    Wide product = 1;
    for (int i = 0; i < power; ++i)
      product *= middle;
    (product <= (static_cast<Wide>(prime) << (32 * power)) ? low : high) = middle;
  }
  return static_cast<uint32_t>(low);
}

constexpr std::array<uint32_t, 8> initial_state() {
  std::array<uint32_t, 8> state{};
  for (size_t i = 0; i < state.size(); ++i)
    state[i] = root_fraction(first_primes()[i], 2);
  return state;
}

constexpr std::array<uint32_t, 64> round_constants() {
  const std::array<uint32_t, 64> primes = first_primes();
  std::array<uint32_t, 64> constants{};
  for (size_t i = 0; i < constants.size(); ++i)
    constants[i] = root_fraction(primes[i], 3);
  return constants;
}

const std::array<uint32_t, 64> kRound = round_constants();

}  // namespace

Sha256::Sha256() : state_(initial_state()) {}

void Sha256::compress(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) {
    uint32_t word;
    std::memcpy(&word, block + 4 * t, 4);
    w[t] = __builtin_bswap32(word);
  }
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = s1 + w[t - 7] + s0 + w[t - 16];
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> added{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i)
    state_[i] += added[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
  length_bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (filled_ == 0 && bytes.size() >= block_.size()) {
      compress(bytes.data());
      bytes = bytes.subspan(block_.size());
      continue;
    }
    const size_t taken = std::min(block_.size() - filled_, bytes.size());
    std::copy_n(bytes.begin(), taken, block_.begin() + static_cast<std::ptrdiff_t>(filled_));
    bytes = bytes.subspan(taken);
    filled_ += taken;
    if (filled_ == block_.size()) {
      compress(block_.data());
      filled_ = 0;
    }
  }
}

std::string Sha256::hex() {
  const uint64_t length_bits = length_bytes_ * 8;
  const std::byte one{0x80};
  update({&one, 1});
  const std::byte zero{0};
  while (filled_ != 56)
    update({&zero, 1});
  const uint64_t big_endian = __builtin_bswap64(length_bits);
  update(std::as_bytes(std::span(&big_endian, 1)));
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string result;
  for (const uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4)
      result += kDigits[(word >> shift) & 15u];
  }
  return result;
}

std::string sha256_of_text(std::string_view text) {
  Sha256 hash;
  hash.update(std::as_bytes(std::span(text.data(), text.size())));
  return hash.hex();
}

std::string sha256_of_file(const std::filesystem::path& file) {
  const InputFile input = open_input(file);
  std::vector<std::byte> block(size_t{1} << 20);
  Sha256 hash;
  for (int64_t at = 0; at < input.size_bytes;) {
    const auto part =
        std::span(block).first(std::min(block.size(), static_cast<size_t>(input.size_bytes - at)));
    read_exactly(input.descriptor, at, part, file);
    hash.update(part);
    at += static_cast<int64_t>(part.size());
  }
  return hash.hex();
}

}  // namespace longhalo
