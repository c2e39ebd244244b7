// Opens the RDMA devices of a storage server. Posts the transfers of a session to its queue pairs, and polls the
// completion queues.
#include "storage/queue_pairs.hpp"

#include <algorithm>
#include <array>

#include "verbs/error.hpp"

namespace gdrkit::storage {

namespace {

// Largest number of transfers in progress per queue pair.
constexpr std::uint32_t transfers_per_pair_max = 512;
// A list of transfers is posted when it has this many entries.
constexpr std::size_t list_length_max = 16;

// Returns whether the status means that the client's NIC refused this transfer.
bool is_refusal(ibv_wc_status status) noexcept {
    return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR;
}

} // namespace

Fabric::Fabric(const std::vector<std::string>& device_names) {
    for (const std::string& name : device_names.empty() ? verbs::Device::list_names() : device_names) {
        try {
            devices_.push_back(std::make_unique<verbs::Device>(name));
        } catch (const verbs::Error& error) {
            // Without a list of names, skip the devices that have no active port (ENETDOWN). A named device must have
            // an active port.
            if (!device_names.empty() || error.error_number() != ENETDOWN) {
                throw;
            }
        }
    }
    if (devices_.empty()) {
        throw verbs::Error("no RDMA device has an active port", ENODEV);
    }
}

QueuePairs::Connection::Connection(verbs::Device& device, std::size_t index_of_device)
    : device_index(index_of_device), reads_max(device.reads_max()), completion_queue(device, transfers_per_pair_max),
      queue_pair(device, completion_queue, transfers_per_pair_max) {}

QueuePairs::QueuePairs(Fabric& fabric, const std::vector<verbs::Endpoint>& client_endpoints) {
    const auto& devices = fabric.devices();
    for (const verbs::Endpoint& client_endpoint : client_endpoints) {
        const std::size_t device_index = fabric.take_device_index();
        connections_.push_back(std::make_unique<Connection>(*devices[device_index], device_index));
        connections_.back()->queue_pair.connect(client_endpoint, devices[device_index]->reads_max());
    }
}

std::vector<verbs::Endpoint> QueuePairs::endpoints() const {
    std::vector<verbs::Endpoint> endpoints;
    for (const auto& connection : connections_) {
        endpoints.push_back(connection->queue_pair.endpoint());
    }
    return endpoints;
}

std::uint8_t QueuePairs::reads_max() const {
    std::uint8_t smallest_reads_max = 255;
    for (const auto& connection : connections_) {
        smallest_reads_max = std::min(smallest_reads_max, connection->reads_max);
    }
    return smallest_reads_max;
}

bool QueuePairs::has_space(std::size_t pair_index, std::size_t transfers_count) const {
    const Connection& connection = *connections_[pair_index];
    return connection.ids_in_progress.size() + connection.unposted_transfers.size() + transfers_count <=
           transfers_per_pair_max;
}

void QueuePairs::add(std::size_t pair_index, const verbs::Transfer& transfer) {
    Connection& connection = *connections_[pair_index];
    connection.unposted_transfers.push_back(transfer);
    if (connection.unposted_transfers.size() >= list_length_max) {
        post(connection);
    }
}

bool QueuePairs::post(Connection& connection) {
    if (connection.unposted_transfers.empty()) {
        return !connection.is_broken;
    }
    connection.unposted_transfers.back().is_signaled = true;
    for (verbs::Transfer& transfer : connection.unposted_transfers) {
        // The wr_id of a transfer is its position in the order of posting, so that a completion shows how many
        // transfers have completed.
        connection.ids_in_progress.push_back(static_cast<std::uint32_t>(transfer.id));
        transfer.id = connection.posted_count++;
    }
    std::size_t accepted_count = 0;
    const int error_number =
        connection.is_broken ? EIO : connection.queue_pair.post(connection.unposted_transfers, accepted_count);
    connection.unposted_transfers.clear();
    connection.is_broken |= error_number != 0;
    return error_number == 0;
}

bool QueuePairs::flush() {
    bool succeeded = true;
    for (const auto& connection : connections_) {
        succeeded &= post(*connection);
    }
    return succeeded;
}

bool QueuePairs::poll(const std::function<void(std::uint32_t, TransferStatus)>& report_transfer) {
    bool has_completed = false;
    std::array<ibv_wc, 32> polled_completions;
    for (const auto& connection : connections_) {
        if (connection->ids_in_progress.empty()) {
            continue;
        }
        const auto complete_oldest = [&](TransferStatus status) {
            const std::uint32_t id = connection->ids_in_progress.front();
            connection->ids_in_progress.pop_front();
            ++connection->completed_count;
            has_completed = true;
            report_transfer(id, status);
        };
        int polled_count = 0;
        do {
            polled_count = connection->completion_queue.poll(polled_completions);
            for (int index = 0; index < polled_count; ++index) {
                const ibv_wc& completion = polled_completions[static_cast<std::size_t>(index)];
                // The transfers of a queue pair complete in order. So earlier transfers, which have no completion of
                // their own, succeeded unless the queue pair was already broken.
                while (connection->completed_count < completion.wr_id && !connection->ids_in_progress.empty()) {
                    complete_oldest(connection->is_broken ? TransferStatus::flushed : TransferStatus::succeeded);
                }
                // The first failure shows the cause. All later work requests were flushed.
                const bool is_refused = !connection->is_broken && is_refusal(completion.status);
                connection->is_broken |= completion.status != IBV_WC_SUCCESS;
                if (connection->completed_count == completion.wr_id && !connection->ids_in_progress.empty()) {
                    complete_oldest(is_refused              ? TransferStatus::refused
                                    : connection->is_broken ? TransferStatus::flushed
                                                            : TransferStatus::succeeded);
                }
            }
        } while (polled_count == static_cast<int>(polled_completions.size()));
    }
    return has_completed;
}

bool QueuePairs::has_transfers_in_progress() const {
    return std::any_of(connections_.begin(), connections_.end(),
                       [](const auto& connection) { return !connection->ids_in_progress.empty(); });
}

void QueuePairs::arm() {
    for (const auto& connection : connections_) {
        if (!connection->ids_in_progress.empty()) {
            connection->completion_queue.arm();
        }
    }
}

void QueuePairs::take_events() {
    for (const auto& connection : connections_) {
        connection->completion_queue.take_events();
    }
}

std::vector<int> QueuePairs::event_fds() const {
    std::vector<int> fds;
    for (const auto& connection : connections_) {
        fds.push_back(connection->completion_queue.fd());
    }
    return fds;
}

} // namespace gdrkit::storage
