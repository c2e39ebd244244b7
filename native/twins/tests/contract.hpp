// Helpers for the tests of the software twins: they read contract files (contracts/) and the exported symbols of a
// library, to compare them.
#pragma once

#include <elf.h>

#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"

namespace gdrkit::twin {

// Return each line of a contract file as a pair of words, without the comments and the empty lines.
inline std::vector<std::pair<std::string, std::string>> read_table(const char* path) {
    std::ifstream file(path);
    CHECK(file.is_open());
    std::vector<std::pair<std::string, std::string>> table;
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') {
            continue;
        }
        std::istringstream words(line);
        std::string first_word, second_word, extra_word;
        CHECK(words >> first_word >> second_word && !(words >> extra_word));
        table.emplace_back(first_word, second_word);
    }
    return table;
}

// Return the names that the library defines in its dynamic symbol table.
inline std::set<std::string> read_exported_symbols(const char* library_path) {
    std::ifstream file(library_path, std::ios::binary);
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
        const char* const symbol_names = elf_bytes.data() + sections[section.sh_link].sh_offset;
        for (std::size_t offset = 0; offset < section.sh_size; offset += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            std::memcpy(&symbol, elf_bytes.data() + section.sh_offset + offset, sizeof symbol);
            if (symbol.st_shndx != SHN_UNDEF && ELF64_ST_BIND(symbol.st_info) != STB_LOCAL) {
                names.insert(symbol_names + symbol.st_name);
            }
        }
    }
    return names;
}

} // namespace gdrkit::twin
