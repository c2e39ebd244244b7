// Parsers for the frames of frames.hpp. They check every field, because the peer is untrusted.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "storage/frames.hpp"

namespace gdrkit::storage {

// Largest number of holes that a result reports. The server sends the bytes of further holes as zeros.
inline constexpr std::uint32_t holes_max = 4096;
// Largest average number of holes per result in one reply.
inline constexpr std::uint32_t holes_per_result_max = 64;
// Largest payload of an io_reply.
inline constexpr std::uint32_t reply_bytes_max =
    operations_max * (sizeof(Result) + holes_per_result_max * sizeof(HoleExtent));

// Returns the header that `bytes` contain. If it is invalid, returns nothing and sets `refusal_reason` to the reason (a
// static string).
std::optional<FrameHeader> parse_header(std::span<const std::byte, sizeof(FrameHeader)> bytes,
                                        const char*& refusal_reason);

// Parses the operations of an io_request. If an operation is invalid, returns false and sets `refusal_reason` to the
// reason. Does not check handles, indices of queue pairs and lengths, because only the session knows which are valid.
bool parse_operations(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Operation>& operations,
                      const char*& refusal_reason);

// Parses the results and hole extents of an io_reply. If one of them is invalid, returns false and sets
// `refusal_reason` to the reason.
bool parse_results(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Result>& results,
                   std::vector<HoleExtent>& holes, const char*& refusal_reason);

// Appends a frame (header with checksums, and payload) to `buffer`.
void append_frame(std::vector<std::byte>& buffer, FrameType type, std::uint32_t count, std::uint64_t sequence,
                  std::span<const std::byte> payload);

} // namespace gdrkit::storage
