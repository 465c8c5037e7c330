"""Hub directories: config.json and safetensors shards under the tensor names of the released models.

Reading accepts what the releases hold: the `language_model.` prefix of K3, A_log padded with zeros to 128 entries or shaped
[1, 1, heads, 1], convolutions as [width, 1, kernel], experts one by one in plain or MXFP4-packed form. Vision tensors are left
aside. Every tensor is checked for presence and shape before any is used.
"""

import json
import logging
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.errors import UserError
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.model.hub_config import config_to_json, read_config
from perilune.moe.mxfp4 import decode_mxfp4

logger = logging.getLogger(__name__)

K3_PREFIX = "language_model."
_WEIGHTS = "model.safetensors"
_VISION = ("vision_tower.", "mm_projector.")
# The releases keep these in fp32 whatever the rest is stored in; the router's bias must never be rounded.
_ALWAYS_FP32 = ("A_log", "dt_bias", "_conv", "o_norm.weight", "selection_bias")
_A_LOG_PADDING = 128


@dataclass(frozen=True)
class Placement:
    """Where one of our tensors, or a part of it, stands on the Hub: our name, an index into its leading axes, the Hub's name."""

    ours: str
    index: tuple[int | slice, ...]
    hub: str
    shape: tuple[int, ...]


_RENAMES = (
    (".q_conv", ".q_conv1d.weight"),
    (".k_conv", ".k_conv1d.weight"),
    (".v_conv", ".v_conv1d.weight"),
    ("_res.norm.weight", "_res_norm.weight"),
    ("_res.proj", "_res_proj.weight"),
    (".selection_bias", ".gate.e_score_correction_bias"),
)


def placements(model: Decoder) -> Iterator[Placement]:
    """Every stored tensor of the model, in the order of its parameters; expert stacks yield one entry per expert and matrix."""
    config = model.config
    prefix = K3_PREFIX if config.is_k3 else ""
    for ours, tensor in model.state_dict().items():
        name = ours if ours.startswith("lm_head") else f"model.{ours}"
        parts = name.split(".")
        if parts[1] == "layers" and parts[3] == "mlp" and int(parts[2]) >= config.first_k_dense:
            parts[3] = "block_sparse_moe"
            name = ".".join(parts)
        if name.endswith(("experts_gate_up", "experts_down")):
            yield from _expert_placements(ours, tensor, prefix + name.rsplit(".", 1)[0])
            continue
        for suffix, hub_suffix in _RENAMES:
            if name.endswith(suffix):
                name = name.removesuffix(suffix) + hub_suffix
                break
        shape = tuple(tensor.shape)
        if name.endswith("_conv1d.weight"):
            shape = (shape[0], 1, shape[1])
        yield Placement(ours, (), prefix + name, shape)


def _expert_placements(ours: str, tensor: Tensor, hub: str) -> Iterator[Placement]:
    experts = tensor.shape[0]
    width = tensor.shape[1] // 2
    parts: tuple[tuple[str, slice], ...] = (("w2", slice(None)),)
    if ours.endswith("experts_gate_up"):
        parts = (("w1", slice(0, width)), ("w3", slice(width, None)))
    for expert in range(experts):
        for matrix, rows in parts:
            yield Placement(ours, (expert, rows), f"{hub}.experts.{expert}.{matrix}.weight", tuple(tensor[expert, rows].shape))


