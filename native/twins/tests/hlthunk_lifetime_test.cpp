// Tests of the software twin of libhl-thunk (the library of Intel Gaudi accelerators): how long exported dma-bufs live.
// A dma-buf lives until its last descriptor is closed and its last importer is gone. The software twin of libibverbs
// imports the dma-bufs, also from many threads.
#include <thread>

#include "hlthunk_library.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::gaudi;
using gdrkit::twin::tests::read_write_access;

namespace {

constexpr u64 page_bytes = 4096;

// Return the decimal text of the number of live exports, from the JSON text of the twin's ledger.
std::string read_export_count_text() {
    const std::string json = read_ledger(), key = "\"exports\":";
    const std::size_t begin = json.find(key) + key.size();
    return json.substr(begin, json.find(',', begin) - begin);
}

ibv_mr* register_dmabuf(ibv_pd* pd, u64 address, u64 length, int dmabuf_fd) {
    ibv_mr* const region = ibv_reg_dmabuf_mr(pd, 0, length, address, dmabuf_fd, read_write_access);
    CHECK(region != nullptr);
    return region;
}

void test_export_until_last_importer(int device_fd, ibv_pd* pd) {
    const u64 handle = allocate(device_fd, page_bytes), address = map_memory(device_fd, handle);
    const int first_dmabuf_fd = export_mapped(device_fd, address, page_bytes),
              second_dmabuf_fd = export_mapped(device_fd, address, 2 * page_bytes, page_bytes);
    CHECK(read_export_count_text() == "2");
    ibv_mr* const first_region = register_dmabuf(pd, address, page_bytes, first_dmabuf_fd);
    ibv_mr* const second_region = register_dmabuf(pd, address, page_bytes, first_dmabuf_fd);
    CHECK(close(first_dmabuf_fd) == 0 && read_export_count_text() == "2" && close(second_dmabuf_fd) == 0 &&
          read_export_count_text() == "1");
    CHECK(ibv_dereg_mr(first_region) == 0 && read_export_count_text() == "1" &&
          unmap_memory(device_fd, address) == -EINVAL);
    CHECK(ibv_dereg_mr(second_region) == 0 && read_export_count_text() == "0");
    CHECK(unmap_memory(device_fd, address) == 0 && free_memory(device_fd, handle) == 0);
}

void test_dmabuf_outlives_device(int device_fd, ibv_pd* pd) {
    const u64 handle = allocate(device_fd, page_bytes), address = map_memory(device_fd, handle);
    const int dmabuf_fd = export_mapped(device_fd, address, page_bytes);
    ibv_mr* const region = register_dmabuf(pd, address, page_bytes, dmabuf_fd);
    // The program does not free its memory. The imported dma-buf keeps the context of the device alive, so the device
    // stays in use until the import ends.
    CHECK(close(dmabuf_fd) == 0 && call_library("hlthunk_close", device_fd) == 0);
    CHECK(read_ledger().find("\"open_devices\":1") != std::string::npos);
    char bus_id[13] = "0000:33:00.0"; // of the device that `device_fd` refers to
    CHECK(call_library("hlthunk_open", static_cast<int>(dont_care), static_cast<const char*>(bus_id)) == -EBUSY);
    CHECK(ibv_dereg_mr(region) == 0);
    const int reopened_fd = call_library("hlthunk_open", static_cast<int>(dont_care), static_cast<const char*>(bus_id));
    CHECK(reopened_fd >= 0 && call_library("hlthunk_close", reopened_fd) == 0);
    CHECK(read_ledger().find("\"handles\":{}") != std::string::npos);
}

void test_concurrent_imports(int device_fd, ibv_pd* pd) {
    const u64 shared_handle = allocate(device_fd, page_bytes), shared_address = map_memory(device_fd, shared_handle);
    const auto export_and_import = [&] {
        for (int round = 0; round < 10; ++round) {
            const u64 handle = allocate(device_fd, page_bytes), address = map_memory(device_fd, handle);
            CHECK(handle != 0 && address != 0);
            for (const u64 exported_address : {address, shared_address}) {
                const int dmabuf_fd = export_mapped(device_fd, exported_address, page_bytes);
                CHECK(dmabuf_fd >= 0);
                ibv_mr* const region = register_dmabuf(pd, exported_address, page_bytes, dmabuf_fd);
                CHECK(close(dmabuf_fd) == 0 && unmap_memory(device_fd, exported_address) == -EINVAL &&
                      ibv_dereg_mr(region) == 0);
            }
            CHECK(unmap_memory(device_fd, address) == 0 && free_memory(device_fd, handle) == 0);
        }
    };
    std::vector<std::thread> threads;
    for (int index = 0; index < 8; ++index) {
        threads.emplace_back(export_and_import);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(read_export_count_text() == "0" && unmap_memory(device_fd, shared_address) == 0 &&
          free_memory(device_fd, shared_handle) == 0);
}

// A program can close the descriptor of a device by close(2), without hlthunk_close.
void test_close_releases_device() {
    const int device_fd = open_first_device();
    CHECK(allocate(device_fd, page_bytes) != 0 && close(device_fd) == 0);
    CHECK(allocate(device_fd, page_bytes) == 0 && errno == EBADF);
    CHECK(read_ledger().find("\"open_devices\":0") != std::string::npos);
}

} // namespace

int main() {
    ibv_context* const context = gdrkit::twin::tests::open_device(0);
    ibv_pd* const pd = ibv_alloc_pd(context);
    const int device_fd = open_first_device();
    test_export_until_last_importer(device_fd, pd);
    test_concurrent_imports(device_fd, pd);
    test_dmabuf_outlives_device(device_fd, pd);
    test_close_releases_device();
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}
