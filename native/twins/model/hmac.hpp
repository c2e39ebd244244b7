// HMAC-SHA-256 (RFC 2104), by which two hosts of the TCP fabric prove that they have the same secret.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace gdrkit::twin {

using HmacDigest = std::array<std::uint8_t, 32>;

// Return the HMAC-SHA-256 of the concatenated parts.
HmacDigest hmac_sha256(std::string_view key, std::initializer_list<std::string_view> parts);

// Compare in a time that does not depend on the content.
bool is_equal_digest(const HmacDigest& first, const HmacDigest& second);

// Return the bytes of a trivial object, to be hashed.
template <typename Object> std::string_view bytes_of(const Object& object) {
    return {reinterpret_cast<const char*>(&object), sizeof object};
}

} // namespace gdrkit::twin
