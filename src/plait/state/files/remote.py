"""Files behind a URI: an object store or a distributed file system, reached through fsspec.

Contract.  `put_if_absent` is atomic, or the storage is refused.  Two ways are known: object stores create a file on
the condition that it does not exist; Hadoop's file systems rename a finished file, and refuse if the target exists.
`prove` tries it out before a checkpoint is used: a service that ignores the condition is found then, not when two
drivers commit.  All else needs no more than files that appear complete (`upload` compares the size).

Credentials are the client's affair: fsspec's configuration files and `FSSPEC_…` variables, or the cloud's own.  What
goes wrong is a StorageError `STORAGE_UNREACHABLE` with the service's own words.

Cost.  Every call is a request or a few; nothing is cached, not even listings.  The client is made once per process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from plait.errors import CheckpointError, StorageError
from plait.state.files.storage import TEMPORARY, create_file, refuse_outside

SCHEMES = {
    "s3a": "s3fs",
    "s3": "s3fs",
    "gs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "webhdfs": "requests",
    "swebhdfs": "requests",
    "hdfs": "pyarrow",
}
"""What is known to create a file only if it is absent, and the package that fsspec needs for it."""

_RENAMES = ("webhdfs", "swebhdfs", "hdfs")
"""File systems with directories, whose rename refuses a target that exists.  The others have conditional creation."""

_PORTS = {"webhdfs": 9870, "swebhdfs": 9871}
"""As Hadoop has them; fsspec's is that of Hadoop 2."""

BLOCK = 4 << 20

_PART = 8 << 20
"""Of an upload; S3 takes no part below five megabytes."""


