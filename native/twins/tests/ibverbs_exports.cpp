// Tests that the software twin of libibverbs exports exactly the symbols that the contract (lists in
// native/twins/contracts) names. Each unimplemented function must report EOPNOTSUPP in the way that the contract
// states.
#include <dlfcn.h>
#include <elf.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/check.hpp"

namespace {

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    CHECK(file.is_open());
    return {std::istreambuf_iterator<char>(file), {}};
}

// Return the lines of a contract, without comments. CMake defines GDRKIT_CONTRACTS, the folder of the contracts, and
// GDRKIT_LIBRARY, the path of the twin.
std::vector<std::string> read_contract_lines(const std::string& file_name) {
    std::ifstream file(std::string(GDRKIT_CONTRACTS "/") + file_name);
    CHECK(file.is_open());
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
        if (!line.empty() && line[0] != '#') {
            lines.push_back(line);
        }
    }
    return lines;
}

// The functions and variables that a shared library defines, as name@version or name@@version.
class Exports {
public:
    explicit Exports(const std::string& path) : file_bytes_(read_file(path)) {
        const auto& header = view_at<Elf64_Ehdr>(0);
        sections_ = &view_at<Elf64_Shdr>(header.e_shoff);
        section_count_ = header.e_shnum;
        read_versions();
        const Elf64_Shdr& symbols = find_section(SHT_DYNSYM);
        const Elf64_Shdr& version_numbers = find_section(SHT_GNU_versym);
        for (std::size_t index = 0; index < symbols.sh_size / sizeof(Elf64_Sym); ++index) {
            const auto& symbol = view_at<Elf64_Sym>(symbols.sh_offset + index * sizeof(Elf64_Sym));
            const auto version_number = view_at<Elf64_Half>(version_numbers.sh_offset + index * sizeof(Elf64_Half));
            // Skip imported symbols, and the symbols that the linker adds: an absolute symbol for each version, and on
            // some processors a symbol for a section.
            if (symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS &&
                ELF64_ST_TYPE(symbol.st_info) != STT_SECTION) {
                // Bit 15 marks a version that is not the default version of the symbol.
                const bool is_hidden = (version_number & 0x8000) != 0;
                names_.insert(string_at(symbols, symbol.st_name) + (is_hidden ? "@" : "@@") +
                              version_names_[version_number & 0x7fff]);
            }
        }
    }
    [[nodiscard]] const std::set<std::string>& names() const { return names_; }

private:
    template <typename Type> const Type& view_at(std::size_t offset) const {
        CHECK(offset + sizeof(Type) <= file_bytes_.size());
        return *reinterpret_cast<const Type*>(file_bytes_.data() + offset);
    }
    [[nodiscard]] const Elf64_Shdr& find_section(unsigned type) const {
        for (std::size_t index = 0; index < section_count_; ++index) {
            if (sections_[index].sh_type == type) {
                return sections_[index];
            }
        }
        CHECK(false && "no section of this type");
        return sections_[0];
    }
    // Return the string at `offset` of the string table that belongs to the section.
    [[nodiscard]] std::string string_at(const Elf64_Shdr& section, std::size_t offset) const {
        return file_bytes_.data() + sections_[section.sh_link].sh_offset + offset;
    }
    void read_versions() {
        const Elf64_Shdr& definitions = find_section(SHT_GNU_verdef);
        std::size_t offset = definitions.sh_offset;
        for (unsigned count = 0; count < definitions.sh_info; ++count) {
            const auto& definition = view_at<Elf64_Verdef>(offset);
            const auto& name = view_at<Elf64_Verdaux>(offset + definition.vd_aux);
            version_names_[definition.vd_ndx] = string_at(definitions, name.vda_name);
            offset += definition.vd_next;
        }
    }

    std::string file_bytes_;
    const Elf64_Shdr* sections_ = nullptr;
    std::size_t section_count_ = 0;
    std::map<unsigned, std::string> version_names_; // the key is the version number of a symbol
    std::set<std::string> names_;
};

// Return name@version for name@@version. The second @ marks the default version of a symbol.
std::string remove_default_mark(std::string name) {
    const auto mark = name.find("@@");
    return mark == std::string::npos ? name : name.erase(mark, 1);
}

// A private symbol of libibverbs in one of its versions. `convention_line` has the format of ibverbs.conventions, for
// example "verbs_set_ops@IBVERBS_PRIVATE_34 void". `is_default` is true for the private version that the contract lists
// first.
struct PrivateSymbol {
    std::string convention_line;
    bool is_default;
};

