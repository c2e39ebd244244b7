// Tests of the storage service's frame parser with the frames of suites/vectors, which the Python tests use too, and
// with randomly changed frames. No input may cause a read out of bounds, which the sanitizers detect, and every
// accepted frame must be valid.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>

#include "storage/crc32c.hpp"
#include "storage/parser.hpp"
#include "tests/check.hpp"

using namespace gdrkit::storage;

namespace {

using Bytes = std::vector<std::byte>;

// Returns whether the bytes are one valid frame.
bool is_valid_frame(const Bytes& frame) {
    if (frame.size() < sizeof(FrameHeader)) {
        return false;
    }
    const char* refusal_reason = nullptr;
    const auto header = parse_header(std::span(frame).first<sizeof(FrameHeader)>(), refusal_reason);
    if (!header) {
        CHECK(refusal_reason != nullptr);
        return false;
    }
    // The payload is copied into a vector of exactly its size, so that the sanitizers detect a read beyond its end.
    const Bytes payload(frame.begin() + sizeof(FrameHeader), frame.end());
    std::vector<Operation> operations;
    std::vector<Result> results;
    std::vector<HoleExtent> holes;
    const bool is_request = parse_operations(*header, payload, operations, refusal_reason);
    const bool is_reply = parse_results(*header, payload, results, holes, refusal_reason);
    CHECK(is_request == !operations.empty());
    CHECK(!(is_request && is_reply));
    for (const Operation& operation : operations) {
        CHECK(operation.opcode == 1 || operation.opcode == 2); // A read or a write.
        CHECK(operation.reserved0 == 0 && operation.reserved1 == 0);
    }
    const auto type = static_cast<FrameType>(header->type);
    const bool is_control = type == FrameType::control_request || type == FrameType::control_reply;
    const bool is_payload_intact =
        payload.size() == header->length && crc32c(payload.data(), payload.size()) == header->payload_crc32c;
    return is_request || is_reply || (is_control && is_payload_intact);
}

// Sets the CRCs of a changed frame. With the old CRCs, the parser would refuse nearly every changed frame, and the test
// would not reach its other checks.
void set_crcs(Bytes& frame) {
    if (frame.size() < sizeof(FrameHeader)) {
        return;
    }
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof header);
    header.payload_crc32c = crc32c(frame.data() + sizeof header, frame.size() - sizeof header);
    header.header_crc32c = crc32c(&header, offsetof(FrameHeader, header_crc32c));
    std::memcpy(frame.data(), &header, sizeof header);
}

// Checks the frames of a file, and returns the valid frames. The fields of a line are "right" or "wrong", a name,
// and the bytes of the frame in hexadecimal digits.
std::vector<Bytes> check_vectors(const char* path) {
    std::ifstream file(path);
    CHECK(file);
    std::vector<Bytes> valid_frames;
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string verdict, name, digits;
        if (line.empty() || line[0] == '#' || !(fields >> verdict >> name >> digits)) {
            continue;
        }
        Bytes frame;
        for (std::size_t index = 0; index + 1 < digits.size(); index += 2) {
            frame.push_back(static_cast<std::byte>(std::stoi(digits.substr(index, 2), nullptr, 16)));
        }
        if (is_valid_frame(frame) != (verdict == "right")) {
            std::fprintf(stderr, "%s: the parser's verdict differs from \"%s\"\n", name.c_str(), verdict.c_str());
            std::abort();
        }
        if (verdict == "right") {
            valid_frames.push_back(frame);
        }
    }
    CHECK(valid_frames.size() >= 4);
    return valid_frames;
}

} // namespace

int main() {
    // CMake defines GDRKIT_VECTORS as the path of suites/vectors/frames.txt.
    const std::vector<Bytes> valid_frames = check_vectors(GDRKIT_VECTORS);
    const char* const rounds_text = std::getenv("GDRKIT_FUZZ_ROUNDS");
    const long rounds_count = rounds_text == nullptr ? 200000 : std::atol(rounds_text);
    std::mt19937_64 random_number(1);
    long accepted_count = 0;
    for (long round = 0; round < rounds_count; ++round) {
        Bytes frame = valid_frames[random_number() % valid_frames.size()];
        for (std::uint64_t changes_left_count = random_number() % 4; changes_left_count != 0 && !frame.empty();
             --changes_left_count) {
            const std::size_t changed_index = random_number() % frame.size();
            switch (random_number() % 4) {
            case 0: // Flip one bit.
                frame[changed_index] ^= static_cast<std::byte>(1U << random_number() % 8);
                break;
            case 1: // Set one byte.
                frame[changed_index] = static_cast<std::byte>(random_number() % 2 == 0 ? 0xff : 0);
                break;
            case 2: // Cut the frame.
                frame.resize(changed_index);
                break;
            default: // Insert up to 64 equal bytes.
                frame.insert(frame.begin() + static_cast<std::ptrdiff_t>(changed_index), 1 + random_number() % 64,
                             std::byte(random_number()));
            }
        }
        if (random_number() % 8 != 0) {
            set_crcs(frame);
        }
        accepted_count += is_valid_frame(frame) ? 1 : 0;
    }
    std::printf("%ld changed frames, %ld of them still valid\n", rounds_count, accepted_count);
    CHECK(accepted_count > 0 && accepted_count < rounds_count);
}
