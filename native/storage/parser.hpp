// Parsers of frames from the network: each number is checked before it is used.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "storage/frames.hpp"

namespace gdrkit::storage {

inline constexpr std::uint32_t holes_max = 4096; // Holes of one operation; later holes arrive as zeros.
inline constexpr std::uint32_t reply_bytes_max = operations_max * (32 + 64 * 16);

// Returns the header in these 32 bytes, or sets `refusal` to the reason why it is invalid (a static string).
std::optional<FrameHeader> parse_header(std::span<const std::byte, sizeof(FrameHeader)> bytes, const char*& refusal);

// Parses the operations of an io_request and checks each by itself; `refusal` is the reason of a failure. Handles,
// lanes and limits, which only the session knows, are not checked.
bool parse_operations(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Operation>& operations,
                      const char*& refusal);

// Parses the results and hole extents of an io_reply.
bool parse_results(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Result>& results,
                   std::vector<HoleExtent>& holes, const char*& refusal);

// Appends a complete frame.
void append_frame(std::vector<std::byte>& out, FrameType type, std::uint32_t count, std::uint64_t sequence,
                  std::span<const std::byte> payload);

} // namespace gdrkit::storage
