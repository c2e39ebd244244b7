// A library for LD_AUDIT (rtld-audit(7)). With it, the dynamic loader opens a twin in place of each library with the
// same name, even if the program has its own copy of that library. `gdrkit run` sets the variable for its child.
//
// LD_LIBRARY_PATH is not enough. The loader searches a DT_RPATH of the program first. Python wheels contain copies with
// other names (libibverbs-1a2b3c4d.so.1.14.48.0). Some programs open a library by its absolute path.
#include <link.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace {

constexpr const char* twins_variable = "GDRKIT_TWINS_LIBRARIES"; // paths of the twins, separated by colons
constexpr std::size_t hash_characters = 8;                       // auditwheel adds "-" and this number of digits

constexpr bool is_hash(std::string_view text) {
    return text.size() == hash_characters && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Return the name of a library without folder, version and auditwheel's hash: "libcuda" for "/a/libcuda.so.1" and for
// "libcuda-0123abcd.so.1.2". Return an empty text for the path of another file.
constexpr std::string_view stem_of(std::string_view path) {
    if (const auto slash = path.rfind('/'); slash != std::string_view::npos) {
        path.remove_prefix(slash + 1);
    }
    const auto suffix = path.find(".so");
    if (suffix == std::string_view::npos || (suffix + 3 < path.size() && path[suffix + 3] != '.')) {
        return {};
    }
    path.remove_suffix(path.size() - suffix);
    // substr would need the C++ library, because it can throw.
    const auto dash = path.rfind('-');
    if (dash != std::string_view::npos && is_hash({path.data() + dash + 1, path.size() - dash - 1})) {
        path.remove_suffix(path.size() - dash);
    }
    return path;
}
static_assert(stem_of("/usr/lib/libibverbs.so.1") == "libibverbs" && stem_of("libcuda.so") == "libcuda");
static_assert(stem_of("/w/nixl.libs/libibverbs-9f2c01ab.so.1.14.48.0") == "libibverbs");
static_assert(stem_of("libhl-thunk.so") == "libhl-thunk" && stem_of("libcufile_rdma.so.1") == "libcufile_rdma");
static_assert(stem_of("libcuda.sock").empty() && stem_of("/usr/bin/env").empty());

// Return the first number of the version in the name of a library: "12" for "/a/libcudart.so.12.9.79". Return an empty
// text if the name has no version.
constexpr std::string_view major_of(std::string_view path) {
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
static_assert(major_of("/a/libcudart.so.12") == "12" && major_of("libcudart-c3a75b33.so.12.9.79") == "12");
static_assert(major_of("libcudart.so").empty());

// Return whether the twin replaces the library. The CUDA runtime has a twin for each of several versions, which differ
// in their structures. A program that names no version gets the first of them.
constexpr bool replaces(std::string_view twin, std::string_view library) {
    const std::string_view stem = stem_of(library);
    const bool has_other_version = !major_of(library).empty() && major_of(library) != major_of(twin);
    return !stem.empty() && stem == stem_of(twin) && !(stem == "libcudart" && has_other_version);
}
static_assert(replaces("/t/libcudart.so.13", "/a/libcudart.so.13.0.96") &&
              replaces("/t/libcudart.so.12", "libcudart.so"));
static_assert(!replaces("/t/libcudart.so.12", "libcudart.so.13") &&
              !replaces("/t/libcudart.so.12", "libcudart.so.11.0"));
static_assert(replaces("/t/libcuda.so.1", "/a/libcuda.so.580.65") && replaces("/t/libhl-thunk.so", "libhl-thunk.so.1"));
static_assert(!replaces("/t/libcuda.so.1", "libcudart.so.12") && !replaces("/t/libcuda.so.1", "/bin/env"));

// Return the path of the twin that replaces this library, or nullptr.
char* find_twin(std::string_view library) {
    // A copy of the variable that is never freed, with NUL in place of the colons: the loader keeps the C strings that
    // la_objsearch returns.
    static char* const paths = [] {
        const char* const value = std::getenv(twins_variable);
        const std::string_view text = value == nullptr ? "" : value;
        auto* const copy = static_cast<char*>(std::calloc(text.size() + 2, 1));
        for (std::size_t index = 0; copy != nullptr && index < text.size(); ++index) {
            copy[index] = text[index] == ':' ? '\0' : text[index];
        }
        return copy;
    }();
    for (char* path = paths; path != nullptr && *path != '\0'; path += std::string_view(path).size() + 1) {
        if (replaces(path, library)) {
            return path;
        }
    }
    return nullptr;
}

} // namespace

extern "C" {

[[gnu::visibility("default")]] unsigned la_version(unsigned version) {
    // Every version of the interface has the functions that this library uses. The loader refuses versions that it does
    // not know.
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

// The loader calls this first with the name that the program requests (LA_SER_ORIG), and then with each path that it
// tries. If the requested name has no folder, do not replace it in the first call: the loader would not find its entry
// for the name when it checks symbol versions. Replace the first path that the loader tries instead.
[[gnu::visibility("default")]] char* la_objsearch(const char* name, std::uintptr_t*, unsigned flag) {
    const std::string_view library = name;
    const bool is_path = library.find('/') != std::string_view::npos;
    char* const twin = flag == LA_SER_ORIG && !is_path ? nullptr : find_twin(library);
    return twin != nullptr ? twin : const_cast<char*>(name);
}

} // extern "C"