std::vector<PrivateSymbol> read_private_symbols() {
    // The first line is the word "numbers" and the numbers of the private versions. Each other line describes a symbol
    // that has all these versions. A # at the end of its name stands for the number.
    const std::vector<std::string> lines = read_contract_lines("ibverbs_private.conventions");
    std::istringstream first_line(lines.at(0));
    std::string keyword, private_version;
    CHECK(first_line >> keyword && keyword == "numbers");
    std::vector<PrivateSymbol> symbols;
    for (bool is_default = true; first_line >> private_version; is_default = false) {
        for (auto line = lines.begin() + 1; line != lines.end(); ++line) {
            const auto space = line->find(' ');
            std::string name = line->substr(0, space);
            if (name.ends_with('#')) {
                name.replace(name.size() - 1, 1, private_version);
            }
            symbols.push_back({name + "@IBVERBS_PRIVATE_" + private_version + line->substr(space), is_default});
        }
    }
    return symbols;
}

void test_exports_match_contract() {
    const Exports exports(GDRKIT_LIBRARY);
    std::set<std::string> contract_symbols;
    for (const std::string& line : read_contract_lines("ibverbs.symbols")) {
        CHECK(contract_symbols.insert(line).second);
    }
    std::set<std::string> unmarked_contract_symbols, symbols_with_convention;
    for (const PrivateSymbol& symbol : read_private_symbols()) {
        std::string name = symbol.convention_line.substr(0, symbol.convention_line.find(' '));
        CHECK(symbols_with_convention.insert(name).second);
        if (symbol.is_default) {
            name.insert(name.find('@'), "@");
        }
        CHECK(contract_symbols.insert(name).second);
    }
    for (const std::string& name : exports.names()) {
        if (!contract_symbols.contains(name)) {
            std::fprintf(stderr, "exported, but not in the contract: %s\n", name.c_str());
        }
    }
    for (const std::string& name : contract_symbols) {
        if (!exports.names().contains(name)) {
            std::fprintf(stderr, "in the contract, but not exported: %s\n", name.c_str());
        }
    }
    CHECK(exports.names() == contract_symbols);
    // Each symbol of the contract has exactly one line that states its convention.
    for (const std::string& name : contract_symbols) {
        CHECK(unmarked_contract_symbols.insert(remove_default_mark(name)).second);
    }
    for (const std::string& line : read_contract_lines("ibverbs.conventions")) {
        CHECK(symbols_with_convention.insert(line.substr(0, line.find(' '))).second);
    }
    CHECK(unmarked_contract_symbols == symbols_with_convention);
}

// A type with which the test can call every function, because unimplemented functions ignore their arguments, and up to
// six arguments are passed in registers.
using AnyFunction = std::intptr_t (*)(void*, void*, void*, void*, void*, void*);

// Find the symbol of a line such as "ibv_alloc_pd@IBVERBS_1.0 null". If its convention is not `implemented`, call the
// function, and check that it fails by this convention. With the convention `flag`, the symbol is a variable of the
// library that must be false. The head of ibverbs.conventions describes the conventions.
void check_convention(void* library, const std::string& line) {
    const auto space = line.find(' '), at_sign = line.find('@');
    const std::string name = line.substr(0, at_sign), version = line.substr(at_sign + 1, space - at_sign - 1);
    const std::string convention = line.substr(space + 1);
    void* const address = dlvsym(library, name.c_str(), version.c_str());
    CHECK(address != nullptr);
    if (convention == "implemented") {
        return;
    }
    if (convention == "flag") {
        CHECK(*static_cast<const bool*>(address) == false);
        return;
    }
    errno = 0;
    const std::intptr_t result =
        reinterpret_cast<AnyFunction>(address)(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
    const int returned_value = static_cast<int>(result);
    const bool is_expected = convention == "errno"    ? returned_value == EOPNOTSUPP
                             : convention == "null"   ? result == 0 && errno == EOPNOTSUPP
                             : convention == "minus1" ? returned_value == -1 && errno == EOPNOTSUPP
                             : convention == "void"   ? errno == EOPNOTSUPP
                                                      : false;
    if (!is_expected) {
        std::fprintf(stderr, "%s returned %d, errno %d\n", line.c_str(), returned_value, errno);
    }
    CHECK(is_expected);
}

} // namespace

int main() {
    test_exports_match_contract();
    void* const library = dlopen(GDRKIT_LIBRARY, RTLD_NOW);
    CHECK(library != nullptr);
    for (const std::string& line : read_contract_lines("ibverbs.conventions")) {
        check_convention(library, line);
    }
    for (const PrivateSymbol& symbol : read_private_symbols()) {
        check_convention(library, symbol.convention_line);
    }
    return 0;
}
