// Tests of the software twin of libibverbs: a malformed configuration makes the first call fail. Each case runs in a
// process that has not used the library.
#include <dlfcn.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Run this program with `variable` (NAME=VALUE) in its environment. Because of its argument, the new process only runs
// list_devices(). Return its exit code, which is the result of that function.
int run_with_variable(const std::string& variable) {
    std::string program = "/proc/self/exe", argument = "list", variable_copy = variable;
    char* arguments[] = {program.data(), argument.data(), nullptr};
    const std::string name_and_equals = variable.substr(0, variable.find('=') + 1);
    std::vector<char*> environment{variable_copy.data()};
    for (char** inherited_variable = environ; *inherited_variable != nullptr; ++inherited_variable) {
        if (!std::string(*inherited_variable).starts_with(name_and_equals)) {
            environment.push_back(*inherited_variable);
        }
    }
    environment.push_back(nullptr);
    pid_t child = 0;
    int status = 0;
    CHECK(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environment.data()) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

// Check the device list. Return the number of devices, or 100 + errno if ibv_get_device_list fails.
int list_devices() {
    int count = -1;
    errno = 0;
    ibv_device** const devices = ibv_get_device_list(&count);
    if (devices == nullptr) {
        CHECK(count == 0);
        return 100 + errno;
    }
    CHECK(devices[count] == nullptr);
    for (int index = 0; index < count; ++index) {
        CHECK(std::string(ibv_get_device_name(devices[index])) == "twin" + std::to_string(index));
        CHECK(ibv_get_device_index(devices[index]) == index && ibv_get_device_guid(devices[index]) != 0);
    }
    ibv_free_device_list(devices);
    return count;
}

// Write a fault plan to a new file and return the path.
std::string write_plan(const char* text) {
    char path[] = "/tmp/gdrkit-plan-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, text, std::strlen(text)) == static_cast<ssize_t>(std::strlen(text)));
    close(fd);
    return path;
}

// Threads of queue pairs run the library's code, so dlclose must not unload it.
void test_library_stays_loaded() {
    void* const library = dlopen(GDRKIT_LIBRARY, RTLD_NOW);
    link_map* map = nullptr;
    CHECK(library != nullptr && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0);
    std::uint64_t dynamic_flags = 0;
    for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
        dynamic_flags |= entry->d_tag == DT_FLAGS_1 ? entry->d_un.d_val : 0;
    }
    CHECK((dynamic_flags & DF_1_NODELETE) != 0);
    dlclose(library);
}

} // namespace

int main(int argument_count, char**) {
    if (argument_count > 1) {
        return list_devices();
    }
    test_library_stays_loaded();
    CHECK(run_with_variable("GDRKIT_TWINS_LATE_US=0") == 2); // the default number of NICs
    CHECK(run_with_variable("GDRKIT_TWINS_NICS=0") == 0);
    CHECK(run_with_variable("GDRKIT_TWINS_NICS=16") == 16);
    // The last GDRKIT_TWINS_FABRIC has a valid address. It fails because GDRKIT_TWINS_FABRIC_SECRET is not set.
    for (const char* invalid_variable :
         {"GDRKIT_TWINS_NICS=17", "GDRKIT_TWINS_NICS=two", "GDRKIT_TWINS_NICS=", "GDRKIT_TWINS_SEED=-1",
          "GDRKIT_TWINS_DOMAIN=a/b", "GDRKIT_TWINS_PEERMEM=yes", "GDRKIT_TWINS_LATE_SHARE=101",
          "GDRKIT_TWINS_FAULTS=/no/such/file", "GDRKIT_TWINS_FAULTS=/tmp", "GDRKIT_TWINS_FABRIC=/tmp",
          "GDRKIT_TWINS_FABRIC=tcp://", "GDRKIT_TWINS_FABRIC=tcp://127.0.0.1,", "GDRKIT_TWINS_FABRIC=tcp://192.0.2.1",
          "GDRKIT_TWINS_FABRIC=tcp://127.0.0.1/33", "GDRKIT_TWINS_FABRIC=tcp://127.0.0.1"}) {
        CHECK(run_with_variable(invalid_variable) == 100 + EINVAL);
    }
    const std::string plan_path = write_plan("gdrkit-faults 1\nibv_get_device_list call=1 errno=ENOSYS\n");
    CHECK(run_with_variable("GDRKIT_TWINS_FAULTS=" + plan_path) == 100 + ENOSYS);
    const std::string invalid_plan_path = write_plan("gdrkit-faults 1\nibv_get_device_list call=1 status=3\n");
    CHECK(run_with_variable("GDRKIT_TWINS_FAULTS=" + invalid_plan_path) == 100 + EINVAL);
    unlink(plan_path.c_str());
    unlink(invalid_plan_path.c_str());
    return 0;
}
