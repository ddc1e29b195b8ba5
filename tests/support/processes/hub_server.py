"""A local server with the part of the hub's API that downloads need."""

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")
_TREE = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")

Files = dict[str, bytes]


@dataclass
class Repository:
    """A model at the hub: its commits, and the token that may read it."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None  # of a private repository
    gated: bool = False

    def commit(self, files: Files, ref: str = "main") -> str:
        """Adds a commit and points `ref` to it; returns its hash."""
        digest = hashlib.sha1(repr((sorted(files), len(self.commits))).encode())
        digest.update(b"".join(files.values()))
        self.commits[digest.hexdigest()] = files
        self.refs[ref] = digest.hexdigest()
        return digest.hexdigest()


@dataclass
class Hub:
    """The server's repositories, the requests of clients, and its faults."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    ranges: list[tuple[str, str]] = field(default_factory=list)  # path and Range of partial reads
    # File name, and number of bytes after which the connection breaks; each entry applies once.
    breaks: list[tuple[str, int]] = field(default_factory=list)
    status: int | None = None  # the answer to every request
    delay: float = 0.0  # seconds before the last byte of a file
    refused_token: str | None = None

    def add(self, name: str, files: Files) -> Repository:
        """A repository with one commit, `main`."""
        self.repositories[name] = Repository()
        self.repositories[name].commit(files)
        return self.repositories[name]

    def downloaded(self) -> set[str]:
        """The names of the files that clients read."""
        return {
            match["path"]
            for method, path in self.requests
            if method == "GET" and (match := _FILE.fullmatch(path))
        }


def files_of(folder: Path) -> Files:
    """The files of a model folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serves on a free port of this machine until the end of the block."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = _Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, address: object) -> None:
        """Ignores closed connections: the client may have been killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, *args: object) -> None:
        """Logs nothing: `requests` records the requests."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((self.command, path))
        if self.state.status is not None:
            self._fail(self.state.status, "", "the hub is not well")
            return
        given = self.headers.get("authorization", "").removeprefix("Bearer ")
        if given and given == self.state.refused_token:
            self._fail(401, "", "Invalid credentials in Authorization header")
            return
        match = _INFO.fullmatch(path) or _TREE.fullmatch(path) or _FILE.fullmatch(path)
        repository = self.state.repositories.get(match["name"]) if match else None
        if match is None or repository is None or repository.token not in (None, given):
            self._fail(401 if not given else 404, "RepoNotFound", "Repository not found")
            return
        commit = repository.refs.get(match["revision"], match["revision"])
        if commit not in repository.commits:
            self._fail(404, "RevisionNotFound", "Invalid rev id")
            return
        files = repository.commits[commit]
        if match.re is _INFO:
            self._send_json({"id": match["name"], "sha": commit, "siblings": []})
        elif match.re is _TREE:
            self._send_json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in files.items()
                ]
            )
        elif repository.gated:
            self._fail(403 if given else 401, "GatedRepo", "Access to this model is restricted")
        elif match["path"] not in files:
            self._fail(404, "EntryNotFound", "Entry not found")
        else:
            self._send_file(match["path"], files[match["path"]], commit, with_body)

    def _send_file(self, name: str, data: bytes, commit: str, with_body: bool) -> None:
        begin, wanted = 0, self.headers.get("Range")
        if wanted and with_body:
            self.state.ranges.append((name, wanted))
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        at = next((i for i, (broken, _) in enumerate(self.state.breaks) if broken == name), None)
        if at is None:
            self.wfile.write(data[begin:-1])
            time.sleep(self.state.delay)
            self.wfile.write(data[max(begin, len(data) - 1) :])
        else:
            _, size = self.state.breaks.pop(at)
            self.wfile.write(data[begin : begin + size])
            self.wfile.flush()
            self.close_connection = True

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