@dataclass(frozen=True)
class RemoteFiles:
    """Files below a URI.  Small and frozen: it travels to tasks, and each process makes its own client."""

    root: str

    @property
    def local(self) -> bool:
        """Never."""
        return False

    @property
    def scheme(self) -> str:
        """Of its URI."""
        return self.root.partition(":")[0].lower()

    def where(self, name: str) -> str:
        """Its URI."""
        refuse_outside(self.root, name)
        return f"{self.root}/{name}" if name else self.root

    def names(self, folder: str) -> list[str]:
        """The names in a folder; none if it does not exist."""
        with self._asking(folder) as (client, path):
            client.invalidate_cache()
            try:
                found = client.ls(path, detail=False)
            except FileNotFoundError:
                return []
        # Some stores list a marker of the folder itself.
        names = (name.rstrip("/").rpartition("/")[2] for name in found if name.strip("/") != path.strip("/"))
        return [name for name in names if name]

    def walk(self, folder: str) -> Iterator[tuple[str, int]]:
        """All files below a folder."""
        with self._asking(folder) as (client, path):
            client.invalidate_cache()
            found = client.find(path, detail=True)
        for full, info in sorted(found.items()):
            inside = full.strip("/").removeprefix(path.strip("/")).strip("/")
            if inside:
                yield f"{folder}/{inside}" if folder else inside, int(info.get("size") or 0)

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file, or None if there is none."""
        with self._asking(name) as (client, path):
            try:
                return bytes(client.cat_file(path))
            except FileNotFoundError:
                return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """Some megabytes at a time."""
        with self._asking(name) as (client, path):
            file = client.open(path, "rb", block_size=BLOCK)
        with file:
            while True:
                with self._asking(name):
                    block = bytes(file.read(BLOCK))
                if not block:
                    return
                yield block

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file with all of `data`, or not at all; False if it exists already."""
        with self._asking(name, writes=True) as (client, path):
            if self.scheme not in _RENAMES:
                try:
                    client.pipe_file(path, data, mode="create")
                except FileExistsError:
                    return False
                return True
            draft = self._draft(client, path, data)
            if not self._renamed(client, draft, path):
                return False
            # Whoever has the name has it for ever, so what is there now tells who won.
            return bytes(client.cat_file(path)) == data

    def replace(self, name: str, data: bytes, durable: bool = True) -> None:
        """Create or replace a file.  Where renames refuse a target, there is none for a moment."""
        with self._asking(name, writes=True) as (client, path):
            if self.scheme not in _RENAMES:
                client.pipe_file(path, data)
                return
            draft = self._draft(client, path, data)
            with contextlib.suppress(FileNotFoundError):
                client.rm_file(path)
            if not self._renamed(client, draft, path):
                raise OSError("another process writes the same file")

    def make_directory(self, name: str) -> None:
        """Where there are directories; object stores have none."""
        if self.scheme in _RENAMES:
            with self._asking(name, writes=True) as (client, path):
                client.makedirs(path, exist_ok=True)

    def move(self, name: str, to: str) -> None:
        """Give a finished file a name that no other has; an object store copies it."""
        with self._asking(name, writes=True) as (client, path):
            client.mv(path, self._path(to))

    def delete(self, name: str) -> None:
        """Delete a file, if that is possible."""
        with contextlib.suppress(StorageError, FileNotFoundError), self._asking(name) as (client, path):
            client.rm_file(path)

    def delete_older(self, name: str, than: float) -> bool:
        """Delete a file last changed at or before `than`, by the service's clock; whether it was."""
        changed = self.modified(name)
        if changed is None or changed > than:
            return False
        self.delete(name)
        return True

    def delete_tree(self, name: str) -> None:
        """Delete a folder and what is in it."""
        with self._asking(name) as (client, path), contextlib.suppress(FileNotFoundError):
            client.rm(path, recursive=True)

    def modified(self, name: str) -> float | None:
        """When a file was last changed, by the service's clock; None if there is none."""
        with self._asking(name) as (client, path):
            client.invalidate_cache()
            try:
                return float(client.modified(path).timestamp())
            except FileNotFoundError:
                return None

    def upload(self, local: BinaryIO, name: str) -> None:
        """Copies an open file of this machine, from its beginning, to a name that no other has."""
        size = local.seek(0, os.SEEK_END)
        local.seek(0)
        with self._asking(name, writes=True) as (client, path):
            with client.open(path, "wb", block_size=_PART) as file:
                shutil.copyfileobj(local, file, _PART)
            client.invalidate_cache()
            found = client.info(path)["size"]
            if found != size:
                raise OSError(f"{found} bytes arrived instead of {size}")

    def download(self, name: str, local: str) -> None:
        """Copies a file to a path of this machine; raises FileNotFoundError, or the OSError of this machine's disk."""
        with create_file(local) as file:
            for block in self.blocks(name):
                file.write(block)

    def prove(self) -> None:
        """Raises unless a name that exists is refused."""
        name = f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            kept = self.put_if_absent(name, b"first") and not self.put_if_absent(name, b"second")
            kept = kept and self.read(name) == b"first"
        finally:
            self.delete(name)
        if not kept:
            raise CheckpointError(
                "STORAGE_NOT_ATOMIC",
                f"{self.root} lets a file be created twice, so two drivers could both commit",
                "use a service with conditional writes (S3: If-None-Match) and a client that asks for them",
            )

    def _path(self, name: str) -> str:
        return str(self._client()._strip_protocol(self.where(name))).rstrip("/")

    def _client(self) -> Any:
        """fsspec's file system; it keeps one per process."""
        package = SCHEMES[self.scheme]
        try:
            from fsspec.core import url_to_fs

            if self.scheme in _PORTS:
                host = self.root.split("/")[2]
                options: dict[str, Any] = {"use_https": True} if self.scheme == "swebhdfs" else {}
                if not host.rpartition("@")[2].partition(":")[2]:
                    options["port"] = _PORTS[self.scheme]
                return url_to_fs(f"webhdfs://{host}/", **options)[0]
            return url_to_fs(self.root)[0]
        except ImportError as error:
            raise CheckpointError(
                "STORAGE_CLIENT",
                f"{self.root} needs a client that is not installed: {error}",
                f"pip install {package}, on the driver and on every executor",
            ) from error

    @contextmanager
    def _asking(self, name: str, writes: bool = False) -> Iterator[tuple[Any, str]]:
        """The client and the path it knows a file by; what goes wrong, in words.

        FileNotFoundError goes through, unless something is written: then a bucket is missing, or the like.
        """
        try:
            client = self._client()
            yield client, self._path(name)
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not writes:
                raise
            said = f"{type(error).__name__}: {error}"[:500]
            raise StorageError(
                "STORAGE_UNREACHABLE",
                f"{self.where(name)} cannot be used: {said}",
                "check the service, the network and the credentials (docs/operations.md), then start again: what was "
                "committed stays",
            ) from error

    def _draft(self, client: Any, path: str, data: bytes) -> str:
        draft = f"{path.rpartition('/')[0]}/{TEMPORARY}{uuid.uuid4().hex}"
        client.pipe_file(draft, data)
        return draft

    def _renamed(self, client: Any, draft: str, path: str) -> bool:
        """Whether a draft has got its name.  The client may not say so, but then the draft is still there."""
        try:
            client.mv(draft, path)
        except Exception:
            if not (_exists(client, draft) and _exists(client, path)):
                raise
        if not _exists(client, draft):
            return True
        client.rm_file(draft)
        return False


def _exists(client: Any, path: str) -> bool:
    """fsspec's own `exists` takes every failure for a no."""
    client.invalidate_cache()
    try:
        client.info(path)
    except FileNotFoundError:
        return False
    return True
