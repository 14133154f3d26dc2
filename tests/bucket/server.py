"""An object store on loopback that TensorFlow's own client for gs:// talks to: no rename, no append, no locks.

    python tests/bucket/server.py FOLDER

TensorFlow has the hosts of Google's store compiled in, but libcurl below it honours a proxy for HTTPS, and TensorFlow a
file of certificates. So this is a proxy that answers for those hosts itself. It prints the variables for processes that
are to use it, and runs until its standard input ends. Every bucket exists but "missing", and nobody may write "locked".
Requests to http://127.0.0.1:PORT/_control change it: `fail=0.3` answers 30 % of the writes with 503, `fail_reads=0.3`
of the reads, `deny=1` all with 403, `latency=0.05` delays each request, `requests` returns the number of requests so
far, and `bytes_read` the bytes of all objects, or parts of them, that were read.
"""

import datetime
import http.server
import ipaddress
import json
import pathlib
import random
import re
import socketserver
import ssl
import sys
import threading
import time
import urllib.parse

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOSTS = ("storage.googleapis.com", "www.googleapis.com")
MISSING, LOCKED = "missing", "locked"


class Store:
    """The objects of all buckets.

    Attributes:
        objects: (bucket, name) -> (content, generation).
        uploads: Id of a resumable upload -> (bucket, name, content so far).
        settings: "fail", "fail_reads": shares of writes and reads that fail; "latency": seconds; "deny": 1 if
            nobody may read or write.
        count: Number of requests.
        bytes_read: Bytes of objects that were read.
    """

    def __init__(self):
        self.objects, self.uploads = {}, {}
        self.settings = {"fail": 0.0, "fail_reads": 0.0, "latency": 0.0, "deny": 0.0}
        self.count = self.bytes_read = 0
        self.lock = threading.RLock()

    def put(self, bucket, name, content):
        self.objects[bucket, name] = content, time.time_ns()

    def described(self, bucket, name):
        content, generation = self.objects[bucket, name]
        seconds, rest = divmod(generation, 10**9)
        updated = time.strftime(f"%Y-%m-%dT%H:%M:%S.{rest // 10**6:03d}Z", time.gmtime(seconds))
        return {"name": name, "bucket": bucket, "size": str(len(content)), "generation": str(generation),
                "updated": updated}

    def listed(self, bucket, query):
        """Returns a page of the objects of a bucket, as Google's API has it."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, folders = [], set()
        for one, name in sorted(self.objects):
            if one != bucket or not name.startswith(prefix):
                continue
            if not query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
                continue
            folder, found, _ = name[len(prefix):].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(prefix + folder + delimiter)
            else:
                items.append(self.described(bucket, name))
        start, most = int(query.get("pageToken", 0)), int(query.get("maxResults", 1000))
        page = {"items": items[start:start + most]}
        if start + most < len(items):
            page["nextPageToken"] = str(start + most)
        if folders and not start:
            page["prefixes"] = sorted(folders)
        return page


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests through the proxy. `store` and `tls` belong to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def do_CONNECT(self):
        self.send_response_only(200)
        self.end_headers()
        self.wfile.flush()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb", -1), socketserver._SocketWriter(self.connection)
        self.close_connection = False
        while not self.close_connection:
            self.handle_one_request()

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        path, query = url.path, dict(urllib.parse.parse_qsl(url.query))
        content, store = self._body(), self.server.store
        if path == "/_control":
            store.settings.update({name: float(value) for name, value in query.items()})
            return self._reply(200, {**store.settings, "requests": store.count, "bytes_read": store.bytes_read})
        time.sleep(store.settings["latency"])
        with store.lock:
            store.count += 1
            if random.random() < store.settings["fail_reads" if self.command == "GET" else "fail"]:
                return self._reply(503, b"injected")
            if store.settings["deny"]:
                return self._reply(403, {"error": {"code": 403, "message": "does not have access"}})
            for pattern, answer in ROUTES:
                if found := re.fullmatch(pattern, path):
                    names = [urllib.parse.unquote(part) for part in found.groups()]
                    if names[0] == MISSING:
                        return self._reply(404, {"error": {"code": 404, "message": "The bucket does not exist."}})
                    if names[0] == LOCKED and self.command != "GET":
                        return self._reply(403, {"error": {"code": 403, "message": "does not have access"}})
                    return answer(self, store, names, query, content)
        return self._reply(404)

    do_POST = do_PUT = do_DELETE = do_GET

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = bytearray()  # libcurl sends chunks beside TensorFlow's own Content-Length
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(content)

    def _reply(self, status, content=b"", **headers):
        if isinstance(content, dict):
            content = json.dumps(content).encode()
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    def upload(self, store, names, query, content):
        """A simple upload, or a request of a resumable one; either way the object appears whole."""
        bucket = names[0]
        if query["uploadType"] == "media":
            if self._is_other(store, bucket, query["name"], query):
                return self._reply(412)
            store.put(bucket, query["name"], content)
            return self._reply(200, store.described(bucket, query["name"]))
        if self.command == "POST":
            key = str(len(store.uploads))
            store.uploads[key] = bucket, query["name"], bytearray()
            place = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            return self._reply(200, Location=f"https://{HOSTS[1]}{place}")
        bucket, name, received = store.uploads[query["upload_id"]]
        given = re.fullmatch(r"bytes (\*|(\d+)-\d+)/(\*|\d+)", self.headers.get("Content-Range", ""))
        if given and given[2]:
            del received[int(given[2]):]
        if not given or given[2]:
            received += content
        if not given or given[3] != "*" and len(received) >= int(given[3]):
            store.put(bucket, name, bytes(received))
            return self._reply(200, store.described(bucket, name))
        return self._reply(308, **({"Range": f"bytes=0-{len(received) - 1}"} if received else {}))

    @staticmethod
    def _is_other(store, bucket, name, query):
        """Returns whether an object has another generation than a request is for; 0 stands for no object."""
        wanted = query.get("ifGenerationMatch")
        return wanted is not None and int(wanted) != store.objects.get((bucket, name), (None, 0))[1]

    def rewrite(self, store, names, query, content):
        if tuple(names[:2]) not in store.objects:
            return self._reply(404)
        store.put(*names[2:], store.objects[tuple(names[:2])][0])
        return self._reply(200, {"done": True})

    def compose(self, store, names, query, content):
        parts = [store.objects[names[0], one["name"]][0] for one in json.loads(content)["sourceObjects"]]
        store.put(*names, b"".join(parts))
        return self._reply(200, store.described(*names))

    def metadata(self, store, names, query, content):
        if tuple(names) not in store.objects:
            return self._reply(404, {"error": {"code": 404}})
        if self.command == "DELETE":
            if self._is_other(store, *names, query):
                return self._reply(412)
            del store.objects[tuple(names)]
            return self._reply(204)
        if query.get("alt") == "media":
            return self._content(store, *store.objects[tuple(names)])
        return self._reply(200, store.described(*names))

    def list_objects(self, store, names, query, content):
        return self._reply(200, store.listed(*names, query))

    def bucket(self, store, names, query, content):
        return self._reply(200, {"name": names[0], "location": "US", "bucket": names[0],
                                 "hierarchicalNamespace": {"enabled": False}})

    def read(self, store, names, query, content):
        if tuple(names) not in store.objects:
            return self._reply(404)
        return self._content(store, *store.objects[tuple(names)])

    def _content(self, store, whole, generation):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            store.bytes_read += len(whole)
            return self._reply(200, whole, x_goog_generation=generation)
        first, last = int(wanted[1]), min(int(wanted[2]), len(whole) - 1)
        if first >= len(whole):
            return self._reply(416)
        store.bytes_read += last + 1 - first
        return self._reply(206, whole[first:last + 1], x_goog_generation=generation,
                           Content_Range=f"bytes {first}-{last}/{len(whole)}")


ROUTES = (
    (r"/upload/storage/v1/b/([^/]+)/o", Handler.upload),
    (r"/storage/v1/b/([^/]+)/o/(.+)/rewriteTo/b/([^/]+)/o/(.+)", Handler.rewrite),
    (r"/storage/v1/b/([^/]+)/o/(.+)/compose", Handler.compose),
    (r"/storage/v1/b/([^/]+)/o/(.+)", Handler.metadata),
    (r"/storage/v1/b/([^/]+)/o", Handler.list_objects),
    (r"/storage/v1/b/([^/]+)/storageLayout", Handler.bucket),
    (r"/storage/v1/b/([^/]+)", Handler.bucket),
    (r"/([^/]+)/(.+)", Handler.read),
)


def make_certificate(folder):
    """Writes a key and a certificate for the hosts, which is its own authority. Returns their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a bucket for tests")])
    now = datetime.datetime.now(datetime.UTC)
    names = [*map(x509.DNSName, HOSTS), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, hashes.SHA256()))
    (folder / "key.pem").write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "key.pem", folder / "ca.pem"


def main():
    """Serves until standard input ends."""
    folder = pathlib.Path(sys.argv[1]).resolve()
    key, certificate = make_certificate(folder)
    http.server.ThreadingHTTPServer.request_queue_size = 64
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.store, server.tls = Store(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.tls.load_cert_chain(certificate, key)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"https_proxy": f"http://127.0.0.1:{server.server_port}", "CURL_CA_BUNDLE": str(certificate),
                      "NO_GCE_CHECK": "true", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
                      "no_proxy": "127.0.0.1,localhost"}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
