// Implements HMAC-SHA-256.

#include "model/hmac.hpp"

#include <algorithm>

#include "common/sha256.hpp"

namespace gdrkit::twin {
namespace {

constexpr std::size_t block_bytes = Sha256::block_bytes;

HmacDigest sha256(std::string_view first_part, std::initializer_list<std::string_view> parts) {
    Sha256 hash;
    hash.add(first_part);
    for (const std::string_view part : parts) {
        hash.add(part);
    }
    return hash.finish();
}

} // namespace

HmacDigest hmac_sha256(std::string_view key, std::initializer_list<std::string_view> parts) {
    std::array<char, block_bytes> padded_key{};
    if (key.size() > block_bytes) {
        const HmacDigest key_digest = sha256(key, {});
        std::copy(key_digest.begin(), key_digest.end(), padded_key.begin());
    } else {
        std::copy(key.begin(), key.end(), padded_key.begin());
    }
    // 0x36 and 0x5c are the bytes of ipad and opad in RFC 2104.
    std::array<char, block_bytes> inner_key{}, outer_key{};
    for (std::size_t index = 0; index < block_bytes; ++index) {
        inner_key[index] = static_cast<char>(padded_key[index] ^ 0x36);
        outer_key[index] = static_cast<char>(padded_key[index] ^ 0x5c);
    }
    const HmacDigest inner_digest = sha256(bytes_of(inner_key), parts);
    return sha256(bytes_of(outer_key), {bytes_of(inner_digest)});
}

bool is_equal_digest(const HmacDigest& first, const HmacDigest& second) {
    unsigned difference = 0;
    for (std::size_t index = 0; index < first.size(); ++index) {
        difference |= static_cast<unsigned>(first[index] ^ second[index]);
    }
    return difference == 0;
}

} // namespace gdrkit::twin
