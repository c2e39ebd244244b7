r"""Rates at which gdrkit.safetensors and the other installed loaders load model files into GPU memory.

The bytes that each loader returns are checked once. Then all loaders are measured in turn. A run takes 25 minutes, and
26 GB of disk:

    pytest -c suites/pytest.ini suites/bench/test_model_speed.py --benchmark-enable -s \
        -o faulthandler_timeout=580 --records FILE

Without ``--benchmark-enable``, each loader loads small files once. GDRKIT_BENCH_STORAGE_FOLDER sets the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bench.model_loaders import list_loaders
from bench.storage_speed import Series, drop_cache, log_progress, make_pinned_copier, measure_in_turn

from gdrkit import cuda, gds, safetensors
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs, without_twin
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.safetensors.header import pack_header, read_header
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

# torch uses the CUDA runtime, which cannot use the software twin (a library that emulates the hardware).
pytestmark = [
    needs(cuda_needs.device(), host.module("torch"), without_twin(Api.CUDA)),
    pytest.mark.timeout(580),
]

ROUNDS_COUNT = 5
_CHUNK_BYTES = 16 * MIB
# kvikio reads whole files and does not parse the format, so the numbers `best_loader` do not include it.
_LOADERS_WITHOUT_PARSER = frozenset({"kvikio"})
_LOADERS_OF_GDRKIT = ("gdrkit", "gdrkit_per_tensor")
# Shapes of the tensors of one layer with about 218 million parameters, as in models with 8 billion parameters.
_LAYER_SHAPES = (
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
)


@pytest.fixture
def is_measured(request: pytest.FixtureRequest) -> bool:
    """Whether the rates are measured."""
    return bool(request.config.getoption("--benchmark-enable"))


@pytest.fixture(scope="module")
def start_loaders() -> None:
    """Load a small file once with each loader.

    torch, CUDA's runtime and the other loaders then open the descriptors that they keep open. The leak check does not
    count descriptors that a fixture of module scope opens.
    """
    with temporary_folder() as folder:
        path = folder / "small.safetensors"
        create_model(path, [(64, 64)])
        for load in list_loaders().values():
            load([path]).clear()
        for index in range(cuda.device_count()):
            safetensors.load_file(path, index).clear()


@pytest.fixture
def folder(start_loaders: None) -> Iterator[Path]:
    """Yield a folder on a disk, and remove it at the end."""
    with temporary_folder() as path:
        yield path


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder on the disk of the benchmarks. At the end, close the copy engines and remove the folder."""
    parent = os.environ.get("GDRKIT_BENCH_STORAGE_FOLDER", DISK_FOLDER)
    path = Path(tempfile.mkdtemp(prefix="gdrkit-models-", dir=parent))
    try:
        yield path
    finally:
        gds.close_engines()
        shutil.rmtree(path)


def create_model(path: Path, shapes: Sequence[tuple[int, ...]]) -> int:
    """Write a file with BF16 tensors of these shapes and with random bytes. Return the size of the tensors in bytes."""
    entries, data_bytes = [], 0
    for index, shape in enumerate(shapes):
        length_bytes = 2  # Size of a BF16 element.
        for size in shape:
            length_bytes *= size
        name = f"{path.stem}.layers.{index}.weight"
        entries.append((name, safetensors.TensorEntry("BF16", shape, data_bytes, data_bytes + length_bytes)))
        data_bytes += length_bytes
    header = pack_header(entries, {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data_bytes)
        file.flush()

        def fill_chunk(offset: int) -> None:
            data = os.urandom(min(_CHUNK_BYTES, data_bytes - offset))
            os.pwrite(file.fileno(), data, len(header) + offset)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill_chunk, range(0, data_bytes, _CHUNK_BYTES)))
        os.fsync(file.fileno())
    return data_bytes


