// Implements SHA-256 and HMAC.

#include "model/sha256.hpp"

#include <algorithm>
#include <bit>

namespace gdrkit::twin {
namespace {

constexpr std::size_t block_bytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> round_constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
public:
    void add(std::string_view bytes) {
        length_bytes_ += bytes.size();
        for (const char byte : bytes) {
            add_byte(static_cast<std::uint8_t>(byte));
        }
    }

    Sha256Digest finish() {
        const std::uint64_t length_bits = length_bytes_ * 8;
        add_byte(0x80);
        while (filled_bytes_ != block_bytes - sizeof length_bits) {
            add_byte(0);
        }
        for (int shift = 56; shift >= 0; shift -= 8) {
            add_byte(static_cast<std::uint8_t>(length_bits >> shift));
        }
        Sha256Digest digest;
        for (std::size_t index = 0; index < digest.size(); ++index) {
            digest[index] = static_cast<std::uint8_t>(state_[index / 4] >> (24 - index % 4 * 8));
        }
        return digest;
    }

private:
    void add_byte(std::uint8_t byte) {
        block_[filled_bytes_++] = byte;
        if (filled_bytes_ == block_bytes) {
            compress();
            filled_bytes_ = 0;
        }
    }

    void compress() {
        std::array<std::uint32_t, 64> schedule{};
        for (std::size_t index = 0; index < 16; ++index) {
            const std::uint8_t* const word = &block_[index * 4];
            schedule[index] = std::uint32_t{word[0]} << 24 | std::uint32_t{word[1]} << 16 |
                              std::uint32_t{word[2]} << 8 | std::uint32_t{word[3]};
        }
        for (std::size_t index = 16; index < 64; ++index) {
            const std::uint32_t near_word = schedule[index - 2], far_word = schedule[index - 15];
            schedule[index] = schedule[index - 16] + schedule[index - 7] +
                              (std::rotr(far_word, 7) ^ std::rotr(far_word, 18) ^ far_word >> 3) +
                              (std::rotr(near_word, 17) ^ std::rotr(near_word, 19) ^ near_word >> 10);
        }
        auto [a, b, c, d, e, f, g, h] = state_;
        for (std::size_t index = 0; index < 64; ++index) {
            const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                        ((e & f) ^ (~e & g)) + round_constants[index] + schedule[index];
            const std::uint32_t second =
                (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g;
            g = f;
            f = e;
            e = d + first;
            d = c;
            c = b;
            b = a;
            a = first + second;
        }
        const std::array<std::uint32_t, 8> sums = {a, b, c, d, e, f, g, h};
        for (std::size_t index = 0; index < sums.size(); ++index) {
            state_[index] += sums[index];
        }
    }

    // The first 32 bits of the fractional parts of the square roots of the first 8 primes.
    std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<std::uint8_t, block_bytes> block_{};
    std::size_t filled_bytes_ = 0;
    std::uint64_t length_bytes_ = 0;
};

} // namespace

Sha256Digest sha256(std::initializer_list<std::string_view> parts) {
    Sha256 hash;
    for (const std::string_view part : parts) {
        hash.add(part);
    }
    return hash.finish();
}

Sha256Digest hmac_sha256(std::string_view key, std::initializer_list<std::string_view> parts) {
    std::array<char, block_bytes> padded_key{};
    if (key.size() > block_bytes) {
        const Sha256Digest key_digest = sha256({key});
        std::copy(key_digest.begin(), key_digest.end(), padded_key.begin());
    } else {
        std::copy(key.begin(), key.end(), padded_key.begin());
    }
    std::array<char, block_bytes> inner_key{}, outer_key{};
    for (std::size_t index = 0; index < block_bytes; ++index) {
        inner_key[index] = static_cast<char>(padded_key[index] ^ 0x36);
        outer_key[index] = static_cast<char>(padded_key[index] ^ 0x5c);
    }
    Sha256 inner;
    inner.add({inner_key.data(), inner_key.size()});
    for (const std::string_view part : parts) {
        inner.add(part);
    }
    const Sha256Digest inner_digest = inner.finish();
    return sha256({{outer_key.data(), outer_key.size()}, bytes_of(inner_digest)});
}

bool is_equal_digest(const Sha256Digest& first, const Sha256Digest& second) {
    unsigned difference = 0;
    for (std::size_t index = 0; index < first.size(); ++index) {
        difference |= static_cast<unsigned>(first[index] ^ second[index]);
    }
    return difference == 0;
}

} // namespace gdrkit::twin
