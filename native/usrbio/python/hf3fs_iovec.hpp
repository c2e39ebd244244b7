// The Python class iovec: memory that a ring reads into or writes from, or a slice of it.
#pragma once

#include "hf3fs_library.hpp"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// One hf3fs_iov, and references to the objects that it uses. Every method requires the GIL.
class IovecMemory {
public:
    enum class Kind { host, device };

    IovecMemory(Kind kind, nb::object owner) : kind_(kind), owner_(std::move(owner)) {}
    IovecMemory(const IovecMemory&) = delete;
    IovecMemory& operator=(const IovecMemory&) = delete;
    ~IovecMemory();

    // Acquires the buffer of a Python object, which cannot be resized or closed until close().
    void acquire_buffer(nb::handle base);
    // Call it after the library has filled in raw().
    void mark_open() noexcept { open_ = true; }
    // Calls before_close and the library's destroy, then releases all references. Raises an error if the memory is in
    // use.
    void close();

    Iov& raw() noexcept { return raw_; }
    const Iov& raw() const noexcept { return raw_; }
    const Py_buffer& buffer() const noexcept { return buffer_; }
    bool is_device() const noexcept { return kind_ == Kind::device; }
    bool is_open() const noexcept { return open_; }
    void check_open() const;

    std::size_t outstanding = 0; // Number of operations of rings.
    std::size_t exported = 0;    // Number of exported buffers.
    nb::object before_close;     // Called first by close(); may be empty.

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
    std::shared_ptr<IovecMemory> memory;
    std::size_t offset = 0;
    std::size_t length = 0;
    bool is_slice = false;
    bool prepared = false; // It is in an outstanding operation of a ring.
    std::int64_t result = 0;
    nb::object userdata = nb::none();

    std::uint8_t* begin() const noexcept { return memory->raw().base + offset; }
    Iovec slice(std::size_t begin_offset, std::size_t bytes) const;
};

// The 16 bytes of a UUID.
struct Identity {
    std::uint8_t bytes[16];
};
// Parses the text of a UUID, with hyphens or without. Raises an error for other texts.
Identity parse_identity(const std::string& text);

void bind_iovec(nb::module_& module);

} // namespace gdrkit::usrbio
