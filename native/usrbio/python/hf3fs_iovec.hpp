// iovec: memory that a ring reads into or writes from, or a slice of it.
#pragma once

#include "hf3fs_library.hpp"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// One hf3fs_iov, and what must stay while it exists. All of it is used with Python's lock held.
class Memory {
public:
    enum class Kind { host, device };

    Memory(Kind kind, nb::object owner) : kind_(kind), owner_(std::move(owner)) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory();

    // Takes the buffer of a Python object, which cannot be resized or closed until this is closed.
    void hold_buffer(nb::handle base);
    // The library has filled in raw().
    void opened() noexcept { open_ = true; }
    // Unless it is in use: before_close(), then the library's destroy, then everything that was held.
    void close();

    Iov& raw() noexcept { return raw_; }
    const Iov& raw() const noexcept { return raw_; }
    const Py_buffer& buffer() const noexcept { return buffer_; }
    bool is_device() const noexcept { return kind_ == Kind::device; }
    bool is_open() const noexcept { return open_; }
    void check_open() const;

    std::size_t outstanding = 0; // Operations of rings.
    std::size_t exported = 0;    // Buffers that Python objects have of it.
    nb::object before_close;     // Called first when it is closed; may be empty.

    int traverse(visitproc visit, void* argument) const noexcept;

private:
    void release();

    Kind kind_;
    nb::object owner_;
    Iov raw_{};
    Py_buffer buffer_{};
    bool has_buffer_ = false;
    bool open_ = false;
};

struct Iovec {
    std::shared_ptr<Memory> memory;
    std::size_t offset = 0;
    std::size_t length = 0;
    bool is_slice = false;
    bool prepared = false; // A ring has it outstanding.
    std::int64_t result = 0;
    nb::object userdata = nb::none();

    std::uint8_t* begin() const noexcept { return memory->raw().base + offset; }
    Iovec slice(std::size_t from, std::size_t bytes) const;
};

// The 16 bytes of a UUID, written with hyphens or without.
struct Identity {
    std::uint8_t bytes[16];
};
Identity parse_identity(const std::string& text);

void bind_iovec(nb::module_& module);

} // namespace gdrkit::usrbio
