// The RDMA devices of a storage server, and how a session posts transfers to its queue pairs and polls them.
#include "storage/queue_pairs.hpp"

#include <algorithm>
#include <array>

#include "verbs/error.hpp"

namespace gdrkit::storage {

namespace {

// Largest number of transfers in progress per queue pair.
constexpr std::uint32_t transfers_max = 512;
// A list of transfers is posted when it has this many entries.
constexpr std::size_t list_length_max = 16;

// Returns whether the status means that the client's NIC refused this transfer.
bool is_refusal(ibv_wc_status status) noexcept {
    return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR;
}

} // namespace

Fabric::Fabric(const std::vector<std::string>& names) {
    for (const std::string& name : names.empty() ? verbs::Device::list_names() : names) {
        try {
            devices_.push_back(std::make_unique<verbs::Device>(name));
        } catch (const verbs::Error& error) {
            // Without a list of names, skip the devices that have no active port (ENETDOWN). A named device must have
            // an active port.
            if (!names.empty() || error.number() != ENETDOWN) {
                throw;
            }
        }
    }
    if (devices_.empty()) {
        throw verbs::Error("no RDMA device has an active port", ENODEV);
    }
}

QueuePairs::Entry::Entry(verbs::Device& device, std::size_t index)
    : device_index(index), reads_max(device.reads_max()), completions(device, transfers_max),
      pair(device, completions, transfers_max) {}

QueuePairs::QueuePairs(Fabric& fabric, const std::vector<verbs::Endpoint>& peers) {
    const auto& devices = fabric.devices();
    for (const verbs::Endpoint& peer : peers) {
        const std::size_t device_index = fabric.next_index();
        entries_.push_back(std::make_unique<Entry>(*devices[device_index], device_index));
        entries_.back()->pair.connect(peer, devices[device_index]->reads_max());
    }
}

std::vector<verbs::Endpoint> QueuePairs::endpoints() const {
    std::vector<verbs::Endpoint> endpoints;
    for (const auto& entry : entries_) {
        endpoints.push_back(entry->pair.endpoint());
    }
    return endpoints;
}

std::uint8_t QueuePairs::reads_max() const {
    std::uint8_t smallest = 255;
    for (const auto& entry : entries_) {
        smallest = std::min(smallest, entry->reads_max);
    }
    return smallest;
}

bool QueuePairs::has_space(std::size_t index, std::size_t transfers_count) const {
    const Entry& entry = *entries_[index];
    return entry.ids_in_progress.size() + entry.unposted.size() + transfers_count <= transfers_max;
}

void QueuePairs::add(std::size_t index, const verbs::Transfer& transfer) {
    Entry& entry = *entries_[index];
    entry.unposted.push_back(transfer);
    if (entry.unposted.size() >= list_length_max) {
        post(entry);
    }
}

bool QueuePairs::post(Entry& entry) {
    if (entry.unposted.empty()) {
        return !entry.is_broken;
    }
    entry.unposted.back().signaled = true;
    for (verbs::Transfer& transfer : entry.unposted) {
        // The wr_id of a transfer is its position in the order of posting, so that a completion shows how many
        // transfers have completed.
        entry.ids_in_progress.push_back(static_cast<std::uint32_t>(transfer.id));
        transfer.id = entry.posted_count++;
    }
    std::size_t posted = 0;
    const int error_number = entry.is_broken ? EIO : entry.pair.post(entry.unposted, posted);
    entry.unposted.clear();
    entry.is_broken |= error_number != 0;
    return error_number == 0;
}

bool QueuePairs::flush() {
    bool succeeded = true;
    for (const auto& entry : entries_) {
        succeeded &= post(*entry);
    }
    return succeeded;
}

bool QueuePairs::poll(const std::function<void(std::uint32_t, TransferStatus)>& done) {
    bool has_completed = false;
    std::array<ibv_wc, 32> completions;
    for (const auto& entry : entries_) {
        if (entry->ids_in_progress.empty()) {
            continue;
        }
        const auto complete_oldest = [&](TransferStatus status) {
            const std::uint32_t id = entry->ids_in_progress.front();
            entry->ids_in_progress.pop_front();
            ++entry->completed_count;
            has_completed = true;
            done(id, status);
        };
        int count = 0;
        do {
            count = entry->completions.poll(completions);
            for (int index = 0; index < count; ++index) {
                const ibv_wc& completion = completions[static_cast<std::size_t>(index)];
                // Transfers of a queue pair complete in order. So the earlier transfers, which have no completion,
                // succeeded unless the queue pair was already broken.
                while (entry->completed_count < completion.wr_id && !entry->ids_in_progress.empty()) {
                    complete_oldest(entry->is_broken ? TransferStatus::flushed : TransferStatus::succeeded);
                }
                // The first failure shows the cause. The work requests after it were flushed.
                const bool is_refused = !entry->is_broken && is_refusal(completion.status);
                entry->is_broken |= completion.status != IBV_WC_SUCCESS;
                if (entry->completed_count == completion.wr_id && !entry->ids_in_progress.empty()) {
                    complete_oldest(is_refused         ? TransferStatus::refused
                                    : entry->is_broken ? TransferStatus::flushed
                                                       : TransferStatus::succeeded);
                }
            }
        } while (count == static_cast<int>(completions.size()));
    }
    return has_completed;
}

bool QueuePairs::has_transfers_in_progress() const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [](const auto& entry) { return !entry->ids_in_progress.empty(); });
}

void QueuePairs::arm() {
    for (const auto& entry : entries_) {
        if (!entry->ids_in_progress.empty()) {
            entry->completions.arm();
        }
    }
}

void QueuePairs::take_events() {
    for (const auto& entry : entries_) {
        entry->completions.take_events();
    }
}

std::vector<int> QueuePairs::event_fds() const {
    std::vector<int> fds;
    for (const auto& entry : entries_) {
        fds.push_back(entry->completions.fd());
    }
    return fds;
}

} // namespace gdrkit::storage
