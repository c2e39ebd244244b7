// CRC32C against known values (RFC 3720, B.4), and each implementation against the others.
#include <cstring>
#include <random>
#include <vector>

#include "storage/crc32c.hpp"
#include "tests/check.hpp"

using namespace gdrkit::storage;

int main() {
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

    std::mt19937 chance(7);
    bytes.resize(7 * 4096 + 13);
    for (auto& byte : bytes) {
        byte = static_cast<unsigned char>(chance());
    }
    for (int round = 0; round < 2000; ++round) {
        const std::size_t begin = chance() % bytes.size(), length = chance() % (bytes.size() - begin + 1);
        const std::size_t middle = length == 0 ? 0 : chance() % length;
        const std::uint32_t whole = crc32c(&bytes[begin], length);
        CHECK(whole == crc32c_portable(&bytes[begin], length));
        const std::uint32_t first = crc32c(&bytes[begin], middle);
        CHECK(whole == crc32c(&bytes[begin] + middle, length - middle, first));
        CHECK(whole == crc32c_combine(first, crc32c(&bytes[begin] + middle, length - middle), length - middle));
    }
    for (std::size_t count = 0; count <= 7; ++count) {
        std::uint32_t values[7] = {};
        crc32c_chunks(reinterpret_cast<const std::byte*>(bytes.data()), 4096, count, values);
        for (std::size_t index = 0; index < count; ++index) {
            CHECK(values[index] == crc32c(&bytes[index * 4096], 4096));
        }
    }
}
