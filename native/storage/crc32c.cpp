// Computes CRC32C by three methods: tables, the CRC instruction, and carry-less multiplication ("folding").
#include "storage/crc32c.hpp"

#include <array>
#include <cstring>

// GDRKIT_CRC_TARGET lets the compiler use the CRC instruction in a single function. The rest of the library also runs
// on processors without this instruction.
#if defined(__x86_64__)
#include <immintrin.h>
#define GDRKIT_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define GDRKIT_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace gdrkit::storage {

namespace {

// The polynomial of CRC32C. All polynomials here are bit-reflected: bit 31 is the coefficient of x^0.
constexpr std::uint32_t polynomial = 0x82f63b78;

// Table 0 has the CRC of each byte. Table n has the CRC of each byte followed by n zero bytes. In these tables, a CRC
// is not inverted.
using ByteTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr ByteTables make_byte_tables() {
    ByteTables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = crc >> 1 ^ ((crc & 1) != 0 ? polynomial : 0);
        }
        tables[0][byte] = crc;
    }
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        for (std::size_t table_index = 1; table_index < 8; ++table_index) {
            tables[table_index][byte] =
                tables[table_index - 1][byte] >> 8 ^ tables[0][tables[table_index - 1][byte] & 255];
        }
    }
    return tables;
}

constexpr ByteTables byte_tables = make_byte_tables();

// Returns the product of two bit-reflected polynomials modulo the polynomial of CRC32C.
constexpr std::uint32_t multiply(std::uint32_t left, std::uint32_t right) noexcept {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 1U << 31; bit != 0; bit >>= 1) {
        if ((left & bit) != 0) {
            product ^= right;
        }
        right = right >> 1 ^ ((right & 1) != 0 ? polynomial : 0);
    }
    return product;
}

// Returns the polynomial x^(8 * bytes) modulo the polynomial of CRC32C, by repeated squaring.
constexpr std::uint32_t power_of_x_for_bytes(std::uint64_t bytes) noexcept {
    std::uint32_t power = 1U << 30; // The polynomial x.
    power = multiply(power, power);
    power = multiply(power, power);
    power = multiply(power, power);   // The polynomial x^8.
    std::uint32_t product = 1U << 31; // The polynomial 1.
    for (; bytes != 0; bytes >>= 1) {
        if ((bytes & 1) != 0) {
            product = multiply(product, power);
        }
        power = multiply(power, power);
    }
    return product;
}

// The CRC instruction has a latency of three cycles, and the processor can start a CRC instruction in every cycle. So
// compute_crc_by_instruction() processes three strides of this size at the same time, and combines their CRCs. Three
// strides are a few bytes less than a page.
constexpr std::size_t stride_bytes = 1360;

// Table n has one entry for each value of byte n of a CRC: the CRC after one stride of zeros, if the other three bytes
// of the CRC are 0.
using ShiftTables = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTables make_shift_tables() {
    ShiftTables tables{};
    const std::uint32_t stride_power = power_of_x_for_bytes(stride_bytes);
    for (std::size_t table_index = 0; table_index < 4; ++table_index) {
        for (std::uint32_t bit = 0; bit < 8; ++bit) {
            const std::uint32_t shifted_bit = multiply(stride_power, 1U << (8 * table_index + bit));
            // The entry of a byte is the exclusive or of the entries of its bits.
            for (std::uint32_t byte = 1U << bit; byte < 2U << bit; ++byte) {
                tables[table_index][byte] = tables[table_index][byte ^ 1U << bit] ^ shifted_bit;
            }
        }
    }
    return tables;
}

constexpr ShiftTables shift_tables = make_shift_tables();

// Returns the CRC of some bytes followed by one stride of zeros. `crc` is the CRC of the bytes.
inline std::uint32_t shift_by_stride(std::uint32_t crc) noexcept {
    return shift_tables[0][crc & 255] ^ shift_tables[1][crc >> 8 & 255] ^ shift_tables[2][crc >> 16 & 255] ^
           shift_tables[3][crc >> 24];
}

