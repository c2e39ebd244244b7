"""`gdrkit.safetensors` loads and saves torch tensors on the CPU like the package safetensors, also for transformers."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
from models.model_files import TENSORS_OF_EVERY_TYPE, write_model

from gdrkit import safetensors
from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = needs(host.module("torch"))
NEEDS_SAFETENSORS = needs(host.module("safetensors"))


def get_tensor_bytes(tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of each tensor."""
    torch = importlib.import_module("torch")
    return {
        name: bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("own_memory", [False, True], ids=["one-memory", "own-memory"])
def test_every_type_is_a_tensor_of_torch(tmp_path: Path, seed: int, *, own_memory: bool) -> None:
    torch = importlib.import_module("torch")
    model = write_model(tmp_path / "model", TENSORS_OF_EVERY_TYPE, seed=seed)
    loaded_tensors = safetensors.load_file(model.path, own_memory=own_memory)
    assert get_tensor_bytes(loaded_tensors) == model.tensor_data
    for name, dtype, shape in TENSORS_OF_EVERY_TYPE:
        tensor, element_type = loaded_tensors[name], safetensors.ELEMENT_TYPES[dtype]
        assert tensor.dtype is getattr(torch, element_type.torch_name)
        # If elements have less than 8 bits, torch counts bytes in the last dimension.
        expected_shape = (*shape[:-1], shape[-1] * element_type.bits // 8) if element_type.bits < 8 else shape
        assert tuple(tensor.shape) == expected_shape
        assert tensor.is_contiguous()


def test_tensors_outlive_the_dict(tmp_path: Path, seed: int) -> None:
    model = write_model(tmp_path / "model", [("a", "I32", (300, 7)), ("b", "U8", (5,))], seed=seed)
    tensor = safetensors.load_file(model.path)["a"]
    tensor += 0  # This writes the memory, which must not be read-only.
    assert get_tensor_bytes({"a": tensor})["a"] == model.tensor_data["a"]


@NEEDS_SAFETENSORS
def test_saved_file_is_that_of_safetensors(tmp_path: Path, seed: int) -> None:
    safetensors_torch = importlib.import_module("safetensors.torch")
    # torch has no data types of 6 bits. They are loaded as uint8, and would be saved as U8.
    tensors = [tensor for tensor in TENSORS_OF_EVERY_TYPE if not tensor[1].startswith("F6_")]
    loaded_tensors = safetensors.load_file(write_model(tmp_path / "model", tensors, seed=seed).path)
    safetensors.save_file(loaded_tensors, tmp_path / "ours", {"k": "v"})
    safetensors_torch.save_file(dict(loaded_tensors), tmp_path / "theirs", {"k": "v"})
    assert get_tensor_bytes(safetensors.load_file(tmp_path / "theirs")) == get_tensor_bytes(loaded_tensors)
    assert get_tensor_bytes(safetensors_torch.load_file(tmp_path / "ours")) == get_tensor_bytes(loaded_tensors)


def test_tensor_that_is_not_contiguous_is_not_saved(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    with pytest.raises(UsageError, match="tensor 'a' is not contiguous"):
        safetensors.save_file({"a": torch.zeros(4, 4).t()}, tmp_path / "file")
    with pytest.raises(UsageError, match="has the type torch\\.complex128, which the format lacks"):
        safetensors.save_file({"a": torch.zeros(4, dtype=torch.complex128)}, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@NEEDS_SAFETENSORS
def test_patch_replaces_the_functions_and_restores_them(tmp_path: Path, seed: int) -> None:
    safetensors_package, safetensors_torch = (
        importlib.import_module("safetensors"),
        importlib.import_module("safetensors.torch"),
    )
    original_functions = (safetensors_package.safe_open, safetensors_torch.safe_open, safetensors_torch.load_file)
    model = write_model(tmp_path / "model", [("a", "F32", (8, 3))], seed=seed)
    expected_tensor = safetensors_torch.load_file(model.path)["a"]
    with safetensors.patch():
        assert issubclass(safetensors_package.safe_open, safetensors.safe_open)
        assert isinstance(safetensors_torch.load_file(model.path, device="cpu"), safetensors.LoadedTensors)
        with safetensors_package.safe_open(model.path, framework="pt", device="cpu") as file:
            assert file.get_tensor("a").equal(expected_tensor)
            assert file.get_slice("a")[...].equal(expected_tensor)
            assert file.get_slice("a")[2:4, 1:].equal(expected_tensor[2:4, 1:])
        with pytest.raises(UsageError) as error_info, safetensors.patch():
            pass
        assert error_info.value.reason is Reason.BUSY
    assert (
        safetensors_package.safe_open,
        safetensors_torch.safe_open,
        safetensors_torch.load_file,
    ) == original_functions


@NEEDS_SAFETENSORS
@needs(host.module("transformers"))
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_small_model_by_gdrkit(tmp_path: Path) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        expected_logits = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")(tokens).logits
        with safetensors.patch():
            patched_opener = sys.modules["transformers.modeling_utils"].safe_open
            assert issubclass(patched_opener, safetensors.safe_open)
            model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
        assert model(tokens).logits.equal(expected_logits)
