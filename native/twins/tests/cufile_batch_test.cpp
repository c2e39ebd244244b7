// Tests of the software twin of libcufile (GPUDirect Storage): batches with many entries, several threads, stalls,
// cancellation, and the destruction of a batch during a transfer.
#include <atomic>
#include <map>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;

// Return an entry that transfers one page: the page `index` of the file and of the memory. The cookie of the entry is
// index + 1, so the events of a batch have the keys 1, 2 and so on in wait_for_events().
IoParameters make_entry(const TestFile& test_file, std::size_t index, Opcode opcode = opcode_read) {
    IoParameters entry{};
    entry.mode = mode_batch;
    entry.batch = {to_pointer(test_file.memory), static_cast<off_t>(index * page_bytes),
                   static_cast<off_t>(index * page_bytes), page_bytes};
    entry.file = test_file.file;
    entry.opcode = opcode;
    entry.cookie = to_pointer(index + 1);
    return entry;
}

BatchHandle create_batch(unsigned capacity) {
    BatchHandle batch = nullptr;
    EXPECT_STATUS(success, "cuFileBatchIOSetUp", &batch, capacity);
    return batch;
}

int submit_entries(BatchHandle batch, std::vector<IoParameters> entries) {
    return call_for_status("cuFileBatchIOSubmit", batch, static_cast<unsigned>(entries.size()), entries.data(), 0U);
}

// Wait until `expected_count` entries have completed, and return their events by cookie.
std::map<u64, IoEvent> wait_for_events(BatchHandle batch, unsigned expected_count) {
    std::map<u64, IoEvent> events_by_cookie;
    while (events_by_cookie.size() < expected_count) {
        IoEvent events[8];
        unsigned event_count = 8;
        EXPECT_STATUS(success, "cuFileBatchIOGetStatus", batch, 1U, &event_count, static_cast<IoEvent*>(events),
                      static_cast<timespec*>(nullptr));
        CHECK(event_count >= 1);
        for (unsigned index = 0; index < event_count; ++index) {
            CHECK(events_by_cookie.emplace(reinterpret_cast<u64>(events[index].cookie), events[index]).second);
        }
    }
    return events_by_cookie;
}

void test_batch_transfers_each_entry_once() {
    const TestFile test_file;
    const BatchHandle batch = create_batch(32);
    std::vector<IoParameters> entries;
    for (std::size_t index = 0; index < 32; ++index) {
        entries.push_back(make_entry(test_file, index));
    }
    CHECK(submit_entries(batch, entries) == success);
    // Completed entries use capacity until their status is queried.
    CHECK(submit_entries(batch, {make_entry(test_file, 0)}) == batch_full);
    for (const auto& [cookie, event] : wait_for_events(batch, 32)) {
        CHECK(event.status == io_complete && event.result == page_bytes && cookie >= 1 && cookie <= 32);
    }
    CHECK(cuda::read_device(test_file.memory, 32 * page_bytes) ==
          std::vector(test_file.initial_bytes.begin(), test_file.initial_bytes.begin() + 32 * page_bytes));
    CHECK(submit_entries(batch, {make_entry(test_file, 0)}) == success);
    wait_for_events(batch, 1);
    call<void>("cuFileBatchIODestroy", batch);
}