std::uint64_t load_word(const unsigned char* bytes) noexcept {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

#ifdef GDRKIT_CRC_TARGET

#if defined(__x86_64__)
bool has_crc_instruction() noexcept {
    return __builtin_cpu_supports("sse4.2");
}
GDRKIT_CRC_TARGET inline std::uint32_t add_8_bytes_to_crc(std::uint32_t crc, std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
GDRKIT_CRC_TARGET inline std::uint32_t add_1_byte_to_crc(std::uint32_t crc, unsigned char byte) noexcept {
    return _mm_crc32_u8(crc, byte);
}
#else
bool has_crc_instruction() noexcept {
    return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; // HWCAP_CRC32
}
GDRKIT_CRC_TARGET inline std::uint32_t add_8_bytes_to_crc(std::uint32_t crc, std::uint64_t word) noexcept {
    return __crc32cd(crc, word);
}
GDRKIT_CRC_TARGET inline std::uint32_t add_1_byte_to_crc(std::uint32_t crc, unsigned char byte) noexcept {
    return __crc32cb(crc, byte);
}
#endif

// Returns the CRC after these bytes. `crc` is the CRC before these bytes. Unlike in crc32c(), neither CRC
// is inverted.
GDRKIT_CRC_TARGET std::uint32_t compute_crc_by_instruction(const unsigned char* bytes, std::size_t size,
                                                           std::uint32_t crc) noexcept {
    for (; size >= 3 * stride_bytes; bytes += 3 * stride_bytes, size -= 3 * stride_bytes) {
        std::uint32_t second_crc = 0, third_crc = 0;
        for (std::size_t offset = 0; offset < stride_bytes; offset += 8) {
            crc = add_8_bytes_to_crc(crc, load_word(bytes + offset));
            second_crc = add_8_bytes_to_crc(second_crc, load_word(bytes + stride_bytes + offset));
            third_crc = add_8_bytes_to_crc(third_crc, load_word(bytes + 2 * stride_bytes + offset));
        }
        // The CRC of two strides is the CRC of the first stride, shifted by one stride of zeros, exclusive or the CRC
        // of the second stride.
        crc = shift_by_stride(shift_by_stride(crc) ^ second_crc) ^ third_crc;
    }
    for (; size >= 8; bytes += 8, size -= 8) {
        crc = add_8_bytes_to_crc(crc, load_word(bytes));
    }
    for (; size != 0; ++bytes, --size) {
        crc = add_1_byte_to_crc(crc, *bytes);
    }
    return crc;
}

// Computes the CRCs of three consecutive chunks at the same time. `chunk_bytes` must be a multiple of 8.
GDRKIT_CRC_TARGET void compute_crcs_of_three_chunks(const unsigned char* bytes, std::size_t chunk_bytes,
                                                    std::uint32_t* crcs) noexcept {
    std::uint32_t first_crc = ~0U, second_crc = ~0U, third_crc = ~0U;
    for (std::size_t offset = 0; offset < chunk_bytes; offset += 8) {
        first_crc = add_8_bytes_to_crc(first_crc, load_word(bytes + offset));
        second_crc = add_8_bytes_to_crc(second_crc, load_word(bytes + chunk_bytes + offset));
        third_crc = add_8_bytes_to_crc(third_crc, load_word(bytes + 2 * chunk_bytes + offset));
    }
    crcs[0] = ~first_crc;
    crcs[1] = ~second_crc;
    crcs[2] = ~third_crc;
}

#else

// On other processors, crc32c() uses tables only, and never calls the two functions after this one.
bool has_crc_instruction() noexcept {
    return false;
}
std::uint32_t compute_crc_by_instruction(const unsigned char*, std::size_t, std::uint32_t crc) noexcept {
    return crc;
}
void compute_crcs_of_three_chunks(const unsigned char*, std::size_t, std::uint32_t*) noexcept {}

#endif

const bool use_crc_instruction = has_crc_instruction();

// Folding combines each 256 bytes with the next 256 bytes, so that at the end the last 256 bytes have the CRC of all
// bytes. Folding needs a processor with vector carry-less multiplication (four products at a time), and is twice as
// fast as the CRC instruction.
#if defined(__x86_64__)

#define GDRKIT_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))

constexpr std::size_t fold_bytes = 256;
constexpr std::size_t folding_min_bytes = 512; // For fewer bytes, the CRC instruction is as fast.

constexpr std::uint32_t power_of_x_for_bits(unsigned bits) noexcept {
    std::uint32_t power = power_of_x_for_bytes(bits / 8);
    for (unsigned bit = 0; bit < bits % 8; ++bit) {
        power = multiply(power, 1U << 30);
    }
    return power;
}

// Returns the factor that shifts 64 bits by `bits`: x to the power of `bits` - 33. The multiplication itself shifts by
// the other 33 bits: by 1 because the words are bit-reflected, and by 32 because the factor is in the low half of a
// word.
constexpr std::int64_t shift_factor(unsigned bits) noexcept {
    return power_of_x_for_bits(bits - 33);
}

// Shifts each 128 bits of `block` by the factors and combines the result with `next`.
GDRKIT_FOLD_TARGET inline __m512i fold(__m512i block, __m512i factors, __m512i next) noexcept {
    // The low word of each 128 bits has the higher powers, so it must be shifted 64 bits further. The last argument
    // selects the low words (0x00) or the high words (0x11) of both operands.
    const __m512i low = _mm512_clmulepi64_epi128(block, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(block, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); // 0x96 means the exclusive or of the three.
}

// Returns the same CRC as compute_crc_by_instruction(). `size` must be a multiple of fold_bytes and not 0.
GDRKIT_FOLD_TARGET std::uint32_t compute_crc_by_folding(const unsigned char* bytes, std::size_t size,
                                                        std::uint32_t crc) noexcept {
    // A part has 64 bytes. The far factors shift a part by 256 bytes (2048 bits), and the near factors by 64 bytes (512
    // bits).
    constexpr std::int64_t far_high = shift_factor(2048), far_low = shift_factor(2048 + 64);
    constexpr std::int64_t near_high = shift_factor(512), near_low = shift_factor(512 + 64);
    const __m512i far_factors = _mm512_set4_epi64(far_high, far_low, far_high, far_low);
    const __m512i near_factors = _mm512_set4_epi64(near_high, near_low, near_high, near_low);
    // The CRC before the bytes is combined with the first 4 bytes. Then each part is folded into the part 256 bytes
    // after it. At the end, the four parts are folded into the last part.
    __m512i parts[4];
    for (std::size_t part_index = 0; part_index < 4; ++part_index) {
        parts[part_index] = _mm512_loadu_si512(bytes + 64 * part_index);
    }
    parts[0] = _mm512_xor_si512(parts[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    for (std::size_t offset = fold_bytes; offset < size; offset += fold_bytes) {
        for (std::size_t part_index = 0; part_index < 4; ++part_index) {
            parts[part_index] =
                fold(parts[part_index], far_factors, _mm512_loadu_si512(bytes + offset + 64 * part_index));
        }
    }
    for (std::size_t part_index = 1; part_index < 4; ++part_index) {
        parts[part_index] = fold(parts[part_index - 1], near_factors, parts[part_index]);
    }
    alignas(64) unsigned char last_part[64];
    _mm512_store_si512(last_part, parts[3]);
    return compute_crc_by_instruction(last_part, sizeof last_part, 0);
}

bool can_fold() noexcept {
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
}

#else

// On other processors, crc32c() never calls compute_crc_by_folding(), because can_fold() returns false.
constexpr std::size_t fold_bytes = 1, folding_min_bytes = 1;
std::uint32_t compute_crc_by_folding(const unsigned char*, std::size_t, std::uint32_t crc) noexcept {
    return crc;
}
bool can_fold() noexcept {
    return false;
}

#endif

const bool use_folding = can_fold();

} // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t initial_crc) noexcept {
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::uint32_t crc = ~initial_crc;
    for (; size >= 8; bytes += 8, size -= 8) {
        const std::uint64_t word = load_word(bytes) ^ crc; // Needs little endian, which frames.hpp asserts.
        crc = 0;
        for (std::size_t byte_index = 0; byte_index < 8; ++byte_index) {
            crc ^= byte_tables[7 - byte_index][word >> (8 * byte_index) & 255];
        }
    }
    for (; size != 0; ++bytes, --size) {
        crc = crc >> 8 ^ byte_tables[0][(crc ^ *bytes) & 255];
    }
    return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t initial_crc) noexcept {
    if (!use_crc_instruction) {
        return crc32c_portable(data, size, initial_crc);
    }
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::uint32_t crc = ~initial_crc;
    if (use_folding && size >= folding_min_bytes) {
        const std::size_t folded_bytes = size / fold_bytes * fold_bytes;
        crc = compute_crc_by_folding(bytes, folded_bytes, crc);
        bytes += folded_bytes;
        size -= folded_bytes;
    }
    return ~compute_crc_by_instruction(bytes, size, crc);
}

void crc32c_chunks(const std::byte* data, std::size_t chunk_bytes, std::size_t chunks_count,
                   std::uint32_t* crcs) noexcept {
    const auto* bytes = reinterpret_cast<const unsigned char*>(data);
    // If folding is possible, crc32c() folds each chunk, which is faster than three chunks by the CRC instruction.
    if (use_crc_instruction && !use_folding && chunk_bytes % 8 == 0) {
        for (; chunks_count >= 3; chunks_count -= 3, bytes += 3 * chunk_bytes, crcs += 3) {
            compute_crcs_of_three_chunks(bytes, chunk_bytes, crcs);
        }
    }
    for (; chunks_count != 0; --chunks_count, bytes += chunk_bytes) {
        *crcs++ = crc32c(bytes, chunk_bytes);
    }
}

std::uint32_t crc32c_combine(std::uint32_t first_crc, std::uint32_t second_crc, std::uint64_t second_bytes) noexcept {
    return multiply(first_crc, power_of_x_for_bytes(second_bytes)) ^ second_crc;
}

} // namespace gdrkit::storage
