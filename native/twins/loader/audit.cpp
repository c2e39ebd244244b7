// A library for LD_AUDIT (rtld-audit(7)). With it, the dynamic loader opens a twin in place of each library with the
// same name, even if the program has its own copy of that library. `gdrkit run` sets LD_AUDIT for its child.
//
// LD_LIBRARY_PATH is not enough. The loader searches a DT_RPATH of the program first. Python wheels contain copies with
// other names (libibverbs-1a2b3c4d.so.1.14.48.0). Some programs open a library by its absolute path.
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace {

constexpr const char* twins_variable = "GDRKIT_TWINS_LIBRARIES"; // paths of the twins, separated by colons
constexpr std::size_t hash_characters = 8; // auditwheel adds "-" and this number of hexadecimal digits

constexpr bool is_hash(std::string_view text) {
    return text.size() == hash_characters && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Return the name of a library without folder, version and auditwheel's hash: "libcuda" for "/a/libcuda.so.1" and for
// "libcuda-0123abcd.so.1.2". Return an empty text if the path is not the path of a library.
constexpr std::string_view get_stem(std::string_view path) {
    if (const auto slash = path.rfind('/'); slash != std::string_view::npos) {
        path.remove_prefix(slash + 1);
    }
    const auto suffix = path.find(".so");
    if (suffix == std::string_view::npos || (suffix + 3 < path.size() && path[suffix + 3] != '.')) {
        return {};
    }
    path.remove_suffix(path.size() - suffix);
    // The code does not call substr, which can throw and therefore would need the C++ library.
    const auto dash = path.rfind('-');
    if (dash != std::string_view::npos && is_hash({path.data() + dash + 1, path.size() - dash - 1})) {
        path.remove_suffix(path.size() - dash);
    }
    return path;
}
static_assert(get_stem("/usr/lib/libibverbs.so.1") == "libibverbs" && get_stem("libcuda.so") == "libcuda");
static_assert(get_stem("/w/nixl.libs/libibverbs-9f2c01ab.so.1.14.48.0") == "libibverbs");
static_assert(get_stem("libhl-thunk.so") == "libhl-thunk" && get_stem("libcufile_rdma.so.1") == "libcufile_rdma");
static_assert(get_stem("libcuda.sock").empty() && get_stem("/usr/bin/env").empty());

// Return the first number of the version in the name of a library: "12" for "/a/libcudart.so.12.9.79". Return an empty
// text if the name has no version.
constexpr std::string_view get_major_version(std::string_view path) {
    const auto suffix = path.rfind(".so.");
    if (suffix == std::string_view::npos) {
        return {};
    }
    path.remove_prefix(suffix + 4);
    if (const auto dot = path.find('.'); dot != std::string_view::npos) {
        path.remove_suffix(path.size() - dot);
    }
    return path;
}
static_assert(get_major_version("/a/libcudart.so.12") == "12" &&
              get_major_version("libcudart-c3a75b33.so.12.9.79") == "12");
static_assert(get_major_version("libcudart.so").empty());

// Return whether the library has several twins, one for each major version. Only the CUDA runtime has several, because
// its structures differ between versions.
constexpr bool has_twin_per_version(std::string_view library) {
    return get_stem(library) == "libcudart";
}

// Return whether the twin replaces a library of this name and this version. If the version is unknown (an empty text),
// every twin of this library does, so the first of them in the list replaces the library.
constexpr bool replaces(std::string_view twin, std::string_view library, std::string_view major_version) {
    const std::string_view library_stem = get_stem(library);
    const bool has_other_version = !major_version.empty() && major_version != get_major_version(twin);
    return !library_stem.empty() && library_stem == get_stem(twin) &&
           !(has_twin_per_version(library) && has_other_version);
}
constexpr bool replaces(std::string_view twin, std::string_view library) {
    return replaces(twin, library, get_major_version(library));
}
static_assert(replaces("/t/libcudart.so.13", "/a/libcudart.so.13.0.96") &&
              replaces("/t/libcudart.so.12", "libcudart.so"));
static_assert(!replaces("/t/libcudart.so.12", "libcudart.so.13") &&
              !replaces("/t/libcudart.so.12", "libcudart.so.11.0") &&
              !replaces("/t/libcudart.so.12", "/a/libcudart.so", "13"));
static_assert(replaces("/t/libcuda.so.1", "/a/libcuda.so.580.65") && replaces("/t/libhl-thunk.so", "libhl-thunk.so.1"));
static_assert(!replaces("/t/libcuda.so.1", "libcudart.so.12") && !replaces("/t/libcuda.so.1", "/bin/env"));

// The bytes of an ELF file, which may be damaged: every access checks its bounds.
struct ElfFile {
    const char* bytes;
    std::size_t length_bytes;

    template <typename Value> bool read(std::uint64_t offset, Value* value) const {
        if (offset > length_bytes || length_bytes - offset < sizeof(Value)) {
            return false;
        }
        std::memcpy(value, bytes + offset, sizeof(Value));
        return true;
    }

    // Find the first program header for which the condition holds.
    template <typename Condition> bool find_segment(Condition&& condition, ElfW(Phdr) * segment) const {
        ElfW(Ehdr) header{};
        if (!read(0, &header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
            return false;
        }
        for (std::uint64_t index = 0; index < header.e_phnum; ++index) {
            if (!read(header.e_phoff + index * sizeof *segment, segment)) {
                return false;
            }
            if (condition(*segment)) {
                return true;
            }
        }
        return false;
    }

    // Store the SONAME in a buffer. Return false if the file has no SONAME, or if the SONAME is too long.
    bool read_soname(char (&buffer)[PATH_MAX]) const {
        ElfW(Phdr) dynamic{}, string_segment{};
        if (!find_segment([](const auto& segment) { return segment.p_type == PT_DYNAMIC; }, &dynamic)) {
            return false;
        }
        ElfW(Dyn) entry{};
        std::uint64_t string_table_address = 0, name_offset = 0;
        for (std::uint64_t entry_offset = dynamic.p_offset; read(entry_offset, &entry) && entry.d_tag != DT_NULL;
             entry_offset += sizeof entry) {
            if (entry.d_tag == DT_STRTAB) {
                string_table_address = entry.d_un.d_ptr;
            } else if (entry.d_tag == DT_SONAME) {
                name_offset = entry.d_un.d_val;
            }
        }
        const auto has_string_table = [=](const auto& segment) {
            return segment.p_type == PT_LOAD && string_table_address - segment.p_vaddr < segment.p_filesz;
        };
        if (name_offset == 0 || !find_segment(has_string_table, &string_segment)) {
            return false;
        }
        const std::uint64_t soname_offset =
            string_segment.p_offset + (string_table_address - string_segment.p_vaddr) + name_offset;
        for (std::size_t index = 0; index < sizeof buffer && read(soname_offset + index, &buffer[index]); ++index) {
            if (buffer[index] == '\0') {
                return true;
            }
        }
        return false;
    }
};

bool read_soname(const char* path, char (&buffer)[PATH_MAX]) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status {};
    void* memory = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
        memory = mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    }
    if (fd >= 0) {
        close(fd);
    }
    if (memory == MAP_FAILED) {
        return false;
    }
    const ElfFile file{static_cast<const char*>(memory), static_cast<std::size_t>(status.st_size)};
    const bool has_soname = file.read_soname(buffer);
    munmap(memory, file.length_bytes);
    return has_soname;
}

// Return the first number of the version of a library, from its name, else from the name of the file to which its
// symbolic links lead, else from its SONAME. The returned text may point into the buffer.
std::string_view find_major_version(const char* library_path, char (&buffer)[PATH_MAX]) {
    std::string_view major_version = get_major_version(library_path);
    if (major_version.empty() && realpath(library_path, buffer) != nullptr) {
        major_version = get_major_version(buffer);
    }
    if (major_version.empty() && read_soname(library_path, buffer)) {
        major_version = get_major_version(buffer);
    }
    return major_version;
}

// Return the path of the twin that replaces this library, or nullptr. The library may not exist.
char* find_twin(const char* library_path) {
    // A copy of the variable that is never freed, with NUL in place of the colons: the loader keeps the C strings that
    // la_objsearch returns.
    static char* const twin_paths = [] {
        const char* const variable_value = std::getenv(twins_variable);
        const std::string_view path_list = variable_value == nullptr ? "" : variable_value;
        auto* const path_list_copy = static_cast<char*>(std::calloc(path_list.size() + 2, 1));
        for (std::size_t index = 0; path_list_copy != nullptr && index < path_list.size(); ++index) {
            path_list_copy[index] = path_list[index] == ':' ? '\0' : path_list[index];
        }
        return path_list_copy;
    }();
    char buffer[PATH_MAX];
    const std::string_view major_version =
        has_twin_per_version(library_path) ? find_major_version(library_path, buffer) : std::string_view();
    for (char* path = twin_paths; path != nullptr && *path != '\0'; path += std::string_view(path).size() + 1) {
        if (replaces(path, library_path, major_version)) {
            return path;
        }
    }
    return nullptr;
}

} // namespace

