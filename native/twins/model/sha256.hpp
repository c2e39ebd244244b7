// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), by which two hosts of the TCP fabric prove that they have the same secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace gdrkit::twin {

using Sha256Digest = std::array<std::uint8_t, 32>;

// Return the digest of the concatenated parts.
Sha256Digest sha256(std::initializer_list<std::string_view> parts);

// Return the HMAC-SHA-256 of the concatenated parts.
Sha256Digest hmac_sha256(std::string_view key, std::initializer_list<std::string_view> parts);

// Compare in a time that does not depend on the content.
bool is_equal_digest(const Sha256Digest& first, const Sha256Digest& second);

// Return the bytes of a trivial object, to be hashed.
template <typename Object> std::string_view bytes_of(const Object& object) {
    return {reinterpret_cast<const char*>(&object), sizeof object};
}

} // namespace gdrkit::twin
