"""Many clients against a running `switch-tf serve`: seconds per answer, texts per second, memory.

    .venv/bin/switch-tf serve --run runs/demo &
    .venv/bin/python benchmarks/serve.py --name demo --clients 1 8 64 --input lines.txt

Every client has its own connection and sends the next request as soon as it has an answer. First each text is sent
alone, for comparison: `wrong` counts answers of another text, or with a score that differs by more than rounding,
`failed` requests without an answer. `rss_mib` is the memory of the server, from its /proc, after the clients have left
(in the first line: before they come).

`--idle 1500` also holds that many silent connections, and reopens those that the server closes (`reopened`);
`slowest_health_ms` is the slowest answer of `/health`, requested once a second on a separate connection.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import pathlib
import resource
import selectors
import socket
import statistics
import threading
import time

from tqdm import tqdm


def main():
    """Reads the arguments, sends requests, and prints a JSON line for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:8501")
    parser.add_argument("--name", required=True, help="name of the model: the run folder's")
    parser.add_argument("--input", required=True, help="a file of lines of text")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, help="as many of all clients together, however long they take")
    parser.add_argument("--idle", type=int, default=0, help="number of silent connections to hold")
    args = parser.parse_args()
    texts = [line for line in pathlib.Path(args.input).read_text().splitlines() if line.strip()]
    path = f"/v1/models/{args.name}:predict"
    pid = _server(args.address)
    expected = {}
    connection = http.client.HTTPConnection(args.address)
    for text in tqdm(texts, desc="One at a time", unit=" texts"):
        _, found = _ask(connection, path, [text])
        expected[text] = found["predictions"][0]
    print(json.dumps({"texts": len(texts), "different_answers": len({one["outputs"] for one in expected.values()}),
                      "rss_mib": _rss(pid)}), flush=True)
    for count in args.clients:
        with _idle(args.address, args.idle) as watched:
            found = _crowd(args, path, texts, expected, count)
        print(json.dumps({"clients": count, **found, **watched, "rss_mib": _rss(pid)}), flush=True)


@contextlib.contextmanager
def _idle(address, count):
    """Holds silent connections within this scope; yields the number reopened and the slowest answer of /health."""
    watched = {"idle": count, "reopened": -count, "slowest_health_ms": 0.0} if count else {}
    if count:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 1024), hard))
    is_over, is_held = threading.Event(), threading.Event()
    thread = threading.Thread(target=_hold, args=(address, count, watched, is_held, is_over))
    thread.start()
    is_held.wait()
    try:
        yield watched
    finally:
        is_over.set()
        thread.join()


def _hold(address, count, watched, is_held, is_over):
    host, port = address.rsplit(":", 1)
    with selectors.DefaultSelector() as held:
        next_look = time.monotonic()
        while count and not is_over.is_set():
            while len(held.get_map()) < count:
                watched["reopened"] += 1
                held.register(socket.create_connection((host, int(port)), timeout=60), selectors.EVENT_READ)
            is_held.set()
            for key, _ in held.select(0.1):  # the server never sends first, so it has closed this one
                held.unregister(key.fileobj)
                key.fileobj.close()
            is_over.wait(0.1)
            if time.monotonic() > next_look:
                start = time.monotonic()
                connection = http.client.HTTPConnection(address, timeout=60)
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
                connection.close()
                took = time.monotonic() - start
                watched["slowest_health_ms"] = max(watched["slowest_health_ms"], round(1e3 * took, 1))
                next_look = start + 1
        for key in list(held.get_map().values()):
            key.fileobj.close()
    is_held.set()


def _crowd(args, path, texts, expected, count):
    seconds, problems = [], []
    began = time.monotonic()
    end = began + (args.seconds if args.requests is None else float("inf"))
    left = iter(range(args.requests)) if args.requests else itertools.count()

    def client(number):
        connection = http.client.HTTPConnection(args.address)
        asked = number
        while time.monotonic() < end and next(left, None) is not None:
            text = texts[asked % len(texts)]
            asked += count + 1  # so that clients are seldom at the same text
            start = time.monotonic()
            try:
                status, found = _ask(connection, path, [text])
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"failed: {error!r}")
                connection = http.client.HTTPConnection(args.address)
                continue
            seconds.append(time.monotonic() - start)
            if status != 200:
                problems.append(f"failed: {found}")
            elif not _same(found["predictions"][0], expected[text]):
                problems.append("wrong")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in tqdm(threads, desc=f"{count} clients", unit=" clients"):
        thread.join()
    ordered = sorted(seconds)
    failed = [problem for problem in problems if problem != "wrong"]
    return {"requests": len(ordered), "failed": len(failed), "wrong": len(problems) - len(failed),
            "p50_ms": round(1e3 * statistics.median(ordered), 1),
            "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 1),
            "texts_per_second": round(len(ordered) / (time.monotonic() - began), 1),
            **({"first": failed[0]} if failed else {})}


def _ask(connection, path, texts):
    connection.request("POST", path, json.dumps({"instances": texts}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def _same(found, known):
    return found["outputs"] == known["outputs"] and abs(found["scores"] - known["scores"]) < 1e-3


def _server(address):
    """Returns the process id of the server, None if it is on another machine or another user's."""
    port = int(address.rpartition(":")[2])
    inodes = {fields[9] for table in ("/proc/net/tcp", "/proc/net/tcp6") if pathlib.Path(table).exists()
              for fields in (line.split() for line in pathlib.Path(table).read_text().splitlines()[1:])
              if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port}
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) in {f"socket:[{inode}]" for inode in inodes}:
                return int(link.parts[2])
        except OSError:  # gone, or not ours to see
            continue
    return None


def _rss(pid):
    if pid is None:
        return None
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


if __name__ == "__main__":
    main()
