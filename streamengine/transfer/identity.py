"""What model a folder holds, told by its content: two engines with the same weights in different places agree."""

from hashlib import blake2b
from pathlib import Path

SAMPLE_BYTES = 64 * 1024
"""Of both ends of a weight file; its size and its header, which names, shapes and places every tensor, come on top."""

MAX_HEADER_BYTES = 64 * 1024 * 1024
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def identify(folder: str) -> str:
    """A digest of the config and of samples of the weights; of a folder that is not there, of its name.

    It tells models and quantisations apart, and not two fine-tunes that differ in the middle of every file alone.

    Raises:
        OSError: a file cannot be read.
    """
    place = Path(folder)
    files = sorted(place.iterdir()) if folder and place.is_dir() else [place] if folder and place.is_file() else []
    parts = [_digest(path) for path in files if path.suffix in _WEIGHTS]
    config = place / "config.json"
    if config.is_file():
        parts.append(blake2b(config.read_bytes()).digest())
    return blake2b(b"".join(sorted(parts)) or folder.encode(), digest_size=16).hexdigest()


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    state = blake2b(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        first = file.read(SAMPLE_BYTES)
        state.update(first)
        if path.suffix == ".safetensors":  # 8 bytes of length, then the header
            length = min(int.from_bytes(first[:8], "little"), MAX_HEADER_BYTES)
            state.update(file.read(max(0, 8 + length - len(first))))
        file.seek(max(0, size - SAMPLE_BYTES))
        state.update(file.read())
    return state.digest()
