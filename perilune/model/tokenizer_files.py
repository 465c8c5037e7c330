"""Reading and writing of tokenizer files: whole or not at all, and one clear sentence when a file is not what it should be."""

import json
import os
from pathlib import Path
from typing import Any

from perilune.errors import UserError


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises `UserError` naming the file if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path or fetch the file again") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError` if it cannot be read, is cut short or is something else than an object."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); the file may be cut short: fetch or save it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object and holds {type(value).__name__}: fetch or save it again")
    return value


def write_atomically(path: Path, content: bytes) -> None:
    """Write aside, flush to disk and rename, so that a reader sees the old file or the new one and never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_atomically` of readable, key-ordered-as-given JSON."""
    write_atomically(path, (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode())
