"""Tensors as the bytes of a safetensors file, one tensor at a time, so that a state_dict is sent without a second copy of it.

Format: https://huggingface.co/docs/safetensors: the header's length in 8 bytes, the header in JSON, the tensors without gaps.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import torch
from torch import Tensor

from perilune.errors import UserError

_PIECE_BYTES = 1 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsStream:
    """`size` bytes in all; iterating gives them in pieces. Raises UserError for a dtype that the format does not have."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Wide dtypes first keeps every tensor aligned for those who map the file.
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
        entries: dict[str, object] = {}
        end = 0
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _DTYPES:
                raise UserError(f"{name!r} has the dtype {tensor.dtype}, which cannot be sent: convert it to float32 or bfloat16")
            start, end = end, end + tensor.numel() * tensor.element_size()
            entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        self._start = len(header).to_bytes(8, "little") + header
        self.size = len(self._start) + end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._start
        for tensor in self._tensors.values():
            data = await asyncio.to_thread(_data, tensor)
            for start in range(0, len(data), _PIECE_BYTES):
                yield bytes(data[start : start + _PIECE_BYTES])


def _data(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
