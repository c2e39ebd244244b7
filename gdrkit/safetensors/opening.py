"""Access to single tensors and slices of a model file: :class:`safe_open`, which replaces the class of safetensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.gds import File
from gdrkit.safetensors.devices import DeviceLoad, create_tensor_maker
from gdrkit.safetensors.header import pause_collector, read_header
from gdrkit.safetensors.layout import EVERYTHING, make_layout
from gdrkit.safetensors.loading import ModelLoad

if TYPE_CHECKING:
    from gdrkit.safetensors.devices import LoadedTensors
    from gdrkit.safetensors.header import TensorEntry
    from gdrkit.safetensors.layout import Layout, TensorIndex
    from gdrkit.safetensors.loading import StrPath

__all__ = ["TensorSlice", "safe_open"]


class safe_open:  # noqa: N801 - the name in safetensors.
    """An open model file, as a context manager.

    Parameters
    ----------
    filename : str or path-like
        Path of the file.
    framework : str or None
        See :func:`start_load_files`.
    device : str, int or torch.device
        The device that gets the tensors.
    backend : str or None
        This parameter is ignored. It only lets a call of safetensors' ``safe_open`` stay unchanged.
    whole_file : bool
        True: the first access to a whole tensor loads the whole file, and later accesses return its tensors. This is
        faster if a program takes all tensors one after the other, in any number of threads.

    Raises
    ------
    UsageError
        MALFORMED: the file is not a valid safetensors file.
    ApiError
        The kernel does not open the file.
    """

    def __init__(
        self,
        filename: StrPath,
        framework: str | None = None,
        device: Any = "cpu",  # noqa: ANN401 - every form in which torch names a device.
        *,
        backend: str | None = None,  # noqa: ARG002
        whole_file: bool = False,
    ) -> None:
        self._tensor_maker = create_tensor_maker(framework)
        self._device_index = self._tensor_maker.find_device_index(device)
        self._whole_file = whole_file
        # The lock is reentrant, because a signal handler may load a tensor while the interrupted thread has it.
        self._lock = ForkSafeLock(reentrant=True)
        self._loaded_tensors: LoadedTensors | None = None
        self._file = File(filename, direct="never")
        try:
            with pause_collector():
                self._header = read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return sorted(self._header.tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their bytes in the file."""
        return list(self._header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the texts that the file has beside its tensors."""
        return self._header.metadata

    def get_tensor(self, name: str) -> Any:  # noqa: ANN401 - a tensor.
        """Load a tensor and return it."""
        return self._load_part(name, EVERYTHING)

    def get_tensors(self) -> LoadedTensors:
        """Load all tensors and return them by their names."""
        with self._lock:
            if self._loaded_tensors is None:
                loaded_tensors = self._load(make_layout(self._header))
                if self._loaded_tensors is None:  # Else a signal handler has loaded them meanwhile.
                    self._loaded_tensors = loaded_tensors
            return self._loaded_tensors

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that loads a part of a tensor when it is indexed, as in ``file.get_slice(name)[:, 2:4]``."""
        return TensorSlice(self, name, self._find_entry(name))

    def close(self) -> None:
        """Close the file. Loaded tensors stay."""
        self._file.close()
        self._loaded_tensors = None

    def _find_entry(self, name: str) -> TensorEntry:
        entry = self._header.tensors.get(name)
        if entry is None:
            message = f"{self._file.path} has no tensor {name!r}"
            raise UsageError(message, what_to_do="keys() returns the names")
        return entry

    def _load_part(self, name: str, index: TensorIndex) -> Any:  # noqa: ANN401 - a tensor.
        self._find_entry(name)
        if self._whole_file and index is EVERYTHING:
            return self.get_tensors()[name]
        (tensor,) = self._load(make_layout(self._header, lambda *_: index, names=[name])).values()
        return tensor

    def _load(self, layout: Layout) -> LoadedTensors:
        device_load = DeviceLoad(self._tensor_maker, self._device_index, own_memory=False)
        # safe_open keeps its file open, so the load gets no file to close.
        with ModelLoad([], [self._header], [device_load], shares_count=1, returns_list=False) as load:
            with pause_collector():
                device_load.add_file(layout)
                device_load.start([self._file], share_index=0, shares_count=1)
                device_load.make_tensors()
            # The traceback of an error keeps this frame, and the frame would keep the memory.
            del device_load
            loaded_tensors: LoadedTensors = load.result()
        return loaded_tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorSlice:
    """A tensor of an open file. It is indexed by numbers, slices without a step, and ``...``, to load a part."""

    def __init__(self, file: safe_open, name: str, entry: TensorEntry) -> None:
        self._file, self._name, self._entry = file, name, entry

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the data type, such as ``BF16``."""
        return self._entry.dtype

    def __getitem__(self, index: TensorIndex) -> Any:  # noqa: ANN401 - a tensor.
        """Load the part, and return it as a tensor. Only its bytes are read."""
        if index is None:
            message = "an index may contain only integers, slices and ..., not None"
            raise UsageError(message)
        is_whole_tensor = index in ((), (EVERYTHING,)) if isinstance(index, tuple) else index is EVERYTHING
        return self._file._load_part(self._name, EVERYTHING if is_whole_tensor else index)  # noqa: SLF001 - both classes are one interface.
