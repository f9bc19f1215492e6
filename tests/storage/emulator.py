"""Buckets of Google Cloud Storage in the memory of one process, and their failures on request.

    python -m tests.storage.emulator [PORT]

Prints its address, and ends with its standard input. What TensorStore, gcsfs and
google-cloud-storage ask for is answered as the JSON API documents it: objects with generations,
preconditions, listings in pages with prefix and delimiter, media, multipart and resumable uploads,
ranges, moves. All else is refused with 501. https://cloud.google.com/storage/docs/json_api

Next to it stand
    POST /faults     a JSON list of `Fault`s, which replaces those before
    GET  /requests   {"PUT /upload/...": times asked, "LIST prefix": times listed, "faults": times
                     refused}
"""

import base64
import collections
import dataclasses
import datetime
import hashlib
import http.server
import itertools
import json
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import google_crc32c

_PAGE = 1000  # entries of a listing, as of the service


@dataclasses.dataclass
class Fault:
    """A way to fail."""

    # 0 closes the connection without an answer, -1 in the middle of one; 200 with `after` is late.
    status: int = 503
    where: str = ""  # regular expression, searched in "METHOD /path?query"
    times: int = -1  # requests that fail so; -1: all until other faults are set
    after: bool = False  # whether the request is done all the same, and only its answer is lost
    seconds: float = 0.0  # before the answer
    skip: int = 0  # matching requests that are answered before the first failure


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Refused(Exception):
    """An error of the API: status, message, and perhaps headers."""


# What the API says of an object, and its content.
_Stored = tuple[dict[str, Any], bytes]


