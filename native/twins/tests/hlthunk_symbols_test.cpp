// Tests of the functions that the software twin of libhl-thunk (the library of Intel Gaudi accelerators) exports: they
// match the contract (a list in native/twins/contracts), and unimplemented functions fail as documented.
#include <elf.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <vector>

#include "hlthunk_library.hpp"

// Newer kernels have the header in drm/, and older kernels in misc/.
#if __has_include(<drm/habanalabs_accel.h>)
#include <drm/habanalabs_accel.h>
#define GDRKIT_KERNEL_HEADER
#elif __has_include(<misc/habanalabs.h>)
#include <misc/habanalabs.h>
#define GDRKIT_KERNEL_HEADER
#endif

using namespace gdrkit::twin::gaudi;

#ifdef GDRKIT_KERNEL_HEADER
static_assert(sizeof(Chunk) == sizeof(hl_cs_chunk) &&
              offsetof(Chunk, queue_index) == offsetof(hl_cs_chunk, queue_index) &&
              offsetof(Chunk, cb_size) == offsetof(hl_cs_chunk, cb_size) &&
              offsetof(Chunk, cs_chunk_flags) == offsetof(hl_cs_chunk, cs_chunk_flags));
static_assert(chunk_flag_user_buffer == HL_CS_CHUNK_FLAGS_USER_ALLOC_CB &&
              GAUDI_QUEUE_ID_DMA_1_3 == dma_queue_count - 1);
static_assert(sizeof(HardwareInfo::cpucp_version) == HL_INFO_VERSION_MAX_LEN &&
              sizeof(HardwareInfo::card_name) == HL_INFO_CARD_NAME_MAX_LEN);
static_assert(device_operational == static_cast<int>(HL_DEVICE_STATUS_OPERATIONAL) &&
              device_malfunction == static_cast<int>(HL_DEVICE_STATUS_MALFUNCTION));
#endif

