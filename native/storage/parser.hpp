// Frames as they come from a network: each number is checked before it is used.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "storage/frames.hpp"

namespace gdrkit::storage {

inline constexpr std::uint32_t holes_max = 4096; // Of one operation; those after it arrive as zeros.
inline constexpr std::uint32_t reply_bytes_max = operations_max * (32 + 64 * 16);

// The header in these 32 bytes, or why it is none (a static sentence in `refusal`).
std::optional<FrameHeader> parse_header(std::span<const std::byte, sizeof(FrameHeader)> bytes, const char*& refusal);

// The operations of an io_request, all right in themselves, or why not. What only the session knows (handles, lanes,
// limits) is not looked at.
bool parse_operations(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Operation>& operations,
                      const char*& refusal);

// Results and hole extents of an io_reply.
bool parse_results(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Result>& results,
                   std::vector<HoleExtent>& holes, const char*& refusal);

// Appends a whole frame.
void append_frame(std::vector<std::byte>& out, FrameType type, std::uint32_t count, std::uint64_t sequence,
                  std::span<const std::byte> payload);

} // namespace gdrkit::storage
