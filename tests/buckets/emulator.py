"""Buckets of Google Cloud Storage in the memory of one process, and their failures on request.

    python -m tests.buckets.emulator [PORT]

Prints its address, and ends with its standard input. What TensorStore, gcsfs and
google-cloud-storage ask for is answered as the JSON API documents it: objects with generations,
preconditions, listings in pages with prefix and delimiter, media, multipart and resumable uploads,
ranges, moves. All else is refused with 501. https://cloud.google.com/storage/docs/json_api

Beside it stand
    POST /faults     a JSON list of `Fault`s, which replaces those before
    GET  /requests   {"PUT /upload/...": times asked, "faults": times refused}
"""

import base64
import collections
import dataclasses
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
    """A way to fail.

    Attributes:
      status: of the answer; 0 closes the connection without one, -1 in the midst of it. 200 with
        `after` is an answer that comes late.
      where: regular expression, looked for in "METHOD /path?query".
      times: how many requests fail so; -1 for all until other faults are set.
      after: whether the request is done all the same, and only its answer is lost.
      seconds: that pass before the answer.
      skip: matching requests that are answered before the first failure.
    """

    status: int = 503
    where: str = ""
    times: int = -1
    after: bool = False
    seconds: float = 0.0
    skip: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is sent back."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fault: Fault | None = None


