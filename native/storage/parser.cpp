// Parses and checks received frames (headers, checksums, operations and results), and builds frames to send.
#include "storage/parser.hpp"

#include <cstring>

#include "storage/crc32c.hpp"

namespace gdrkit::storage {

namespace {

bool has_consistent_fields(const FrameHeader& header) {
    switch (static_cast<FrameType>(header.type)) {
    case FrameType::control_request:
    case FrameType::control_reply:
        return header.count == 0 && header.length != 0 && header.length <= control_bytes_max;
    case FrameType::io_request:
        return header.count != 0 && header.count <= operations_max && header.length == header.count * sizeof(Operation);
    case FrameType::io_reply:
        return header.sequence == 0 && header.count != 0 && header.count <= operations_max &&
               header.length <= reply_bytes_max && header.length >= header.count * sizeof(Result) &&
               (header.length - header.count * sizeof(Result)) % sizeof(HoleExtent) == 0;
    }
    return false;
}

// check_payload() and check_operation() return true, or set `refusal_reason` and return false.
bool check_payload(const FrameHeader& header, std::span<const std::byte> payload, const char*& refusal_reason) {
    if (payload.size() != header.length) {
        refusal_reason = "the length of the payload differs from the length in the header";
    } else if (crc32c(payload.data(), payload.size()) != header.payload_crc32c) {
        refusal_reason = "wrong checksum of the payload";
    } else {
        return true;
    }
    return false;
}

bool check_operation(const Operation& operation, const char*& refusal_reason) {
    constexpr unsigned read_flags = forbid_holes | checksum_wanted | report_holes;
    constexpr unsigned write_flags = checksum_given | checksum_wanted;
    unsigned allowed_flags = 0;
    switch (static_cast<Opcode>(operation.opcode)) {
    case Opcode::read:
        allowed_flags = read_flags;
        break;
    case Opcode::write:
        allowed_flags = write_flags;
        break;
    default:
        refusal_reason = "unknown opcode";
        return false;
    }
    if ((operation.flags & ~allowed_flags) != 0) {
        refusal_reason = "invalid flags of an operation";
    } else if (operation.reserved0 != 0 || operation.reserved1 != 0 ||
               (operation.checksum != 0 && (operation.flags & checksum_given) == 0)) {
        refusal_reason = "a reserved field of an operation, or a checksum without its flag, is not 0";
    } else {
        return true;
    }
    return false;
}

} // namespace

std::optional<FrameHeader> parse_header(std::span<const std::byte, sizeof(FrameHeader)> bytes,
                                        const char*& refusal_reason) {
    FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    if (header.header_crc32c != crc32c(bytes.data(), offsetof(FrameHeader, header_crc32c))) {
        refusal_reason = "wrong checksum of the header";
    } else if (header.magic != frame_magic || header.version != frame_version) {
        refusal_reason = "wrong magic or version";
    } else if (!has_consistent_fields(header)) {
        refusal_reason = "invalid combination of type, length, count and sequence";
    } else {
        return header;
    }
    return std::nullopt;
}

bool parse_operations(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Operation>& operations,
                      const char*& refusal_reason) {
    operations.clear();
    if (static_cast<FrameType>(header.type) != FrameType::io_request) {
        refusal_reason = "the frame has no operations";
        return false;
    }
    if (!check_payload(header, payload, refusal_reason)) {
        return false;
    }
    operations.resize(header.count);
    std::memcpy(operations.data(), payload.data(), payload.size());
    for (const Operation& operation : operations) {
        if (!check_operation(operation, refusal_reason)) {
            operations.clear();
            return false;
        }
    }
    return true;
}

bool parse_results(const FrameHeader& header, std::span<const std::byte> payload, std::vector<Result>& results,
                   std::vector<HoleExtent>& holes, const char*& refusal_reason) {
    results.clear();
    holes.clear();
    if (static_cast<FrameType>(header.type) != FrameType::io_reply) {
        refusal_reason = "the frame has no results";
        return false;
    }
    if (!check_payload(header, payload, refusal_reason)) {
        return false;
    }
    results.resize(header.count);
    const std::size_t results_bytes = header.count * sizeof(Result);
    std::memcpy(results.data(), payload.data(), results_bytes);
    holes.resize((payload.size() - results_bytes) / sizeof(HoleExtent));
    if (!holes.empty()) {
        std::memcpy(holes.data(), payload.data() + results_bytes, payload.size() - results_bytes);
    }
    std::size_t hole_index = 0; // Index in `holes`, which lists the holes of all results one after the other.
    for (const Result& result : results) {
        if ((result.flags & ~checksum_valid) != 0 || result.reserved != 0 || result.holes > holes_max ||
            result.holes > holes.size() - hole_index) {
            refusal_reason = "a field of a result is out of range";
            return false;
        }
        std::uint64_t previous_end = 0;
        for (std::uint32_t index = 0; index < result.holes; ++index, ++hole_index) {
            const HoleExtent& hole = holes[hole_index];
            const std::uint64_t read_bytes = result.result < 0 ? 0 : static_cast<std::uint64_t>(result.result);
            if (hole.length == 0 || hole.offset < previous_end || hole.offset > read_bytes ||
                hole.length > read_bytes - hole.offset) {
                refusal_reason = "a hole is empty, out of order or outside of its result";
                return false;
            }
            previous_end = hole.offset + hole.length;
        }
    }
    if (hole_index != holes.size()) {
        refusal_reason = "the number of hole extents differs from the sum of the numbers in the results";
        return false;
    }
    return true;
}

void append_frame(std::vector<std::byte>& buffer, FrameType type, std::uint32_t count, std::uint64_t sequence,
                  std::span<const std::byte> payload) {
    FrameHeader header{};
    header.magic = frame_magic;
    header.version = frame_version;
    header.type = static_cast<std::uint16_t>(type);
    header.length = static_cast<std::uint32_t>(payload.size());
    header.count = count;
    header.sequence = sequence;
    header.payload_crc32c = crc32c(payload.data(), payload.size());
    header.header_crc32c = crc32c(&header, offsetof(FrameHeader, header_crc32c));
    const auto* const header_bytes = reinterpret_cast<const std::byte*>(&header);
    buffer.insert(buffer.end(), header_bytes, header_bytes + sizeof header);
    buffer.insert(buffer.end(), payload.begin(), payload.end());
}

} // namespace gdrkit::storage