namespace {

// Return the convention of each symbol in the contract: either it is implemented, or the convention says how it fails
// (contracts/hlthunk.conventions).
std::map<std::string, std::string> read_contract() {
    std::ifstream file(GDRKIT_CONTRACTS "/hlthunk.conventions");
    CHECK(file.is_open());
    std::map<std::string, std::string> conventions;
    for (std::string line; std::getline(file, line);) {
        if (!line.empty() && line[0] != '#') {
            std::istringstream words(line);
            std::string symbol, convention;
            CHECK(words >> symbol >> convention && conventions.emplace(symbol, convention).second);
        }
    }
    return conventions;
}

// Return the names that the library defines in its dynamic symbol table.
std::set<std::string> read_exported_symbols() {
    std::ifstream file(GDRKIT_HLTHUNK_TWIN, std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    const std::string elf_bytes = content.str();
    Elf64_Ehdr header;
    std::memcpy(&header, elf_bytes.data(), sizeof header);
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    std::memcpy(sections.data(), elf_bytes.data() + header.e_shoff, sections.size() * sizeof(Elf64_Shdr));
    std::set<std::string> names;
    for (const Elf64_Shdr& section : sections) {
        if (section.sh_type != SHT_DYNSYM) {
            continue;
        }
        const char* const string_table = elf_bytes.data() + sections[section.sh_link].sh_offset;
        for (std::size_t offset = 0; offset < section.sh_size; offset += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            std::memcpy(&symbol, elf_bytes.data() + section.sh_offset + offset, sizeof symbol);
            // The absolute symbols are names of versions (HLTNK_1.0), not functions.
            if (symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS &&
                ELF64_ST_BIND(symbol.st_info) != STB_LOCAL) {
                names.insert(string_table + symbol.st_name);
            }
        }
    }
    return names;
}

void test_exports_match_contract() {
    std::set<std::string> contract_symbols;
    for (const auto& [symbol, convention] : read_contract()) {
        contract_symbols.insert(symbol);
    }
    CHECK(contract_symbols == read_exported_symbols());
}

void test_unimplemented_functions_fail() {
    int minus_errno_count = 0;
    for (const auto& [symbol, convention] : read_contract()) {
        errno = 0;
        if (convention == "minus_errno") {
            CHECK(call_library(symbol.c_str()) == -EOPNOTSUPP && errno == EOPNOTSUPP);
        } else if (convention == "null") {
            CHECK(call_library<void*>(symbol.c_str()) == nullptr && errno == EOPNOTSUPP);
        }
        minus_errno_count += convention == "minus_errno";
    }
    CHECK(minus_errno_count > 60);
}

// A program that was built in 2021 passes the smaller structure of that year. The function of the symbol version
// HLTNK_1.0 must not write beyond it.
void test_hardware_info_of_2021_keeps_its_size() {
    using GetInfo = int (*)(int, void*);
    const auto get_info_2021 = reinterpret_cast<GetInfo>(dlvsym(twin_library(), "hlthunk_get_hw_ip_info", "HLTNK_1.0"));
    CHECK(get_info_2021 != nullptr &&
          get_info_2021 != reinterpret_cast<GetInfo>(dlsym(twin_library(), "hlthunk_get_hw_ip_info")));
    // The argument 1 is the index of the device.
    const int fd = call_library("hlthunk_open_control", 1, static_cast<const char*>(nullptr));
    HardwareInfo current_info{};
    CHECK(call_library("hlthunk_get_hw_ip_info", fd, &current_info) == 0);
    unsigned char info_bytes[sizeof(HardwareInfo)];
    std::memset(info_bytes, 0xee, sizeof info_bytes);
    CHECK(get_info_2021(fd, info_bytes) == 0);
    for (std::size_t index = sizeof(HardwareInfo2021); index < sizeof info_bytes; ++index) {
        CHECK(info_bytes[index] == 0xee);
    }
    HardwareInfo2021 old_info;
    std::memcpy(&old_info, info_bytes, sizeof old_info);
    CHECK(old_info.dram_size == current_info.dram_size && old_info.module_id == current_info.module_id);
    CHECK(old_info.dram_enabled == 1 && old_info.dram_page_size == current_info.dram_page_size);
    CHECK(call_library("hlthunk_close", fd) == 0);
}

void test_device_names_and_ids() {
    CHECK(call_library("hlthunk_get_device_count", static_cast<int>(dont_care)) == 2);
    CHECK(call_library("hlthunk_get_device_count", static_cast<int>(invalid)) == -EINVAL);
    CHECK(call_library("hlthunk_get_device_count", static_cast<int>(goya)) == 0);
    char bus_id[13] = {};
    const int control_fd = call_library("hlthunk_open_control", 1, static_cast<const char*>(nullptr));
    CHECK(control_fd >= 0 && call_library("hlthunk_get_pci_bus_id_from_fd", control_fd, bus_id, 13) == 0);
    CHECK(call_library("hlthunk_get_device_index_from_pci_bus_id", static_cast<const char*>(bus_id)) == 1);
    // The PCI domain (the first 5 characters) may be omitted.
    CHECK(call_library("hlthunk_get_device_index_from_pci_bus_id", static_cast<const char*>(bus_id + 5)) == 1);
    HardwareInfo info{};
    CHECK(call_library("hlthunk_get_hw_ip_info", control_fd, &info) == 0 && info.dram_enabled == 1 &&
          info.module_id != 1);
    CHECK(call_library("hlthunk_get_hw_ip_info", control_fd, static_cast<HardwareInfo*>(nullptr)) == -EINVAL);
    // The descriptor of a control device (hlthunk_open_control) only supports queries.
    CHECK(allocate(control_fd, 4096) == 0 && errno == ENOTTY);
    const int fd = call_library("hlthunk_open_by_module_id", info.module_id);
    CHECK(fd >= 0 && call_library("hlthunk_get_device_name_from_fd", fd) ==
                         call_library("hlthunk_get_device_name_from_fd", control_fd));
    CHECK(call_library("hlthunk_open", static_cast<int>(dont_care), static_cast<const char*>(bus_id)) == -EBUSY);
    CHECK(call_library("hlthunk_open", static_cast<int>(dont_care), "0000:00:00.0") == -EINVAL);
    CHECK(call_library("hlthunk_open", static_cast<int>(goya), static_cast<const char*>(nullptr)) == -1 &&
          errno == ENOENT);
    CHECK(call_library("hlthunk_close", fd) == 0 && call_library("hlthunk_close", fd) == -1 && errno == EBADF);
    CHECK(call_library("hlthunk_close", control_fd) == 0);
}

} // namespace

int main() {
    test_exports_match_contract();
    test_unimplemented_functions_fail();
    test_hardware_info_of_2021_keeps_its_size();
    test_device_names_and_ids();
}
