// SHA-256 (FIPS 180-4), for the checksum of share handles. This implementation is not optimized for speed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gdrkit::usrbio {

std::array<std::uint8_t, 32> sha256(std::span<const std::uint8_t> message) noexcept;

} // namespace gdrkit::usrbio
