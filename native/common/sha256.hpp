// SHA-256 (FIPS 180-4), not optimized for speed. gdrkit uses it for the checksum of share handles, and the software
// twins use it to prove to each other that they have the same secret.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gdrkit {

class Sha256 {
public:
    static constexpr std::size_t block_bytes = 64;
    using Digest = std::array<std::uint8_t, 32>;

    void add(std::string_view bytes) noexcept {
        length_bytes_ += bytes.size();
        for (const char byte : bytes) {
            add_byte(static_cast<std::uint8_t>(byte));
        }
    }

    // Returns the digest of all added bytes. The object must not be used afterwards.
    [[nodiscard]] Digest finish() noexcept {
        // The padding: a one bit, zeros, and the length in bits.
        const std::uint64_t length_bits = length_bytes_ * 8;
        add_byte(0x80);
        while (filled_bytes_ != block_bytes - sizeof length_bits) {
            add_byte(0);
        }
        for (int shift = 56; shift >= 0; shift -= 8) {
            add_byte(static_cast<std::uint8_t>(length_bits >> shift));
        }
        Digest digest{};
        for (std::size_t index = 0; index < digest.size(); ++index) {
            digest[index] = static_cast<std::uint8_t>(state_[index / 4] >> (24 - 8 * (index % 4)));
        }
        return digest;
    }

private:
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static constexpr std::array<std::uint32_t, 64> round_constants = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

    void add_byte(std::uint8_t byte) noexcept {
        block_[filled_bytes_++] = byte;
        if (filled_bytes_ == block_bytes) {
            add_block();
            filled_bytes_ = 0;
        }
    }

    void add_block() noexcept {
        // The message schedule: the 16 words of the block, and 48 words that are computed from them.
        std::array<std::uint32_t, 64> words{};
        for (std::size_t index = 0; index < 16; ++index) {
            const std::uint8_t* const word_bytes = &block_[index * 4]; // In big-endian byte order.
            words[index] = std::uint32_t{word_bytes[0]} << 24 | std::uint32_t{word_bytes[1]} << 16 |
                           std::uint32_t{word_bytes[2]} << 8 | word_bytes[3];
        }
        for (std::size_t index = 16; index < 64; ++index) {
            const std::uint32_t word_15 = words[index - 15], word_2 = words[index - 2];
            const std::uint32_t sigma0 = std::rotr(word_15, 7) ^ std::rotr(word_15, 18) ^ (word_15 >> 3);
            const std::uint32_t sigma1 = std::rotr(word_2, 17) ^ std::rotr(word_2, 19) ^ (word_2 >> 10);
            words[index] = words[index - 16] + sigma0 + words[index - 7] + sigma1;
        }
        // FIPS 180-4 uses the names a to h, t1 and t2.
        auto [a, b, c, d, e, f, g, h] = state_;
        for (std::size_t index = 0; index < 64; ++index) {
            const std::uint32_t choice = (e & f) ^ (~e & g);
            const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
            const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice +
                                     round_constants[index] + words[index];
            const std::uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        const std::array<std::uint32_t, 8> working_variables = {a, b, c, d, e, f, g, h};
        for (std::size_t index = 0; index < working_variables.size(); ++index) {
            state_[index] += working_variables[index];
        }
    }

    // The hash value. It begins with the first 32 bits of the fractional parts of the square roots of the first 8
    // primes.
    std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<std::uint8_t, block_bytes> block_{};
    std::size_t filled_bytes_ = 0;
    std::uint64_t length_bytes_ = 0;
};

} // namespace gdrkit
