"""Entries on disk: a folder each, with a manifest that a person can read and the checksums of its other files.

```
<folder>/<name>/manifest.json    what it is, of what it was made, and size and sha256 of each file beside it
               /…
```

Entries are made in a folder of another name and renamed when they are whole, so no reader sees half of one and
no lock is held while anything is made: of two processes that make the same entry one is first, and the other
keeps what it finds. A lock would make a start wait for a process that may be stopped or dead, to save work that
is done once. What is found is used only if nobody but this user and root could have written it, for it holds
code, and if it is what the manifest says.
"""

import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
"""Of folder and manifest; an entry of another format is made again."""

MAX_BYTES = 2 * 1024**3
"""Of all entries together; the least recently used go first."""

_UNFINISHED = ".unfinished-"
_ABANDONED_S = 3600
_NAME = "format"

log = logging.getLogger(__name__)


class Unusable(Exception):
    """The entry is there and must not be used. One line says why."""


@dataclass(frozen=True)
class Entry:
    """``files`` are the verified contents, ``manifest`` what was saved with them."""

    path: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Listed:
    """An entry as it is listed: unread and unchecked but for its manifest. ``used`` is Unix time."""

    name: str
    manifest: Mapping[str, Any]
    size: int
    used: float

    def told(self) -> dict[str, Any]:
        """The same in a line: what is said of it on the command line."""
        head = {key: self.manifest.get(key, "") for key in ("kind", "model", "what", "created")}
        return {"entry": self.name, **head, "used": int(self.used), "size_bytes": self.size}


class Store:
    """Safe for any number of processes at once. Makes its folder when it saves first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fault(self) -> str | None:
        """Why nothing here is read or written: the folder could have been filled by somebody else."""
        return untrusted(self.folder) if os.path.lexists(self.folder) else None

    def read(self, name: str) -> Entry | None:
        """The entry, or None where there is none. Counts as a use of it.

        Raises:
            Unusable: somebody else could have written it, or it is torn, damaged or foreign.
        """
        path = self.folder / name
        if not os.path.lexists(path):
            return None
        try:
            _demand_trusted(self.folder, path, path / MANIFEST)
            manifest = _manifest(path)
            files = dict(_verified(path, manifest["files"]))
        except FileNotFoundError as error:
            raise Unusable(f"{error.filename} is missing") from error
        except OSError as error:
            raise Unusable(f"{error.filename}: {error.strerror}") from error
        _touch(path / MANIFEST)
        return Entry(path, manifest, files)

    def write(
        self, name: str, manifest: Mapping[str, Any], files: Mapping[str, bytes], *, replace: bool = False
    ) -> None:
        """Make the entry, in place of a damaged one if need be; of a whole one only if it is to be replaced.

        Raises:
            OSError: the folder cannot be written, or must not be (see `fault`).
        """
        if self.fault() is not None:
            raise PermissionError(f"{self.fault()}: nothing is saved in it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # whatever the umask: what the group could write would not be trusted
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.folder))
        try:
            sums = {file: {"size": len(data), "sha256": _sha256(data)} for file, data in files.items()}
            head = {_NAME: FORMAT, **manifest, "files": sums}
            for file, data in {**files, MANIFEST: json.dumps(head, indent=1).encode()}.items():
                (unfinished / file).write_bytes(data)
                (unfinished / file).chmod(0o644)
            unfinished.chmod(0o755)
            if replace:
                self.remove(name)
            self._publish(unfinished, name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._trim()

    def _publish(self, unfinished: Path, name: str) -> None:
        """Rename into place; a whole entry that is already there stays, and its readers keep their files."""
        for _ in range(3):
            try:
                os.rename(unfinished, self.folder / name)
                return
            except OSError:
                try:
                    if self.read(name) is not None:
                        return
                except Unusable:
                    self.remove(name)
        raise OSError(f"{self.folder / name} cannot be replaced")

    def entries(self) -> list[Listed]:
        """Those with a readable manifest, the last used first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            try:
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append(Listed(path.name, _manifest(path), size, (path / MANIFEST).stat().st_mtime))
            except (OSError, Unusable):  # not an entry, or one that another process removes at this moment
                continue
        return sorted(found, key=lambda entry: -entry.used)

    def remove(self, name: str) -> None:
        """Let the entry vanish at once, then delete its files."""
        gone = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.folder))
        with suppress(FileNotFoundError):  # another process was first
            os.rename(self.folder / name, gone / "gone")
        shutil.rmtree(gone, ignore_errors=True)

    def clear(self) -> int:
        """Remove everything; how many bytes that were."""
        size = sum(entry.size for entry in self.entries())
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
        return size

    def _trim(self) -> None:
        """Keep within `MAX_BYTES`, and drop what was never finished."""
        total = 0
        for entry in self.entries():
            total += entry.size
            if total > MAX_BYTES:
                log.info("%s was not used for longest and is dropped from %s", entry.name, self.folder)
                self.remove(entry.name)
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            try:
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
            except FileNotFoundError:
                continue


def untrusted(path: Path) -> str | None:
    """Why code from ``path`` must not run: who else could have written it. None where nobody could."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _demand_trusted(*paths: Path) -> None:
    for path in paths:
        if (why := untrusted(path)) is not None:
            raise Unusable(why)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest[_NAME] == FORMAT and isinstance(manifest["files"], dict):
            return dict(manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise Unusable(f"{path / MANIFEST} is no manifest: {type(error).__name__}") from error
    raise Unusable(f"{path / MANIFEST} is of format {manifest[_NAME]}, not {FORMAT}")


def _verified(path: Path, sums: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    for name, expected in sums.items():
        if Path(name).name != name:
            raise Unusable(f"{path / MANIFEST} names a file outside of its folder: {name!r}")
        _demand_trusted(path / name)
        data = (path / name).read_bytes()
        if expected != {"size": len(data), "sha256": _sha256(data)}:
            raise Unusable(f"{path / name} is not what was saved: {len(data)} bytes, or other ones")
        yield name, data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _touch(path: Path) -> None:
    with suppress(OSError):  # in an image, only root may
        os.utime(path)
