// Tests of CRC32C, the checksum of the storage service: against known values (RFC 3720, B.4), and of its
// implementations against each other.
#include <cstring>
#include <random>
#include <vector>

#include "storage/crc32c.hpp"
#include "tests/check.hpp"

using namespace gdrkit::storage;

int main() {
    // RFC 3720, B.4: 32 bytes of zeros, 32 bytes of ones, and the bytes 0 to 31.
    std::vector<unsigned char> bytes(32, 0);
    CHECK(crc32c(bytes.data(), 32) == 0x8a9136aa);
    std::memset(bytes.data(), 0xff, 32);
    CHECK(crc32c(bytes.data(), 32) == 0x62a8ab43);
    for (unsigned index = 0; index < 32; ++index) {
        bytes[index] = static_cast<unsigned char>(index);
    }
    CHECK(crc32c(bytes.data(), 32) == 0x46dd794e);
    CHECK(crc32c("123456789", 9) == 0xe3069283 && crc32c_portable("123456789", 9) == 0xe3069283);
    CHECK(crc32c(nullptr, 0) == 0);

    std::mt19937 random_number(7);
    bytes.resize(7 * 4096 + 13);
    for (auto& byte : bytes) {
        byte = static_cast<unsigned char>(random_number());
    }
    // The CRC of a random range is the same by tables, by two calls of crc32c(), and by crc32c_combine().
    for (int round = 0; round < 2000; ++round) {
        const std::size_t begin = random_number() % bytes.size(), length = random_number() % (bytes.size() - begin + 1);
        const std::size_t split_offset = length == 0 ? 0 : random_number() % length;
        const std::uint32_t whole_checksum = crc32c(&bytes[begin], length);
        CHECK(whole_checksum == crc32c_portable(&bytes[begin], length));
        const std::uint32_t first_checksum = crc32c(&bytes[begin], split_offset);
        CHECK(whole_checksum == crc32c(&bytes[begin] + split_offset, length - split_offset, first_checksum));
        CHECK(whole_checksum == crc32c_combine(first_checksum,
                                               crc32c(&bytes[begin] + split_offset, length - split_offset),
                                               length - split_offset));
    }
    for (std::size_t chunks_count = 0; chunks_count <= 7; ++chunks_count) {
        std::uint32_t crcs[7] = {};
        crc32c_chunks(reinterpret_cast<const std::byte*>(bytes.data()), 4096, chunks_count, crcs);
        for (std::size_t index = 0; index < chunks_count; ++index) {
            CHECK(crcs[index] == crc32c(&bytes[index * 4096], 4096));
        }
    }
}