class Service:
    """All buckets, without the network."""

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, _Stored]] = {}
        self._uploads: dict[str, tuple[str, dict[str, Any], Mapping[str, str], bytearray]] = {}
        # Distinct and growing, as of the service, also from one process to the next.
        self._generations = itertools.count(time.time_ns() // 1000)
        self._faults: list[Fault] = []
        self._asked: collections.Counter[str] = collections.Counter()

    def control(self, target: str, body: bytes) -> Answer:
        """Sets faults, or tells what was asked for."""
        with self._lock:
            if target == "/faults":
                self._faults = [Fault(**fault) for fault in json.loads(body)]
            return _json(200, dict(self._asked))

    def fault(self, request: str) -> Fault | None:
        """Counts a request; tells how it fails."""
        with self._lock:
            path, _, query = request.partition("?")
            self._asked[path] += 1
            given = dict(urllib.parse.parse_qsl(query))
            if "delimiter" in given and given.get("maxResults") != "1":  # else: is it a folder?
                self._asked[f"LIST {given.get('prefix', '')}"] += 1
            for fault in self._faults:
                if fault.times and re.search(fault.where, request):
                    if fault.skip:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    self._asked["faults"] += 1
                    return fault
        return None

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        try:
            with self._lock:
                found = self._dispatch(method, target, headers, body)
        except Refused as refused:
            return _error(*refused.args)
        return found if isinstance(found, Answer) else _json(200, found)

    def _dispatch(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Any:
        path, _, query = target.partition("?")
        given = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        match [urllib.parse.unquote(part) for part in path.strip("/").split("/")]:
            case ["upload", "storage", "v1", "b", bucket, "o"]:
                return self._upload(bucket, given, headers, body)
            case ["storage", "v1", "b"]:
                name = json.loads(body)["name"]
                if name in self._buckets:
                    raise Refused(409, f"bucket {name} exists")
                self._buckets[name] = {}
                return {"name": name}
            case ["storage", "v1", "b", bucket]:
                self._objects(bucket)
                return {"name": bucket}
            case ["storage", "v1", "b", bucket, "o"]:
                return self._list(self._objects(bucket), given)
            case ["storage" | "download", *_, "v1", "b", bucket, "o", name]:
                return self._object(method, bucket, name, given, headers)
            case ["storage", "v1", "b", bucket, "o", name, "moveTo", "o", other]:
                described, content = self._checked(bucket, name, {}) or _no_object(bucket, name)
                moved = self._write(bucket, described | {"name": other}, given, content)
                del self._objects(bucket)[name]
                return moved
        raise Refused(501, f"{method} {target} is not known here")

    def _objects(self, bucket: str) -> dict[str, _Stored]:
        if bucket not in self._buckets:
            raise Refused(404, "The specified bucket does not exist.")
        return self._buckets[bucket]

    def _list(self, objects: Mapping[str, _Stored], given: Mapping[str, str]) -> dict[str, Any]:
        prefix, delimiter = given.get("prefix", ""), given.get("delimiter", "")
        start, end = given.get("startOffset", ""), given.get("endOffset", "")
        most = min(int(given.get("maxResults", _PAGE)), _PAGE)
        entries = {}  # an object's description, or None for a folder
        for name in sorted(objects):
            if name.startswith(prefix) and name >= start and (not end or name < end):
                at = name.find(delimiter, len(prefix)) if delimiter else -1
                if at < 0:
                    entries[name] = objects[name][0]
                else:
                    entries[name[: at + len(delimiter)]] = None
        names = [name for name in entries if name > given.get("pageToken", "")]
        found = {
            "items": [entries[name] for name in names[:most] if entries[name]],
            "prefixes": [name for name in names[:most] if not entries[name]],
            "nextPageToken": names[most - 1] if len(names) > most else "",
        }
        return {key: value for key, value in found.items() if value}

    def _object(
        self, method: str, bucket: str, name: str, given: dict[str, str], headers: Mapping[str, str]
    ) -> Any:
        reads = method in ("GET", "HEAD")
        described, content = self._checked(bucket, name, given, reads) or _no_object(bucket, name)
        if method == "DELETE":
            del self._objects(bucket)[name]
            return Answer(204)
        if given.get("alt") != "media":
            return described
        size = len(content)
        headers_sent = {
            "Content-Type": described["contentType"],
            "X-Goog-Generation": described["generation"],
            "X-Goog-Metageneration": "1",
            "X-Goog-Stored-Content-Length": str(size),
            "ETag": f'"{described["generation"]}"',
        }
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
        if found is None or found.groups() == ("", ""):
            checksum = {"X-Goog-Hash": f"crc32c={described['crc32c']}"}
            return Answer(200, content, headers_sent | checksum)
        first, last = found.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last) + 1, size) if first and last else size
        if start >= end:
            where = {"Content-Range": f"bytes */{size}"}
            raise Refused(416, "The requested range cannot be satisfied: InvalidRange.", where)
        headers_sent["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return Answer(206, content[start:end], headers_sent)

    def _checked(
        self, bucket: str, name: str, given: Mapping[str, str], reads: bool = False
    ) -> _Stored | None:
        """The object, if the preconditions of the request hold."""
        stored = self._objects(bucket).get(name)
        found = int(stored[0]["generation"]) if stored else 0
        if reads and not found:
            return None
        if int(given.get("generation", found)) != found:
            raise Refused(404, f"No such object: {bucket}/{name}#{given['generation']}")
        if int(given.get("ifGenerationMatch", found)) != found:
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
        if given.get("ifGenerationNotMatch") == str(found):
            raise Refused(304 if reads else 412, "The generation is as it was.")
        return stored

    def _write(
        self, bucket: str, described: Mapping[str, Any], given: Mapping[str, str], content: bytes
    ) -> dict[str, Any]:
        name = described.get("name") or given["name"]
        self._checked(bucket, name, _preconditions(given))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        crc = google_crc32c.value(content).to_bytes(4, "big")
        resource = {
            "name": name,
            "bucket": bucket,
            "generation": str(next(self._generations)),
            "metageneration": "1",
            "contentType": described.get("contentType", "application/octet-stream"),
            "metadata": described.get("metadata") or {},
            "size": str(len(content)),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "crc32c": base64.b64encode(crc).decode(),
            "timeCreated": now,
            "updated": now,
        }
        self._objects(bucket)[name] = resource, content
        return resource

    def _upload(
        self, bucket: str, given: dict[str, str], headers: Mapping[str, str], body: bytes
    ) -> Any:
        self._objects(bucket)
        how = given.pop("uploadType", "media")
        if identity := given.pop("upload_id", ""):
            return self._resume_upload(identity, headers, body)
        if how == "media":
            kind = headers.get("Content-Type", "application/octet-stream")
            return self._write(bucket, {"contentType": kind}, given, body)
        if how == "multipart":
            described, content = _multipart(headers["Content-Type"], body)
            return self._write(bucket, described, given, content)
        kind = headers.get("X-Upload-Content-Type", "application/octet-stream")
        described = {"name": given.get("name"), "contentType": kind} | json.loads(body or b"{}")
        # Preconditions are answered at once, and hold when the object appears.
        self._checked(bucket, described["name"], _preconditions(given))
        identity = f"upload{next(self._generations)}"
        self._uploads[identity] = bucket, described, given, bytearray()
        place = f"{self._address}/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
        return Answer(200, b"", {"Location": f"{place}&upload_id={identity}"})

    def _resume_upload(self, identity: str, headers: Mapping[str, str], body: bytes) -> Any:
        if identity not in self._uploads:
            raise Refused(404, "no such upload")
        bucket, described, given, content = self._uploads[identity]
        sent = headers.get("Content-Range", "bytes */*")
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", sent)
        if found is None:
            raise Refused(400, "the Content-Range cannot be read")
        first, _, total = found.groups()
        if first is not None:
            if int(first) > len(content):
                raise Refused(503, f"{len(content)} bytes are here, and {first} is next")
            content[int(first) :] = body
        elif body or total == "0":
            content[:] = body
        if total == "*" or len(content) < int(total):
            reached = {"Range": f"bytes=0-{len(content) - 1}"} if content else {}
            return Answer(308, b"", reached)
        del self._uploads[identity]
        return self._write(bucket, described, given, bytes(content))


def _no_object(bucket: str, name: str) -> _Stored:
    raise Refused(404, f"No such object: {bucket}/{name}")


def _preconditions(given: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in given.items() if key.startswith("if")}


def _json(status: int, value: Any) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    error = {"error": {"code": status, "message": message, "errors": [{"message": message}]}}
    answer = _json(status, error)
    return dataclasses.replace(answer, headers={**answer.headers, **(headers or {})})


def _multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Description and content of an object. By hand, as parsers of mail change line ends."""
    found = re.search(r"boundary=[\"']?([^\"';]+)", content_type)
    if found is None:
        raise Refused(400, "the multipart request has no boundary")
    parts = []
    for part in body.split(b"--" + found[1].encode())[1:3]:
        head, gap, content = re.split(rb"(\r?\n\r?\n)", part, maxsplit=1)
        end = b"\r\n" if gap.startswith(b"\r") else b"\n"
        parts.append((head, content.removesuffix(end)))
    (_, description), (head, content) = parts
    kind = re.search(rb"(?i)content-type: *([^\r\n]+)", head)
    default = {"contentType": kind[1].decode()} if kind else {}
    return default | json.loads(description), content


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service
    # Else an answer in two writes waits 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = -1

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path in ("/faults", "/requests"):
            self._send(self.service.control(self.path, body))
            return
        fault = self.service.fault(f"{self.command} {self.path}")
        answer = _error(fault.status if fault else 0, "told to fail")
        if fault is not None:
            time.sleep(fault.seconds)
        if fault is None or fault.after:
            done = self.service.answer(self.command, self.path, self.headers, body)
            if fault is None or fault.status == 200:
                answer = done
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.close_connection |= answer.status <= 0
        if answer.status == 0:
            return
        self.send_response(max(answer.status, 200))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        has_content = answer.status not in (204, 304)
        if has_content:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if has_content and self.command != "HEAD":
            cut = len(answer.body) // 2 if answer.status < 0 else None
            self.wfile.write(answer.body[:cut])
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: /requests has the counts."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Programs that are killed leave connections in the midst of a request."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    """Serves until the standard input ends, as it does with the process that started this one."""
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with _Server(("127.0.0.1", port), _Handler) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        _Handler.service = Service(address)
        print(address, flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