def check_tensors(tensors: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Require that the tensors have the bytes of the files."""
    import torch

    checked_names: set[str] = set()
    for path in paths:
        with gds.File(path, direct="never") as file:
            header = read_header(file)
        file_bytes = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        tensor_bytes = file_bytes[header.data_offset_bytes :]
        for name, entry in header.tensors.items():
            actual = tensors[name].contiguous().view(-1).view(torch.uint8)
            assert tuple(tensors[name].shape) == entry.shape, name
            assert torch.equal(actual, tensor_bytes[entry.begin : entry.end].to(actual.device)), name
            checked_names.add(name)
    assert checked_names == set(tensors)


def check_and_measure(
    paths: Sequence[Path],
    length_bytes: int,
    evidence: Evidence,
    *,
    rounds_count: int,
    prepare: Callable[[], object] | None = None,
    omitted_loaders: Sequence[str] = (),
) -> dict[str, Series]:
    """Check each loader, and measure all in turn. Each load ends when the device has all bytes."""
    import torch

    def load(loader: Callable[[Sequence[Path]], dict[str, Any]]) -> None:
        tensors = loader(paths)
        torch.cuda.synchronize()
        if isinstance(tensors, safetensors.LoadedTensors):
            evidence["report_of_last_load"] = tensors.report
        tensors.clear()

    candidates = {name: loader for name, loader in list_loaders().items() if name not in omitted_loaders}
    for name, loader in candidates.items():
        # If the bytes are wrong, the record of the failed case names the loader.
        evidence["checked_loader"] = name
        tensors = loader(paths)
        torch.cuda.synchronize()
        check_tensors(tensors, paths)
        tensors.clear()
    evidence["loaders"] = sorted(candidates)
    return measure_in_turn(
        {name: partial(load, loader) for name, loader in candidates.items()},
        length_bytes,
        rounds_count=rounds_count,
        prepare=prepare,
        attempts_count=1,
    )


def record_rates(evidence: Evidence, prefix: str, series_by_loader: Mapping[str, Series]) -> None:
    """Record the rate and the processor time of each loader, and the fastest loader of another package."""
    for name, loader_series in series_by_loader.items():
        evidence.number(f"{prefix}_{name}_gb_per_s", loader_series.rate_gb_per_s)
        evidence.number(f"{prefix}_{name}_cpu_s_per_gib", loader_series.cpu_s_per_gib)
    other_series = {
        name: loader_series for name, loader_series in series_by_loader.items() if name not in _LOADERS_OF_GDRKIT
    }
    if other_series:
        fastest_loader = max(other_series, key=lambda name: other_series[name].rate_gb_per_s)
        evidence[f"{prefix}_best_other"] = fastest_loader
        evidence.number(f"{prefix}_best_other_gb_per_s", other_series[fastest_loader].rate_gb_per_s)
        rates_of_parsing_loaders = [
            loader_series.rate_gb_per_s
            for name, loader_series in other_series.items()
            if name not in _LOADERS_WITHOUT_PARSER
        ]
        if rates_of_parsing_loaders:
            evidence.number(f"{prefix}_best_loader_gb_per_s", max(rates_of_parsing_loaders))


def test_files_of_a_model_beside_other_loaders(
    device: Device, folder: Path, evidence: Evidence, *, is_measured: bool
) -> None:
    """Load four files of 2 GiB, cached and cold."""
    shapes = (_LAYER_SHAPES * 5)[:-2] if is_measured else ((64, 64), (64,))
    paths = [folder / f"model-{index}.safetensors" for index in range(4)]
    length_bytes = sum(create_model(path, shapes) for path in paths)
    rounds_count = ROUNDS_COUNT if is_measured else 1
    log_progress(f"4 files, {length_bytes / GIB:.2f} GiB, cached")
    with device.allocate(min(length_bytes, 4 * GIB)) as memory:
        copy, free_memory = make_pinned_copier(device, memory, length_bytes=memory.length_bytes)
        pinned_series = measure_in_turn({"pinned": copy}, memory.length_bytes, rounds_count=rounds_count)
        free_memory()
    evidence.number("pinned_copy_gb_per_s", pinned_series["pinned"].rate_gb_per_s)
    cached_series = check_and_measure(paths, length_bytes, evidence, rounds_count=rounds_count)
    record_rates(evidence, "cached", cached_series)
    evidence.number("cached_per_tensor_gdrkit_gb_per_s", cached_series["gdrkit_per_tensor"].rate_gb_per_s)
    log_progress("4 files, cold")

    def drop_files() -> None:
        for path in paths:
            drop_cache(path)

    record_rates(
        evidence,
        "cold",
        check_and_measure(
            paths,
            length_bytes,
            evidence,
            rounds_count=rounds_count,
            prepare=drop_files,
            omitted_loaders=["gdrkit_per_tensor"],
        ),
    )


@pytest.mark.parametrize("cache_state", ["cached", "cold"])
def test_one_large_file_beside_other_loaders(
    device: Device, folder: Path, evidence: Evidence, *, is_measured: bool, cache_state: str
) -> None:
    """Load 16 GB with 291 tensors."""
    shapes = (*(_LAYER_SHAPES * 32), (128256, 4096), (128256, 4096), (4096,)) if is_measured else ((64, 64), (64,))
    path = folder / "large.safetensors"
    length_bytes = create_model(path, shapes)
    log_progress(f"{len(shapes)} tensors, {length_bytes / 1e9:.1f} GB, {cache_state}")
    series_by_loader = check_and_measure(
        [path],
        length_bytes,
        evidence,
        rounds_count=ROUNDS_COUNT if is_measured else 1,
        prepare=None if cache_state == "cached" else partial(drop_cache, path),
        omitted_loaders=[] if cache_state == "cached" else ["gdrkit_per_tensor"],
    )
    record_rates(evidence, f"large_{cache_state}", series_by_loader)


def test_small_tensors_beside_other_loaders(
    device: Device, folder: Path, evidence: Evidence, *, is_measured: bool
) -> None:
    """Load 20,000 tensors of 16 KiB, cached and cold."""
    tensor_count, rounds_count = (20_000, ROUNDS_COUNT) if is_measured else (100, 1)
    path = folder / "small.safetensors"
    length_bytes = create_model(path, [(64, 16 * KIB // 2 // 64)] * tensor_count)
    for prefix, prepare in (("small_tensors", None), ("small_tensors_cold", partial(drop_cache, path))):
        log_progress(f"{prefix}: {tensor_count} tensors of 16 KiB")
        series_by_loader = check_and_measure([path], length_bytes, evidence, rounds_count=rounds_count, prepare=prepare)
        tensors_per_s = {
            name: loader_series.rate_gb_per_s * 1e9 / (16 * KIB) for name, loader_series in series_by_loader.items()
        }
        for name, rate in tensors_per_s.items():
            evidence.number(f"{prefix}_{name}_per_s", rate)
            evidence.number(f"{prefix}_{name}_cpu_s_per_gib", series_by_loader[name].cpu_s_per_gib)
        rates_of_other_loaders = [
            rate for name, rate in tensors_per_s.items() if name not in {*_LOADERS_OF_GDRKIT, *_LOADERS_WITHOUT_PARSER}
        ]
        if rates_of_other_loaders:
            evidence.number(f"{prefix}_best_other_per_s", max(rates_of_other_loaders))


@needs(cuda_needs.device(count_min=2))
def test_two_devices_beside_one(
    devices: tuple[Device, ...], folder: Path, evidence: Evidence, *, is_measured: bool
) -> None:
    """Load one half of each tensor on each of two devices, and all tensors on both devices, from the page cache."""
    import torch

    shapes = (_LAYER_SHAPES * 5)[:-2] if is_measured else ((64, 64), (64,))
    paths = [folder / f"model-{index}.safetensors" for index in range(4)]
    length_bytes = sum(create_model(path, shapes) for path in paths)

    def select_half(rank: int, _name: str, shape: tuple[int, ...]) -> object:
        return slice(rank * shape[0] // 2, (rank + 1) * shape[0] // 2)

    select_halves = [partial(select_half, rank) for rank in range(2)]
    transfers: dict[str, Callable[[], object]] = {
        "one": lambda: safetensors.load_files(paths, "cuda:0"),
        "halves": lambda: safetensors.load_files(paths, ["cuda:0", "cuda:1"], select=select_halves),
        "both_by_shares": lambda: safetensors.load_files(paths, ["cuda:0", "cuda:1"], share=True),
        "both_by_reads": lambda: safetensors.load_files(paths, ["cuda:0", "cuda:1"], share=False),
    }
    for tensors in safetensors.load_files(paths, ["cuda:0", "cuda:1"], share=True):
        check_tensors(tensors, paths)
    first_halves, second_halves = safetensors.load_files(paths, ["cuda:0", "cuda:1"], select=select_halves)
    joined_tensors = {
        name: torch.cat((first_half.cpu(), second_halves[name].cpu())) for name, first_half in first_halves.items()
    }
    check_tensors(joined_tensors, paths)
    del tensors, first_halves, second_halves, joined_tensors
    torch.cuda.empty_cache()
    series_by_transfer = measure_in_turn(
        transfers, length_bytes, rounds_count=ROUNDS_COUNT if is_measured else 1, attempts_count=1
    )
    for name, transfer_series in series_by_transfer.items():
        # The rate counts the bytes that arrive on both devices.
        copies_count = 2 if name.startswith("both") else 1
        evidence.number(f"two_devices_{name}_gb_per_s", copies_count * transfer_series.rate_gb_per_s)
