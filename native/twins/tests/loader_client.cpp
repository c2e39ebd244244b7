// Test of the audit library of the software twin of libibverbs. This program is linked to a copy of libibverbs with
// another name, and finds the copy by its DT_RPATH. This is how auditwheel links the libraries of a wheel. The audit
// library must replace the copy by the twin. CMake sets LD_AUDIT for the test. Without LD_AUDIT, the program would call
// the copy, which reports no devices.
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstring>

#include "tests/check.hpp"

int main(int, char** arguments) {
    int device_count = 0;
    CHECK(ibv_get_device_list(&device_count) != nullptr && device_count == 2);
    Dl_info info{};
    CHECK(dladdr(reinterpret_cast<void*>(ibv_get_device_list), &info) != 0);
    // dlopen returns the same twin for the name of the copy (the first argument) and for the usual name.
    void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != nullptr && library == dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD));
    return 0;
}