class _Shards:
    """All tensors of a directory's safetensors files, opened but not read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        index = directory / "model.safetensors.index.json"
        try:
            if index.exists():
                self.where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
                if not all(isinstance(name, str) for name in self.where.values()):
                    raise TypeError("weight_map must map tensor names to file names")
            else:
                names = sorted(p.name for p in directory.glob("*.safetensors"))
                self.where = {key: name for name in names for key in self._open(name).keys()}  # noqa: SIM118
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{index} is damaged ({error}); copy it again from its source") from None
        if not self.where:
            raise UserError(f"{directory} holds no *.safetensors file; give the directory of a complete model")

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.directory / name, "pt")
            except FileNotFoundError:
                raise UserError(f"{self.directory / name} is missing but named by the index; copy it from the model's source") from None
            except (SafetensorError, OSError, struct.error) as error:
                raise UserError(f"{self.directory / name} is truncated or damaged ({error}); copy it again from its source") from None
        return self._files[name]

    def shape(self, key: str) -> tuple[int, ...]:
        file = self._open(self.where[key])
        try:
            return tuple(file.get_slice(key).get_shape())
        except SafetensorError as error:
            file_name = self.directory / self.where[key]
            raise UserError(f"{file_name} lacks {key}, which the index promises ({error}); copy both again") from None

    def read(self, key: str) -> Tensor:
        tensor: Tensor = self._open(self.where[key]).get_tensor(key)
        return tensor


def _adapt(key: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> Callable[[Tensor], Tensor] | None:
    """How a stored tensor becomes one of shape `wanted`, or None when it cannot."""
    if stored == wanted:
        return lambda tensor: tensor
    if not key.endswith("A_log"):
        return None
    heads = wanted[0]
    if stored == (1, 1, heads, 1):
        return lambda tensor: tensor.view(heads)
    if stored == (_A_LOG_PADDING,) and heads < _A_LOG_PADDING:

        def cut(tensor: Tensor) -> Tensor:
            if tensor[heads:].any():
                raise UserError(
                    f"{key} has {_A_LOG_PADDING} entries for {heads} heads, and those past the heads are not zero; "
                    "config.json and weights do not belong together"
                )
            return tensor[:heads]

        return cut
    return None


def _loaders(model: Decoder, shards: _Shards) -> list[tuple[Placement, Callable[[], Tensor]]]:
    """One reader per placement; raises UserError that lists what is missing, unexpected or misshapen."""
    loaders: list[tuple[Placement, Callable[[], Tensor]]] = []
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for placement in placements(model):
        key = placement.hub
        packed, scale = f"{key}_packed", f"{key}_scale"
        if key in shards.where:
            used.add(key)
            adapt = _adapt(key, shards.shape(key), placement.shape)
            if adapt is None:
                misshapen.append(f"{key} is {list(shards.shape(key))} instead of {list(placement.shape)}")
                continue
            loaders.append((placement, lambda key=key, adapt=adapt: adapt(shards.read(key))))  # type: ignore[misc]
        elif packed in shards.where and scale in shards.where and ".experts." in key:
            used |= {packed, scale}
            rows, columns = placement.shape
            wanted = {packed: (rows, columns // 2), scale: (rows, columns // 32)}
            if wrong := [name for name, shape in wanted.items() if shards.shape(name) != shape]:
                misshapen += [f"{name} is {list(shards.shape(name))} instead of {list(wanted[name])}" for name in wrong]
                continue
            loaders.append((placement, lambda packed=packed, scale=scale: decode_mxfp4(shards.read(packed), shards.read(scale))))  # type: ignore[misc]
        else:
            missing.append(key)
    unexpected = sorted(k for k in set(shards.where) - used if not k.startswith(_VISION))
    complaints = {"lacks": missing, "has misshapen tensors:": misshapen, "has tensors that the config does not explain:": unexpected}
    for what, names in complaints.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{shards.directory} {what} {', '.join(names[:3])}{more}; config.json and weights do not belong together")
    if any(k.startswith(_VISION) for k in shards.where):
        logger.info("%s: the vision tower is left aside, this is a text model", shards.directory)
    return loaders


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model of a Hub directory, weights cast to `dtype` but for the selection bias, which stays fp32.

    Raises UserError naming the file, field or tensor that is missing, damaged, misshapen or unexplained.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the folder that holds config.json and the safetensors files")
    config = read_config(directory)
    with torch.device("meta"):
        model = Decoder(config)
    loaders = _loaders(model, _Shards(directory))
    model = model.to_empty(device="cpu").to(dtype)
    tensors = model.state_dict()
    with torch.no_grad():
        for placement, load in loaders:
            target = tensors[placement.ours]
            loaded = load().view(placement.shape)
            target[placement.index].copy_(loaded.view(target[placement.index].shape))
    return model


def save_model(model: Decoder, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors under the Hub's names; matrices in `dtype`, the releases' fp32 tensors in fp32.

    Both files are written aside, synced and then renamed, so a failure leaves the old ones. Raises UserError when the disk is full,
    or the directory holds weights under other names.
    """
    others = sorted(p.name for pattern in ("*.safetensors", "*.safetensors.index.json") for p in directory.glob(pattern))
    if foreign := [name for name in others if name != _WEIGHTS]:
        raise UserError(f"{directory} holds other weights ({foreign[0]}), which would be read instead of these; save to another directory")
    tensors: dict[str, Tensor] = {}
    state = model.state_dict()
    for placement in placements(model):
        value = state[placement.ours][placement.index].detach().view(placement.shape)
        if placement.ours.endswith("A_log"):
            value = _stored_a_log(value, model.config)
        keep = placement.ours.endswith(_ALWAYS_FP32)
        tensors[placement.hub] = value.to(torch.float32 if keep else dtype).contiguous().clone()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config_to_json(model.config, str(dtype).removeprefix("torch.")), indent=1) + "\n"
        _replace(
            {
                directory / _WEIGHTS: lambda path: save_file(tensors, path, {"format": "pt"}),
                directory / "config.json": lambda path: path.write_text(text, encoding="utf-8"),
            }
        )
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the model to {directory} ({error}); free space or choose another place, earlier files there are untouched"
        ) from None


def _stored_a_log(value: Tensor, config: ModelConfig) -> Tensor:
    if not config.is_k3:
        return value.view(1, 1, -1, 1)
    padded = value.new_zeros(max(_A_LOG_PADDING, value.numel()))
    padded[: value.numel()] = value
    return padded


def _replace(writers: dict[Path, Callable[[Path], object]]) -> None:
    """Write files aside and sync them; rename them into place when all are whole, so that they always belong together."""
    aside = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in writers}
    try:
        for path, write in writers.items():
            write(aside[path])
            with aside[path].open("rb") as file:
                os.fsync(file.fileno())
        for path, temporary in aside.items():
            temporary.replace(path)
    finally:
        for temporary in aside.values():
            temporary.unlink(missing_ok=True)
