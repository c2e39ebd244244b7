// Tests of batches: many entries, several threads, stalls, cancellation, and destroying a batch during a transfer.
#include <atomic>
#include <map>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

IoParameters make_entry(const TestFile& test_file, std::size_t index, Opcode opcode = opcode_read) {
    IoParameters created{};
    created.mode = mode_batch;
    created.batch = {pointer(test_file.memory), static_cast<off_t>(index * page), static_cast<off_t>(index * page),
                     page};
    created.file = test_file.file;
    created.opcode = opcode;
    created.cookie = pointer(index + 1);
    return created;
}

BatchHandle set_up(unsigned capacity) {
    BatchHandle batch = nullptr;
    EXPECT_STATUS(success, "cuFileBatchIOSetUp", &batch, capacity);
    return batch;
}

int submit(BatchHandle batch, std::vector<IoParameters> entries) {
    return call_control("cuFileBatchIOSubmit", batch, static_cast<unsigned>(entries.size()), entries.data(), 0U);
}

// Wait until `count` transfers are done and return their results by cookie.
std::map<u64, IoEvent> ended(BatchHandle batch, unsigned count) {
    std::map<u64, IoEvent> found;
    while (found.size() < count) {
        IoEvent events[8];
        unsigned given = 8;
        EXPECT_STATUS(success, "cuFileBatchIOGetStatus", batch, 1U, &given, static_cast<IoEvent*>(events),
                      static_cast<timespec*>(nullptr));
        CHECK(given >= 1);
        for (unsigned index = 0; index < given; ++index) {
            CHECK(found.emplace(reinterpret_cast<u64>(events[index].cookie), events[index]).second);
        }
    }
    return found;
}

void test_batch_transfers_each_entry_once() {
    const TestFile test_file;
    const BatchHandle batch = set_up(32);
    std::vector<IoParameters> entries;
    for (std::size_t index = 0; index < 32; ++index) {
        entries.push_back(make_entry(test_file, index));
    }
    CHECK(submit(batch, entries) == success);
    // Completed entries use capacity until their status is queried.
    CHECK(submit(batch, {make_entry(test_file, 0)}) == batch_full);
    for (const auto& [cookie, event] : ended(batch, 32)) {
        CHECK(event.status == io_complete && event.result == page && cookie >= 1 && cookie <= 32);
    }
    CHECK(cuda::read_device(test_file.memory, 32 * page) ==
          std::vector(test_file.bytes.begin(), test_file.bytes.begin() + 32 * page));
    CHECK(submit(batch, {make_entry(test_file, 0)}) == success);
    ended(batch, 1);
    call<void>("cuFileBatchIODestroy", batch);
}

void test_invalid_arguments_are_refused() {
    const TestFile test_file;
    const BatchHandle batch = set_up(4);
    IoParameters entry = make_entry(test_file, 0);
    CHECK(submit(batch, {}) == invalid_value);
    entry.mode = 7;
    CHECK(submit(batch, {entry}) == invalid_value);
    entry = make_entry(test_file, 0);
    entry.file = pointer(0x10);
    CHECK(submit(batch, {entry}) == handle_not_registered);
    CHECK(submit(pointer(0x10), {make_entry(test_file, 0)}) == invalid_value);
    unsigned given = 1;
    IoEvent event{};
    timespec wrong{0, 1'000'000'000};
    EXPECT_STATUS(invalid_value, "cuFileBatchIOGetStatus", batch, 1U, &given, &event, &wrong);
    EXPECT_STATUS(invalid_value, "cuFileBatchIOGetStatus", batch, 2U, &given, &event, static_cast<timespec*>(nullptr));
    call<void>("cuFileBatchIODestroy", batch);
    const int status = cuda::status_of_child([] { call<void>("cuFileBatchIODestroy", pointer(0x10)); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_failed_entry_does_not_stop_others() {
    const TestFile test_file;
    set_fault_plan("cufile.batch_io call=2 status=5");
    const BatchHandle batch = set_up(4);
    CHECK(submit(batch, {make_entry(test_file, 0), make_entry(test_file, 1), make_entry(test_file, 2)}) == success);
    auto events = ended(batch, 3);
    CHECK(events[1].status == io_complete && events[3].status == io_complete);
    CHECK(events[2].status == io_failed && static_cast<ssize_t>(events[2].result) == -EIO);
    call<void>("cuFileBatchIODestroy", batch);
}

void test_stalled_entry_can_be_canceled() {
    const TestFile test_file;
    set_fault_plan("cufile.batch_io call=2 delay_us=10000000");
    const BatchHandle batch = set_up(4);
    CHECK(submit(batch, {make_entry(test_file, 0), make_entry(test_file, 1), make_entry(test_file, 2)}) == success);
    CHECK(ended(batch, 1)[1].status == io_complete);
    unsigned given = 4;
    IoEvent events[4];
    timespec moment{0, 1'000'000};
    EXPECT_STATUS(success, "cuFileBatchIOGetStatus", batch, 1U, &given, static_cast<IoEvent*>(events), &moment);
    CHECK(given == 0);
    EXPECT_STATUS(success, "cuFileBatchIOCancel", batch);
    auto rest = ended(batch, 2);
    CHECK(rest[2].status == io_canceled && rest[3].status == io_canceled);
    call<void>("cuFileBatchIODestroy", batch);
}

// Destroying a batch waits for the running transfer: the caller may free the memory afterwards.
void test_destroy_waits_for_running_transfer() {
    const TestFile test_file;
    set_fault_plan("cufile.route call=1 delay_us=300000");
    const BatchHandle batch = set_up(4);
    CHECK(submit(batch, {make_entry(test_file, 3)}) == success);
    // Wait until the fault plan delays it in the middle of its transfer.
    while (ledger().find("cufile.route", ledger().find("\"delayed\"")) == std::string::npos) {
        sched_yield();
    }
    call<void>("cuFileBatchIODestroy", batch);
    CHECK(cuda::read_device(test_file.memory + 3 * page, page) ==
          std::vector(test_file.bytes.begin() + 3 * page, test_file.bytes.begin() + 4 * page));
}

// Each thread has its own batch and destroys it while some transfers are unfinished.
void test_concurrent_batches() {
    const TestFile test_file;
    std::atomic<int> complete{0};
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&test_file, &complete, thread] {
            for (int round = 0; round < 8; ++round) {
                const BatchHandle batch = set_up(8);
                CHECK(submit(batch, {make_entry(test_file, thread), make_entry(test_file, thread + 4)}) == success);
                if (round % 2 == 0) {
                    complete += static_cast<int>(ended(batch, 2).size());
                }
                call<void>("cuFileBatchIODestroy", batch);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(complete == 4 * 4 * 2);
    CHECK(ledger().find("cufile_batch") == std::string::npos);
}

} // namespace

int main() {
    test_batch_transfers_each_entry_once();
    test_invalid_arguments_are_refused();
    test_failed_entry_does_not_stop_others();
    test_stalled_entry_can_be_canceled();
    test_destroy_waits_for_running_transfer();
    test_concurrent_batches();
}
