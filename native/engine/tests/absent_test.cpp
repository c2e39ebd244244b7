// Tests of the copy engine on a machine without libcuda: transfers of host memory work, and transfers of device memory
// fail with ENOENT from dlopen.
#include <cerrno>

#include "engine/tests/fixture.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

int main() {
    const Folder folder;
    const Bytes data = pattern(3 * mib, 1);
    const Descriptor fd = create_file(folder.path_of("file"), data);
    const auto file = std::make_shared<File>(duplicate(fd));
    Engine engine(small_tuning(), any_node);
    Bytes memory(data.size());
    CHECK(is_complete(transfer(engine, Direction::read, host_memory, file, 0, address_of(memory), data.size()),
                      data.size()));
    CHECK(memory == data);
    // A failure to load the driver is not cached, so the second round tries again.
    for (int round = 0; round < 2; ++round) {
        // The job fails before it uses its device address, here 4096.
        const Progress progress = transfer(engine, Direction::read, 0, file, 0, 4096, data.size());
        CHECK(progress.failure && progress.failure->number == ENOENT && progress.bytes == 0);
        CHECK(std::string(progress.failure->operation) == "dlopen");
    }
    try {
        // The arguments are the offset in the file, the device address, the length and the device.
        engine.transfer_small(Direction::read, *file, 0, 4096, 10, 0);
        CHECK(false);
    } catch (const Error& error) {
        CHECK(error.failure().number == ENOENT);
    }
}