extern "C" {

[[gnu::visibility("default")]] unsigned la_version(unsigned version) {
    // Return the older version of the interface: the loader's or this library's (LAV_CURRENT). The loader refuses a
    // version that it does not know, and every version has the functions that this library uses.
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

// The loader calls this function first with the name that the program requests (LA_SER_ORIG), and then with each path
// that it tries. If the requested name has no folder, do not replace it in the first call: the loader would not find
// its entry for the name when it checks symbol versions. Replace the first path that the loader tries instead.
[[gnu::visibility("default")]] char* la_objsearch(const char* name, std::uintptr_t*, unsigned flag) {
    const bool has_folder = std::strchr(name, '/') != nullptr;
    if (flag == LA_SER_ORIG && !has_folder) {
        return const_cast<char*>(name);
    }
    // Do not replace a path of LD_LIBRARY_PATH or of a RUNPATH that does not exist: a later path of this search may
    // have the file whose version selects the twin. The loader searches its own folders last. In these folders the twin
    // replaces even a missing file.
    const bool is_in_search_path = (flag & (LA_SER_LIBPATH | LA_SER_RUNPATH)) != 0;
    if (is_in_search_path && has_twin_per_version(name) && get_major_version(name).empty() && access(name, F_OK) != 0) {
        return const_cast<char*>(name);
    }
    char* const twin = find_twin(name);
    return twin != nullptr ? twin : const_cast<char*>(name);
}

} // extern "C"