@dataclasses.dataclass(frozen=True)
class Stored:
    """One object, as it was written at one time."""

    bucket: str
    name: str
    content: bytes
    generation: int
    content_type: str
    metadata: Mapping[str, str]
    created: float

    def resource(self, address: str) -> dict[str, Any]:
        """As the API of an address describes it."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.created))
        stamp = f"{when}.{int(self.created % 1 * 1000):03d}Z"
        crc = google_crc32c.value(self.content).to_bytes(4, "big")
        path = f"storage/v1/b/{self.bucket}/o/{urllib.parse.quote(self.name, safe='')}"
        download = f"{address}/download/{path}"
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "selfLink": f"{address}/{path}",
            "mediaLink": f"{download}?generation={self.generation}&alt=media",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": self.content_type,
            "metadata": dict(self.metadata),
            "storageClass": "STANDARD",
            "size": str(len(self.content)),
            "md5Hash": base64.b64encode(hashlib.md5(self.content).digest()).decode(),
            "crc32c": base64.b64encode(crc).decode(),
            "etag": f"e{self.generation}",
            "timeCreated": stamp,
            "updated": stamp,
        }


class Refused(Exception):
    """An error of the API: status and message."""


class Service:
    """All buckets, without the network."""

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, Stored]] = {}
        self._uploads: dict[str, tuple[str, dict[str, Any], Mapping[str, str], bytearray]] = {}
        # Distinct and growing, as of the service, also from one process to the next.
        self._generations = itertools.count(time.time_ns() // 1000)
        self._faults: list[Fault] = []
        self._asked: collections.Counter[str] = collections.Counter()

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Does what a request asks, or fails as it was told to."""
        if target == "/faults":
            with self._lock:
                self._faults = [Fault(**fault) for fault in json.loads(body)]
            return Answer(200)
        if target == "/requests":
            with self._lock:
                return _json(dict(self._asked))
        fault = self._fault(f"{method} {target}")
        if fault is not None:
            time.sleep(fault.seconds)
            if not fault.after:
                return dataclasses.replace(_error(fault.status, "told to fail"), fault=fault)
        try:
            answer = self._dispatch(method, target, headers, body)
        except Refused as refused:
            answer = _error(*refused.args)
        if fault is None or fault.status == 200:
            return answer
        if fault.status > 0:
            answer = _error(fault.status, "told to fail after it was done")
        return dataclasses.replace(answer, fault=fault)

    def _fault(self, request: str) -> Fault | None:
        with self._lock:
            self._asked[re.sub(r"\?.*", "", request)] += 1
            for fault in self._faults:
                if fault.times and re.search(fault.where, request):
                    if fault.skip:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    self._asked["faults"] += 1
                    return fault
        return None

    def _dispatch(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        path, _, query = target.partition("?")
        given = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        with self._lock:
            match parts:
                case ["upload", "storage", "v1", "b", bucket, "o"]:
                    return self._upload(bucket, given, headers, body)
                case ["storage", "v1", "b"]:
                    return self._make_bucket(json.loads(body)["name"])
                case ["storage", "v1", "b", bucket]:
                    self._objects(bucket)
                    return _json({"kind": "storage#bucket", "name": bucket, "id": bucket})
                case ["storage", "v1", "b", bucket, "o"]:
                    return self._list(self._objects(bucket), given)
                case ["storage" | "download", *_, "v1", "b", bucket, "o", name]:
                    return self._object(method, bucket, name, given, headers)
                case ["storage", "v1", "b", bucket, "o", name, "moveTo", "o", other]:
                    moved = self._copy(bucket, name, other, given)
                    del self._objects(bucket)[name]
                    return _json(moved.resource(self._address))
        raise Refused(501, f"{method} {target} is not known here")

    # --- Buckets ----------------------------------------------------------------------------------

    def _make_bucket(self, name: str) -> Answer:
        if name in self._buckets:
            raise Refused(409, f"bucket {name} exists")
        self._buckets[name] = {}
        return _json({"kind": "storage#bucket", "name": name, "id": name})

    def _objects(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self._buckets:
            raise Refused(404, "The specified bucket does not exist.")
        return self._buckets[bucket]

    def _list(self, objects: Mapping[str, Stored], given: Mapping[str, str]) -> Answer:
        prefix, delimiter = given.get("prefix", ""), given.get("delimiter", "")
        start, end = given.get("startOffset", ""), given.get("endOffset", "")
        after, most = given.get("pageToken", ""), min(int(given.get("maxResults", _PAGE)), _PAGE)
        items, prefixes, last = [], [], ""
        for name in sorted(objects):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            rest = name[len(prefix) :]
            folder = ""
            if delimiter and delimiter in rest:
                folder = prefix + rest[: rest.index(delimiter) + len(delimiter)]
            entry = folder or name
            if (after and entry <= after) or entry in prefixes:
                continue
            if len(items) + len(prefixes) == most:
                found = {"items": items, "prefixes": prefixes, "nextPageToken": last}
                return _json({"kind": "storage#objects", **found})
            if folder:
                prefixes.append(folder)
            if not folder or (given.get("includeTrailingDelimiter") == "true" and folder == name):
                items.append(objects[name].resource(self._address))
            last = entry
        found = {"items": items, "prefixes": prefixes}
        kept = {key: value for key, value in found.items() if value}
        return _json({"kind": "storage#objects", **kept})

    # --- Objects ----------------------------------------------------------------------------------

    def _object(
        self,
        method: str,
        bucket: str,
        name: str,
        given: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> Answer:
        stored = self._checked(bucket, name, given, reads=method in ("GET", "HEAD"))
        if stored is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        if method == "DELETE":
            del self._objects(bucket)[name]
            return Answer(204)
        if given.get("alt") != "media":
            return _json(stored.resource(self._address))
        return self._media(stored, headers.get("Range", ""))

    def _media(self, stored: Stored, asked: str) -> Answer:
        """The content, or the range of it that is asked for."""
        size = len(stored.content)
        headers = {
            "Content-Type": stored.content_type,
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Stored-Content-Length": str(size),
            "ETag": f'"e{stored.generation}"',
        }
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
        if found is None or found.groups() == ("", ""):
            crc = stored.resource(self._address)["crc32c"]
            return Answer(200, stored.content, {**headers, "X-Goog-Hash": f"crc32c={crc}"})
        first, last = found.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last) + 1, size) if first and last else size
        if start >= end:
            return dataclasses.replace(
                _error(416, "The requested range cannot be satisfied: InvalidRange."),
                headers={"Content-Range": f"bytes */{size}"},
            )
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return Answer(206, stored.content[start:end], headers)

    def _checked(
        self, bucket: str, name: str, given: Mapping[str, str], *, reads: bool = False
    ) -> Stored | None:
        """The object, if the preconditions of the request hold."""
        stored = self._objects(bucket).get(name)
        found = stored.generation if stored else 0
        if "generation" in given and int(given["generation"]) != found:
            raise Refused(404, f"No such object: {bucket}/{name}#{given['generation']}")
        wanted = given.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != found:
            if reads and not found:
                raise Refused(404, f"No such object: {bucket}/{name}")
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
        unwanted = given.get("ifGenerationNotMatch")
        if unwanted is not None and int(unwanted) == found:
            if reads and not found:
                raise Refused(404, f"No such object: {bucket}/{name}")
            raise Refused(304 if reads else 412, "The generation is as it was.")
        return stored

    def _write(
        self, bucket: str, resource: Mapping[str, Any], given: Mapping[str, str], content: bytes
    ) -> Stored:
        name = resource.get("name") or given["name"]
        self._checked(bucket, name, {k: v for k, v in given.items() if k.startswith("if")})
        stored = Stored(
            bucket,
            name,
            content,
            next(self._generations),
            resource.get("contentType", "application/octet-stream"),
            resource.get("metadata") or {},
            time.time(),
        )
        self._objects(bucket)[name] = stored
        return stored

    def _copy(self, bucket: str, name: str, to: str, given: Mapping[str, str]) -> Stored:
        source = self._objects(bucket).get(name)
        if source is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        resource = {
            "name": to, "contentType": source.content_type, "metadata": source.metadata
        }  # fmt: skip
        return self._write(bucket, resource, given, source.content)

    # --- Uploads ----------------------------------------------------------------------------------

    def _upload(
        self, bucket: str, given: dict[str, str], headers: Mapping[str, str], body: bytes
    ) -> Answer:
        self._objects(bucket)
        how = given.pop("uploadType", "media")
        if identity := given.pop("upload_id", ""):
            return self._resume_upload(identity, headers, body)
        if how == "media":
            content_type = headers.get("Content-Type", "application/octet-stream")
            resource = {"name": given["name"], "contentType": content_type}
            return _json(self._write(bucket, resource, given, body).resource(self._address))
        if how == "multipart":
            resource, content = _multipart(headers["Content-Type"], body)
            return _json(self._write(bucket, resource, given, content).resource(self._address))
        identity = f"upload{next(self._generations)}"
        resource = {
            "name": given.get("name"),
            "contentType": headers.get("X-Upload-Content-Type", "application/octet-stream"),
            **json.loads(body or b"{}"),
        }
        # Preconditions are told at once, and hold when the object appears.
        self._checked(bucket, resource["name"], {k: v for k, v in given.items() if k[:2] == "if"})
        self._uploads[identity] = bucket, resource, given, bytearray()
        place = f"{self._address}/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
        return Answer(200, b"", {"Location": f"{place}&upload_id={identity}"})

    def _resume_upload(self, identity: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if identity not in self._uploads:
            raise Refused(404, "no such upload")
        bucket, resource, given, content = self._uploads[identity]
        found = re.fullmatch(
            r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", headers.get("Content-Range", "bytes */*")
        )
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
        return _json(self._write(bucket, resource, given, bytes(content)).resource(self._address))


def _json(value: Any) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _error(status: int, message: str) -> Answer:
    error = {"error": {"code": status, "message": message, "errors": [{"message": message}]}}
    return dataclasses.replace(_json(error), status=status)


def _multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Description and content of an object. By hand, as parsers of mail change line ends."""
    found = re.search(r"boundary=[\"']?([^\"';]+)", content_type)
    if found is None:
        raise Refused(400, "the multipart request has no boundary")
    mark = b"--" + found[1].encode()
    parts = []
    for part in body.split(mark)[1:3]:
        head, gap, content = re.split(rb"(\r?\n\r?\n)", part, maxsplit=1)
        end = b"\r\n" if gap.startswith(b"\r") else b"\n"
        parts.append((head, content.removesuffix(end)))
    (_, description), (head, content) = parts
    resource = json.loads(description)
    kind = re.search(rb"(?i)content-type: *([^\r\n]+)", head)
    if kind and "contentType" not in resource:
        resource["contentType"] = kind[1].decode()
    return resource, content


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    service: Service
    # Else an answer in two writes waits 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = -1

    def _answer(self) -> None:
        body = self._body()
        answer = self.service.answer(self.command, self.path, self.headers, body)
        status = answer.fault.status if answer.fault else answer.status
        if status == 0:
            self.close_connection = True
            return
        self.send_response(answer.status if status < 0 else status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        content = b"" if status in (204, 304) else answer.body
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if status < 0 else content)
        self.wfile.flush()
        self.close_connection |= status < 0

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _answer

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

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
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
