// Tests of the lifetime of an exported dma-buf: until its last descriptor and importer are gone. The verbs twin imports
// it, also from many threads.
#include <thread>

#include "hlthunk_library.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::gaudi;
using gdrkit::twin::tests::all_access;

namespace {

constexpr u64 page = 4096;

std::string ledger_exports() {
    const std::string all = state();
    const std::size_t at = all.find("\"exports\":");
    return all.substr(at + 10, all.find(',', at) - at - 10);
}

ibv_mr* import(ibv_pd* pd, u64 address, u64 length, int fd) {
    ibv_mr* const region = ibv_reg_dmabuf_mr(pd, 0, length, address, fd, all_access);
    CHECK(region != nullptr);
    return region;
}

void test_export_until_last_importer(int device, ibv_pd* pd) {
    const u64 handle = allocate(device, page), address = map(device, handle);
    const int one = export_mapped(device, address, page), other = export_mapped(device, address, 2 * page, page);
    CHECK(ledger_exports() == "2");
    ibv_mr* const region = import(pd, address, page, one);
    ibv_mr* const second = import(pd, address, page, one);
    CHECK(close(one) == 0 && ledger_exports() == "2" && close(other) == 0 && ledger_exports() == "1");
    CHECK(ibv_dereg_mr(region) == 0 && ledger_exports() == "1" && unmap(device, address) == -EINVAL);
    CHECK(ibv_dereg_mr(second) == 0 && ledger_exports() == "0");
    CHECK(unmap(device, address) == 0 && release(device, handle) == 0);
}

void test_dmabuf_outlives_device(int device, ibv_pd* pd) {
    const u64 handle = allocate(device, page), address = map(device, handle);
    const int exported = export_mapped(device, address, page);
    ibv_mr* const region = import(pd, address, page, exported);
    // Nothing is freed explicitly: the context is destroyed with its last reference.
    CHECK(close(exported) == 0 && hl("hlthunk_close", device) == 0);
    CHECK(state().find("\"open_devices\":1") != std::string::npos);
    char bus_id[13] = "0000:33:00.0";
    CHECK(hl("hlthunk_open", static_cast<int>(dont_care), static_cast<const char*>(bus_id)) == -EBUSY);
    CHECK(ibv_dereg_mr(region) == 0);
    const int again = hl("hlthunk_open", static_cast<int>(dont_care), static_cast<const char*>(bus_id));
    CHECK(again >= 0 && hl("hlthunk_close", again) == 0);
    CHECK(state().find("\"handles\":{}") != std::string::npos);
}

void test_concurrent_imports(int device, ibv_pd* pd) {
    const u64 shared = allocate(device, page), place = map(device, shared);
    const auto body = [&] {
        for (int turn = 0; turn < 10; ++turn) {
            const u64 handle = allocate(device, page), address = map(device, handle);
            CHECK(handle != 0 && address != 0);
            for (const u64 where : {address, place}) {
                const int fd = export_mapped(device, where, page);
                CHECK(fd >= 0);
                ibv_mr* const region = import(pd, where, page, fd);
                CHECK(close(fd) == 0 && unmap(device, where) == -EINVAL && ibv_dereg_mr(region) == 0);
            }
            CHECK(unmap(device, address) == 0 && release(device, handle) == 0);
        }
    };
    std::vector<std::thread> threads;
    for (int index = 0; index < 8; ++index) {
        threads.emplace_back(body);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(ledger_exports() == "0" && unmap(device, place) == 0 && release(device, shared) == 0);
}

// A program without knowledge of hl-thunk closes the descriptor by close(2).
void test_close_releases_device() {
    const int device = open_first();
    CHECK(allocate(device, page) != 0 && close(device) == 0);
    CHECK(allocate(device, page) == 0 && errno == EBADF);
    CHECK(state().find("\"open_devices\":0") != std::string::npos);
}

} // namespace

int main() {
    ibv_context* const context = gdrkit::twin::tests::open_device(0);
    ibv_pd* const pd = ibv_alloc_pd(context);
    const int device = open_first();
    test_export_until_last_importer(device, pd);
    test_concurrent_imports(device, pd);
    test_dmabuf_outlives_device(device, pd);
    test_close_releases_device();
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}
