"""A forked child can close a load and read an open model file, even if a thread held the lock during the fork."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.model_files import write_model
from support.forked import get_lock, hold_in_another_thread, run_in_forked_child

from gdrkit.safetensors import safe_open, start_load_files

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = (("a", "F32", (4, 4)),)


def test_load_is_closed_in_a_forked_child(tmp_path: Path, seed: int) -> None:
    model = write_model(tmp_path / "model", TENSORS, seed=seed)
    with start_load_files([model.path], framework="dlpack") as load:
        with hold_in_another_thread(get_lock(load)):
            assert run_in_forked_child(load.close) == 0
        assert load.result()["a"].read() == model.tensor_data["a"]


def test_file_is_read_in_a_forked_child(tmp_path: Path, seed: int) -> None:
    model = write_model(tmp_path / "model", TENSORS, seed=seed)
    with safe_open(model.path, "dlpack") as open_file:

        def read_in_child() -> None:
            assert open_file.get_tensors()["a"].read() == model.tensor_data["a"]

        with hold_in_another_thread(get_lock(open_file)):
            assert run_in_forked_child(read_in_child) == 0
        read_in_child()