void test_invalid_arguments_are_refused() {
    const TestFile test_file;
    const BatchHandle batch = create_batch(4);
    IoParameters entry = make_entry(test_file, 0);
    CHECK(submit_entries(batch, {}) == invalid_value);
    entry.mode = 7; // not a mode
    CHECK(submit_entries(batch, {entry}) == invalid_value);
    entry = make_entry(test_file, 0);
    entry.file = to_pointer(0x10);
    CHECK(submit_entries(batch, {entry}) == handle_not_registered);
    CHECK(submit_entries(to_pointer(0x10), {make_entry(test_file, 0)}) == invalid_value);
    unsigned event_count = 1;
    IoEvent event{};
    timespec invalid_timeout{0, 1'000'000'000};
    EXPECT_STATUS(invalid_value, "cuFileBatchIOGetStatus", batch, 1U, &event_count, &event, &invalid_timeout);
    // The call cannot wait for 2 events if the array has room for 1.
    EXPECT_STATUS(invalid_value, "cuFileBatchIOGetStatus", batch, 2U, &event_count, &event,
                  static_cast<timespec*>(nullptr));
    call<void>("cuFileBatchIODestroy", batch);
    // cuFileBatchIODestroy returns no error code. A call with a handle that does not exist must not end the process.
    call<void>("cuFileBatchIODestroy", to_pointer(0x10));
    call<void>("cuFileBatchIODestroy", BatchHandle{});
    EXPECT_STATUS(invalid_value, "cuFileBatchIOCancel", BatchHandle{});
}

// The defaults matter to programs such as NIXL, which uses batches of 128 entries and does not change the
// configuration.
void test_defaults_are_those_of_an_h200() {
    struct ParameterLimits {
        int parameter;
        std::size_t default_value, min, max;
    };
    // The parameters are CUFILE_PARAM_EXECUTION_MAX_IO_QUEUE_DEPTH (1), EXECUTION_MAX_IO_THREADS (2),
    // EXECUTION_MAX_REQUEST_PARALLELISM (4), PROPERTIES_MAX_DIRECT_IO_SIZE_KB (5), PROPERTIES_PER_BUFFER_CACHE_SIZE_KB
    // (7), PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB (8), PROPERTIES_IO_BATCHSIZE (9) and PROPERTIES_BATCH_IO_TIMEOUT_MS
    // (11).
    constexpr ParameterLimits expected_limits[] = {
        {1, 128, 1, 256},     {2, 4, 0, 32},    {4, 4, 0, 8},     {5, 16384, 64, 16384},
        {7, 1024, 64, 16384}, {9, 128, 1, 256}, {11, 5, 1, 1000},
    };
    for (const ParameterLimits& limits : expected_limits) {
        std::size_t value = 0, min = 0, max = 0;
        EXPECT_STATUS(success, "cuFileGetParameterSizeT", limits.parameter, &value);
        EXPECT_STATUS(success, "cuFileGetParameterMinMaxValue", limits.parameter, &min, &max);
        CHECK(value == limits.default_value && min == limits.min && max == limits.max);
    }
    std::size_t pinned_kb = 0;
    EXPECT_STATUS(success, "cuFileGetParameterSizeT", 8, &pinned_kb);
    CHECK(pinned_kb == 33554432);
}

void test_failed_entry_does_not_stop_others() {
    const TestFile test_file;
    set_fault_plan("cufile.batch_io call=2 status=5"); // EIO
    const BatchHandle batch = create_batch(4);
    CHECK(submit_entries(batch, {make_entry(test_file, 0), make_entry(test_file, 1), make_entry(test_file, 2)}) ==
          success);
    auto events = wait_for_events(batch, 3);
    CHECK(events[1].status == io_complete && events[3].status == io_complete);
    CHECK(events[2].status == io_failed && static_cast<ssize_t>(events[2].result) == -EIO);
    call<void>("cuFileBatchIODestroy", batch);
}

void test_stalled_entry_can_be_canceled() {
    const TestFile test_file;
    // The second entry is delayed by 10 s. The third entry waits for the second.
    set_fault_plan("cufile.batch_io call=2 delay_us=10000000");
    const BatchHandle batch = create_batch(4);
    CHECK(submit_entries(batch, {make_entry(test_file, 0), make_entry(test_file, 1), make_entry(test_file, 2)}) ==
          success);
    CHECK(wait_for_events(batch, 1)[1].status == io_complete);
    unsigned event_count = 4;
    IoEvent events[4];
    timespec timeout{0, 1'000'000};
    EXPECT_STATUS(success, "cuFileBatchIOGetStatus", batch, 1U, &event_count, static_cast<IoEvent*>(events), &timeout);
    CHECK(event_count == 0);
    EXPECT_STATUS(success, "cuFileBatchIOCancel", batch);
    auto canceled_events = wait_for_events(batch, 2);
    CHECK(canceled_events[2].status == io_canceled && canceled_events[3].status == io_canceled);
    call<void>("cuFileBatchIODestroy", batch);
}

// cuFileBatchIODestroy waits for the running transfer, because the caller may free the memory afterwards.
void test_destroy_waits_for_running_transfer() {
    const TestFile test_file;
    set_fault_plan("cufile.route call=1 delay_us=300000");
    const BatchHandle batch = create_batch(4);
    CHECK(submit_entries(batch, {make_entry(test_file, 3)}) == success);
    // Wait until the fault plan delays the entry in the middle of its transfer.
    while (read_ledger().find("cufile.route", read_ledger().find("\"delayed\"")) == std::string::npos) {
        sched_yield();
    }
    call<void>("cuFileBatchIODestroy", batch);
    CHECK(cuda::read_device(test_file.memory + 3 * page_bytes, page_bytes) ==
          std::vector(test_file.initial_bytes.begin() + 3 * page_bytes,
                      test_file.initial_bytes.begin() + 4 * page_bytes));
}

// Several threads create batches, and destroy some of them while transfers are unfinished.
void test_concurrent_batches() {
    const TestFile test_file;
    std::atomic<int> completed_count{0};
    std::vector<std::thread> threads;
    for (std::size_t thread_index = 0; thread_index < 4; ++thread_index) {
        threads.emplace_back([&test_file, &completed_count, thread_index] {
            for (int round = 0; round < 8; ++round) {
                const BatchHandle batch = create_batch(8);
                CHECK(submit_entries(batch, {make_entry(test_file, thread_index),
                                             make_entry(test_file, thread_index + 4)}) == success);
                if (round % 2 == 0) {
                    completed_count += static_cast<int>(wait_for_events(batch, 2).size());
                }
                call<void>("cuFileBatchIODestroy", batch);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(completed_count == 4 * 4 * 2); // 4 threads, each in 4 of its 8 rounds, 2 entries
    CHECK(read_ledger().find("cufile_batch") == std::string::npos);
}

} // namespace

int main() {
    test_batch_transfers_each_entry_once();
    test_invalid_arguments_are_refused();
    test_defaults_are_those_of_an_h200();
    test_failed_entry_does_not_stop_others();
    test_stalled_entry_can_be_canceled();
    test_destroy_waits_for_running_transfer();
    test_concurrent_batches();
}
