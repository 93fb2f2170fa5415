"""A small WebHDFS service over a directory: enough for Hadoop's client inside Spark and for fsspec's.

What it keeps of HDFS is what a checkpoint relies on: a rename refuses a target that exists, atomically.  It can be
stopped and started again on the same port, and what it holds lies in `folder`, to be damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/webhdfs/v1"


class Refused(Exception):
    """What HDFS answers with a RemoteException."""

    def __init__(self, status: int, kind: str, java: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.java = status, kind, java


def gone(path: str) -> Refused:
    return Refused(404, "FileNotFoundException", "java.io.FileNotFoundException", f"File does not exist: {path}")


def exists(path: str) -> Refused:
    kind = "FileAlreadyExistsException"
    return Refused(403, kind, f"org.apache.hadoop.fs.{kind}", f"{path} already exists")


class Handler(BaseHTTPRequestHandler):
    """One request.  CREATE, APPEND and OPEN are asked twice: of the name node, which sends on to a data node."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer()

    do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        asked = {key.lower(): values[-1] for key, values in parse_qs(parts.query).items()}
        path = unquote(parts.path.removeprefix(PREFIX)) or "/"
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b"".join(self._chunks())
        try:
            operation = asked.get("op", "").lower()
            self.server.asked.append((operation, path))
            getattr(self, f"op_{operation}")(path, self.server.folder / path.strip("/"), asked, body)
        except Refused as error:
            said = {"exception": error.kind, "javaClassName": error.java, "message": str(error)}
            self._json({"RemoteException": said}, error.status)
        except AttributeError:
            self._json({"RemoteException": {"exception": "UnsupportedOperationException", "message": self.path}}, 400)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _json(self, value: Any, status: int = 200) -> None:
        self._bytes(json.dumps(value).encode(), status)

    def _bytes(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        # No Content-Type: to read one, Hadoop's client wants classes that are not in Spark's shaded jars (3.5.0).
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _sent_on(self, asked: dict[str, str]) -> bool:
        """The first of two requests: says where to send the bytes."""
        if "there" in asked:
            return False
        location = f"http://localhost:{self.server.server_port}{self.path}&there=1"
        if asked.get("noredirect") == "true":
            self._json({"Location": location})
            return True
        self.send_response(307)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def op_create(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        if at.is_dir() or (asked.get("overwrite") == "false" and at.exists()):
            raise exists(path)
        if self._sent_on(asked):
            return
        at.parent.mkdir(parents=True, exist_ok=True)
        with open(at, "xb" if asked.get("overwrite") == "false" else "wb") as file:
            file.write(body)
        self._bytes(b"", 201)

    def op_append(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        if not at.is_file():
            raise gone(path)
        if not self._sent_on(asked):
            with open(at, "ab") as file:
                file.write(body)
            self._bytes(b"")

    def op_open(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        if not at.is_file():
            raise gone(path)
        if not self._sent_on(asked):
            data = at.read_bytes()
            begin = int(asked.get("offset", 0))
            end = begin + int(asked["length"]) if asked.get("length", "null") != "null" else len(data)
            self._bytes(data[begin:end])

    def _status(self, at: Path, suffix: str = "") -> dict[str, Any]:
        found = at.stat()
        folder = stat.S_ISDIR(found.st_mode)
        return {
            "accessTime": int(found.st_atime * 1000),
            "blockSize": 0 if folder else 128 << 20,
            "childrenNum": 0,
            "fileId": found.st_ino,
            "group": "tests",
            "length": 0 if folder else found.st_size,
            "modificationTime": int(found.st_mtime * 1000),
            "owner": "tests",
            "pathSuffix": suffix,
            "permission": "755",
            "replication": 1,
            "type": "DIRECTORY" if folder else "FILE",
        }

    def op_getfilestatus(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        try:
            self._json({"FileStatus": self._status(at)})
        except (FileNotFoundError, NotADirectoryError):
            raise gone(path) from None

    op_getfilelinkstatus = op_getfilestatus

    def op_liststatus(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        found = []
        try:
            names = [""] if at.is_file() else sorted(os.listdir(at))
        except FileNotFoundError:
            raise gone(path) from None
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append(self._status(at / name if name else at, name))
        self._json({"FileStatuses": {"FileStatus": found}})

    def op_getfileblocklocations(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        if not at.is_file():
            raise gone(path)
        block = {"offset": 0, "length": at.stat().st_size, "corrupt": False, "hosts": ["localhost"], "cachedHosts": []}
        block |= {"names": ["localhost:1"], "storageTypes": ["DISK"], "topologyPaths": ["/default-rack/localhost:1"]}
        self._json({"BlockLocations": {"BlockLocation": [block]}})

    def op_mkdirs(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        try:
            at.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise exists(path) from None
        self._json({"boolean": True})

    def op_rename(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        to = self.server.folder / asked["destination"].strip("/")
        with self.server.renaming:
            if to.is_dir():
                to = to / at.name
            overwrite = "overwrite" in asked.get("renameoptions", "").lower()
            done = at.exists() and to.parent.is_dir() and (overwrite or not to.exists())
            if done:
                os.replace(at, to)
        self._json({"boolean": done})

    def op_delete(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        there = at.exists()
        if at.is_dir() and asked.get("recursive") == "true":
            shutil.rmtree(at)
        elif at.is_dir():
            at.rmdir()
        elif there:
            with contextlib.suppress(FileNotFoundError):
                at.unlink()
        self._json({"boolean": there})

    def op_gethomedirectory(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        self._json({"Path": "/user/tests"})

    def op_getserverdefaults(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        sizes = {"blockSize": 128 << 20, "bytesPerChecksum": 512, "writePacketSize": 65536, "fileBufferSize": 4096}
        rest = {"replication": 1, "encryptDataTransfer": False, "trashInterval": 0, "checksumType": 2}
        self._json({"FsServerDefaults": {**sizes, **rest, "keyProviderUri": "", "defaultStoragePolicyId": 0}})

    def op_settimes(self, path: str, at: Path, asked: dict[str, str], body: bytes) -> None:
        self._bytes(b"")

    op_setpermission = op_setowner = op_settimes


class Server(ThreadingHTTPServer):
    """The service at work."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.renaming = folder, threading.Lock()
        self.asked: list[tuple[str, str]] = []
        self._open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Ends the connections that clients keep."""
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(2)


class WebHdfs:
    """Started and stopped by tests; `folder` is what it serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = 0
        self.start()

    def start(self) -> None:
        self.server = Server(self.folder, self.port)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.server.hang_up()

    def uri(self, path: str) -> str:
        return f"webhdfs://localhost:{self.port}/{path}"

    def at(self, uri: str) -> Path:
        """The file that a URI of this service means."""
        return self.folder / uri.removeprefix(self.uri(""))
