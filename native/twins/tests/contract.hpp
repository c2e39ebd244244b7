// Contract files, and what a library really exports.
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

// The lines of a contract that are no comments, two words each.
inline std::vector<std::pair<std::string, std::string>> read_table(const char* path) {
    std::ifstream file(path);
    CHECK(file.is_open());
    std::vector<std::pair<std::string, std::string>> table;
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') {
            continue;
        }
        std::istringstream words(line);
        std::string first, second, rest;
        CHECK(words >> first >> second && !(words >> rest));
        table.emplace_back(first, second);
    }
    return table;
}

// The names in the dynamic symbol table of the library that this library defines.
inline std::set<std::string> exported(const char* library) {
    std::ifstream file(library, std::ios::binary);
    std::stringstream whole;
    whole << file.rdbuf();
    const std::string bytes = whole.str();
    Elf64_Ehdr header;
    std::memcpy(&header, bytes.data(), sizeof header);
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    std::memcpy(sections.data(), bytes.data() + header.e_shoff, sections.size() * sizeof(Elf64_Shdr));
    std::set<std::string> names;
    for (const Elf64_Shdr& section : sections) {
        if (section.sh_type != SHT_DYNSYM) {
            continue;
        }
        const char* const text = bytes.data() + sections[section.sh_link].sh_offset;
        for (std::size_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            std::memcpy(&symbol, bytes.data() + section.sh_offset + at, sizeof symbol);
            if (symbol.st_shndx != SHN_UNDEF && ELF64_ST_BIND(symbol.st_info) != STB_LOCAL) {
                names.insert(text + symbol.st_name);
            }
        }
    }
    return names;
}

} // namespace gdrkit::twin
