// Tests of share handles (share_handle.hpp) with the test vectors in suites/vectors, which the tests of the Python
// implementation also use; and tests of two parts of a handle, the SHA-256 checksum and the identity of a process.
#include "usrbio/client/share_handle.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "common/sha256.hpp"
#include "tests/check.hpp"

namespace gdrkit::usrbio {
namespace {

std::vector<std::uint8_t> parse_hex(const std::string& text) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t index = 0; text != "-" && index < text.size(); index += 2) {
        bytes.push_back(static_cast<std::uint8_t>(std::stoul(text.substr(index, 2), nullptr, 16)));
    }
    return bytes;
}

// One line of share_handles.txt. The words of a line are: the format ("share", or "gdr" for the older handle without
// offset, version and checksum), the verdict ("good" or "bad"), the name of the vector, the bytes of the handle in
// hexadecimal digits ("-": no bytes), and the fields as NAME=VALUE.
struct TestVector {
    std::string format, verdict, name;
    std::vector<std::uint8_t> bytes;
    std::map<std::string, std::string> fields;

    [[nodiscard]] std::uint64_t to_number(const char* field_name) const { return std::stoull(fields.at(field_name)); }
    template <std::size_t size> std::array<std::uint8_t, size> to_array(const char* field_name) const {
        const auto field_bytes = parse_hex(fields.at(field_name));
        CHECK_EQUAL(field_bytes.size(), size);
        std::array<std::uint8_t, size> array{};
        std::ranges::copy(field_bytes, array.begin());
        return array;
    }
};

std::vector<TestVector> read_vectors() {
    std::ifstream file(GDRKIT_VECTORS "/share_handles.txt");
    std::vector<TestVector> vectors;
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') {
            continue;
        }
        std::istringstream words(line);
        TestVector vector;
        std::string hex_text, field;
        words >> vector.format >> vector.verdict >> vector.name >> hex_text;
        vector.bytes = parse_hex(hex_text);
        while (words >> field) {
            const auto separator = field.find('=');
            vector.fields[field.substr(0, separator)] = field.substr(separator + 1);
        }
        vectors.push_back(vector);
    }
    return vectors;
}

ShareHandle make_share_handle(const TestVector& vector) {
    ShareHandle handle;
    handle.kind = static_cast<ShareKind>(vector.to_number("kind"));
    handle.allocation_bytes = vector.to_number("allocation_bytes");
    handle.offset_bytes = vector.to_number("offset_bytes");
    handle.length_bytes = vector.to_number("length_bytes");
    handle.address = vector.to_number("address");
    handle.chunk_bytes = vector.to_number("chunk_bytes");
    handle.descriptor_count = static_cast<std::uint32_t>(vector.to_number("descriptor_count"));
    handle.device_uuid = vector.to_array<16>("device_uuid");
    handle.owner.boot_id = vector.to_array<16>("boot_id");
    handle.owner.process_id = static_cast<std::uint32_t>(vector.to_number("process_id"));
    handle.owner.pid_namespace = static_cast<std::uint32_t>(vector.to_number("namespace"));
    handle.owner.started_ticks = vector.to_number("started_ticks");
    handle.ipc = vector.to_array<64>("ipc");
    return handle;
}

GpuIpcHandle make_gpu_ipc_handle(const TestVector& vector) {
    return {vector.to_array<64>("ipc"), vector.to_number("length_bytes"), vector.to_number("device")};
}

// Checks that `parse` accepts exactly the good handles, and that parsing and packing a good handle restore its fields
// and bytes.
template <typename Handle, typename Parse>
void check_vector(const TestVector& vector, Handle (*make_handle)(const TestVector&), Parse parse) {
    const auto parsed_handle = parse(vector.bytes);
    const bool is_valid = vector.verdict == "good";
    // This line in the output names the vector whose check fails.
    std::cerr << vector.format << ' ' << vector.name << '\n';
    CHECK(is_valid || vector.verdict == "bad");
    CHECK_EQUAL(parsed_handle.has_value(), is_valid);
    if (is_valid) {
        const Handle expected_handle = make_handle(vector);
        CHECK(*parsed_handle == expected_handle);
        CHECK(std::ranges::equal(pack(expected_handle).value(), vector.bytes));
    }
}

// Returns the SHA-256 hash of `text` in hexadecimal digits.
std::string hash_to_hex(std::string_view text) {
    Sha256 hash;
    hash.add(text);
    std::string hex;
    for (const std::uint8_t byte : hash.finish()) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", byte);
        hex += digits;
    }
    return hex;
}

} // namespace
} // namespace gdrkit::usrbio

int main() {
    using namespace gdrkit::usrbio;
    // The texts are the empty text, examples of FIPS 180 for SHA-256, and texts of 55 and of 64 bytes. A block has 64
    // bytes and the padding at least 9 bytes, so a text of 55 bytes fits in one block, and longer texts need another
    // block.
    CHECK(hash_to_hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hash_to_hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hash_to_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hash_to_hex(std::string(55, 'a')) == "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
    CHECK(hash_to_hex(std::string(64, 'a')) == "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
    int vector_count = 0;
    for (const TestVector& vector : read_vectors()) {
        if (vector.format == "share") {
            check_vector(vector, make_share_handle, parse_share_handle);
        } else {
            CHECK(vector.format == "gdr");
            check_vector(vector, make_gpu_ipc_handle, parse_gpu_ipc_handle);
        }
        ++vector_count;
    }
    CHECK(vector_count > 50);
    const ProcessIdentity identity = identify_this_process();
    CHECK_EQUAL(identity.process_id, static_cast<std::uint32_t>(getpid()));
    CHECK(is_running(identity) == true);
    // If the start time differs, the process id belongs to a later process, and the identified process has ended. A
    // process in another PID namespace cannot be checked.
    ProcessIdentity changed_identity = identity;
    changed_identity.started_ticks += 1;
    CHECK(is_running(changed_identity) == false);
    changed_identity = identity;
    changed_identity.pid_namespace += 1;
    CHECK(!is_running(changed_identity).has_value());
}
