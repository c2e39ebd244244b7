#include "storage/queue_pairs.hpp"

#include <algorithm>
#include <array>

#include "verbs/error.hpp"

namespace gdrkit::storage {

namespace {

constexpr std::uint32_t transfers_max = 512;
// A list of small transfers is posted when it has this many entries.
constexpr std::size_t list_max = 16;

// Returns whether the status is the peer NIC's refusal of this very transfer.
bool is_refusal(ibv_wc_status status) noexcept {
    return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR;
}

} // namespace

Fabric::Fabric(const std::vector<std::string>& names) {
    for (const std::string& name : names.empty() ? verbs::Device::names() : names) {
        try {
            devices_.push_back(std::make_unique<verbs::Device>(name));
        } catch (const verbs::Error& error) {
            // With an empty list of names, devices without a link are skipped. A named device must have one.
            if (!names.empty() || error.number() != ENETDOWN) {
                throw;
            }
        }
    }
    if (devices_.empty()) {
        throw verbs::Error("find an RDMA device with an active port", ENODEV);
    }
}

QueuePairs::Entry::Entry(verbs::Device& device_of_pair, std::size_t number)
    : device(number), reads_max(device_of_pair.reads_max()), completions(device_of_pair, transfers_max),
      pair(device_of_pair, completions, transfers_max) {}

QueuePairs::QueuePairs(Fabric& fabric, const std::vector<verbs::Endpoint>& peers) {
    const auto& devices = fabric.devices();
    for (const verbs::Endpoint& peer : peers) {
        const std::size_t number = fabric.next();
        entries_.push_back(std::make_unique<Entry>(*devices[number], number));
        entries_.back()->pair.connect(peer, devices[number]->reads_max());
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
    std::uint8_t least = 255;
    for (const auto& entry : entries_) {
        least = std::min(least, entry->reads_max);
    }
    return least;
}

bool QueuePairs::has_space(std::size_t index, std::size_t transfers) const {
    return entries_[index]->in_progress.size() + entries_[index]->unposted.size() + transfers <= transfers_max;
}

void QueuePairs::add(std::size_t index, const verbs::Transfer& transfer) {
    Entry& entry = *entries_[index];
    entry.unposted.push_back(transfer);
    if (entry.unposted.size() >= list_max) {
        post(entry);
    }
}

bool QueuePairs::post(Entry& entry) {
    if (entry.unposted.empty()) {
        return !entry.is_broken;
    }
    entry.unposted.back().signaled = true;
    for (verbs::Transfer& each : entry.unposted) {
        // The queue pair uses running numbers as ids, so that a completion shows how many transfers have completed.
        entry.in_progress.push_back(static_cast<std::uint32_t>(each.id));
        each.id = entry.posted++;
    }
    std::size_t done = 0;
    const int number = entry.is_broken ? EIO : entry.pair.post(entry.unposted, done);
    entry.unposted.clear();
    entry.is_broken |= number != 0;
    return number == 0;
}

bool QueuePairs::flush() {
    bool succeeded = true;
    for (const auto& entry : entries_) {
        succeeded &= post(*entry);
    }
    return succeeded;
}

bool QueuePairs::poll(const std::function<void(std::uint32_t, TransferStatus)>& done) {
    bool any = false;
    std::array<ibv_wc, 32> completions;
    for (const auto& entry : entries_) {
        if (entry->in_progress.empty()) {
            continue;
        }
        const auto complete_one = [&](TransferStatus status) {
            const std::uint32_t id = entry->in_progress.front();
            entry->in_progress.pop_front();
            ++entry->completed;
            any = true;
            done(id, status);
        };
        int count = 0;
        do {
            count = entry->completions.poll(completions);
            for (int index = 0; index < count; ++index) {
                const ibv_wc& each = completions[static_cast<std::size_t>(index)];
                // Transfers end in order: those before it succeeded, or had a completion of their own.
                while (entry->completed < each.wr_id && !entry->in_progress.empty()) {
                    complete_one(entry->is_broken ? TransferStatus::flushed : TransferStatus::succeeded);
                }
                // The status of the first failure is the cause; later work requests were flushed.
                const bool is_refused = !entry->is_broken && is_refusal(each.status);
                entry->is_broken |= each.status != IBV_WC_SUCCESS;
                if (entry->completed == each.wr_id && !entry->in_progress.empty()) {
                    complete_one(is_refused         ? TransferStatus::refused
                                 : entry->is_broken ? TransferStatus::flushed
                                                    : TransferStatus::succeeded);
                }
            }
        } while (count == static_cast<int>(completions.size()));
    }
    return any;
}

bool QueuePairs::in_progress() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const auto& entry) { return !entry->in_progress.empty(); });
}

void QueuePairs::arm() {
    for (const auto& entry : entries_) {
        if (!entry->in_progress.empty()) {
            entry->completions.arm();
        }
    }
}

void QueuePairs::take_events() {
    for (const auto& entry : entries_) {
        entry->completions.take_events();
    }
}

void QueuePairs::descriptors(std::vector<int>& into) const {
    for (const auto& entry : entries_) {
        into.push_back(entry->completions.fd());
    }
}

} // namespace gdrkit::storage
