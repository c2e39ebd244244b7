#include "storage/lanes.hpp"

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

Lanes::Lane::Lane(verbs::Device& owner, std::size_t number)
    : device(number), reads_max(owner.reads_max()), completions(owner, transfers_max),
      pair(owner, completions, transfers_max) {}

Lanes::Lanes(Fabric& fabric, const std::vector<verbs::Endpoint>& peers) {
    const auto& devices = fabric.devices();
    for (const verbs::Endpoint& peer : peers) {
        const std::size_t number = fabric.next();
        lanes_.push_back(std::make_unique<Lane>(*devices[number], number));
        lanes_.back()->pair.connect(peer, devices[number]->reads_max());
    }
}

std::vector<verbs::Endpoint> Lanes::endpoints() const {
    std::vector<verbs::Endpoint> found;
    for (const auto& lane : lanes_) {
        found.push_back(lane->pair.endpoint());
    }
    return found;
}

std::uint8_t Lanes::reads_max() const {
    std::uint8_t least = 255;
    for (const auto& lane : lanes_) {
        least = std::min(least, lane->reads_max);
    }
    return least;
}

bool Lanes::has_room(std::size_t lane, std::size_t transfers) const {
    return lanes_[lane]->under_way.size() + lanes_[lane]->added.size() + transfers <= transfers_max;
}

void Lanes::add(std::size_t number, const verbs::Transfer& transfer) {
    Lane& lane = *lanes_[number];
    lane.added.push_back(transfer);
    if (lane.added.size() >= list_max) {
        post(lane);
    }
}

bool Lanes::post(Lane& lane) {
    if (lane.added.empty()) {
        return !lane.is_broken;
    }
    lane.added.back().signaled = true;
    for (verbs::Transfer& each : lane.added) {
        // The queue pair uses running numbers as ids, so that a completion shows how many transfers have ended.
        lane.under_way.push_back(static_cast<std::uint32_t>(each.id));
        each.id = lane.posted++;
    }
    std::size_t done = 0;
    const int number = lane.is_broken ? EIO : lane.pair.post(lane.added, done);
    lane.added.clear();
    lane.is_broken |= number != 0;
    return number == 0;
}

bool Lanes::flush() {
    bool is_right = true;
    for (const auto& lane : lanes_) {
        is_right &= post(*lane);
    }
    return is_right;
}

bool Lanes::poll(const std::function<void(std::uint32_t, Ended)>& done) {
    bool any = false;
    std::array<ibv_wc, 32> completions;
    for (const auto& lane : lanes_) {
        if (lane->under_way.empty()) {
            continue;
        }
        const auto end_one = [&](Ended how) {
            const std::uint32_t id = lane->under_way.front();
            lane->under_way.pop_front();
            ++lane->ended;
            any = true;
            done(id, how);
        };
        int count = 0;
        do {
            count = lane->completions.poll(completions);
            for (int index = 0; index < count; ++index) {
                const ibv_wc& each = completions[static_cast<std::size_t>(index)];
                // Transfers end in order: those before it succeeded, or had a completion of their own.
                while (lane->ended < each.wr_id && !lane->under_way.empty()) {
                    end_one(lane->is_broken ? Ended::not_carried : Ended::succeeded);
                }
                // The status of the first failure is the cause; later work requests were flushed.
                const bool is_refused = !lane->is_broken && is_refusal(each.status);
                lane->is_broken |= each.status != IBV_WC_SUCCESS;
                if (lane->ended == each.wr_id && !lane->under_way.empty()) {
                    end_one(is_refused ? Ended::refused : lane->is_broken ? Ended::not_carried : Ended::succeeded);
                }
            }
        } while (count == static_cast<int>(completions.size()));
    }
    return any;
}

bool Lanes::under_way() const {
    return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return !lane->under_way.empty(); });
}

void Lanes::arm() {
    for (const auto& lane : lanes_) {
        if (!lane->under_way.empty()) {
            lane->completions.arm();
        }
    }
}

void Lanes::take_events() {
    for (const auto& lane : lanes_) {
        lane->completions.take_events();
    }
}

void Lanes::descriptors(std::vector<int>& into) const {
    for (const auto& lane : lanes_) {
        into.push_back(lane->completions.fd());
    }
}

} // namespace gdrkit::storage
