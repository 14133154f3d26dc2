"""Serves a model over HTTP: JSON as in TensorFlow Serving, and a page that shows the experts."""

import asyncio
import collections
import concurrent.futures
import contextlib
import html
import ipaddress
import itertools
import json
import pathlib
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence

import prometheus_client
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from switch_tf import checks
from switch_tf.inference.text_model import TextModel
from switch_tf.refusals import Refusal, first_line

READ_SECONDS = 30  # from a request's headers to its end
_PAGE = pathlib.Path(__file__).with_name("page.html")
_MOST_BYTES_HELD = 2**28  # of incomplete requests
_CHARACTERS_PER_TOKEN = 64  # of the longest accepted text; most tokens of a longer one would be cut
_FEWEST_CHARACTERS = 2**14
_SMALL = 2**16  # bytes of a request parsed without a thread and always admitted
_MOST_LONG = 4  # largest requests, or as many bytes, parsed and tokenised at a time
_CHARACTERS_PER_TURN = 2**14  # to tokenise before the next request's turn
_MAX_LOOKING = 16  # waiting requests of the page, computed in turn
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:/@\[\]?#\\]+)(:\d{0,5})?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


class Batcher:
    """Answers requests in a thread. The requests that wait when a batch ends are the next batch.

    Requests cancelled before their batch begins are skipped. `is_working`: whether requests are accepted.

    Args:
        answer: Maps a list of requests to a list of results. All requests of the batch get its exception.
        batch_size: Largest number of requests in a batch.
    """

    def __init__(self, answer: Callable[[list], list], batch_size: int, max_waiting: int):
        self.max_waiting = max_waiting
        self.is_working = True
        self._answer, self._batch_size = answer, batch_size
        self._waiting = collections.deque()
        self._lock = threading.Lock()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batcher")

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def has_room(self, count: int) -> bool:
        """Returns whether `count` more requests may wait."""
        with self._lock:
            self._waiting = collections.deque(pair for pair in self._waiting if not pair[1].cancelled())
            return len(self._waiting) + count <= self.max_waiting

    def submit(self, requests: list) -> list[concurrent.futures.Future]:
        """Queues requests, after `has_room` and before `stop`. Returns their futures."""
        futures = [concurrent.futures.Future() for _ in requests]
        with self._lock:
            self._waiting.extend(zip(requests, futures, strict=True))
        self._thread.submit(self._answer_all)
        return futures

    def stop(self) -> None:
        """Accepts no more requests, and waits for all answers."""
        self.is_working = False
        self._thread.shutdown()

    def _answer_all(self):
        while self._waiting:
            batch = {}
            with self._lock:
                while self._waiting and len(batch) < self._batch_size:
                    request, future = self._waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        batch[future] = request
            if not batch:
                continue
            try:
                results = list(zip(batch, self._answer([*batch.values()]), strict=True))
            except BaseException as error:  # the next batch is tried
                for future in batch:
                    future.set_exception(error)
            else:
                for future, result in results:
                    future.set_result(result)


class Hosts:
    """Hosts that requests may name, so that pages of other sites cannot reach a server through a visitor's browser.

    A browser sends a page's requests to any address that its host name resolves to, even 127.0.0.1, and lets every page
    post text anywhere without reading the answer. A page cannot change `Host` and `Origin`. Other clients send no
    `Origin`, so they may post.

    Args:
        address: Of the server. For 0.0.0.0 and :: a request may name any IP address.
        allowed: Additional names or addresses. Their pages may also post.
    """

    def __init__(self, address: str = "127.0.0.1", allowed: Sequence[str] = ()):
        for name in allowed:
            if not _NAME.fullmatch(name) and isinstance(_canonical(name), str):
                raise Refusal(f"--allow_host must be a host name or an IP address, without http:// and without a "
                              f"port, not {checks.shown(name)}.")
        self._allowed = {_canonical(name) for name in allowed}
        self._own = self._allowed | {_canonical(name) for name in (*_LOOPBACK, address)}
        self._any_address = getattr(_canonical(address), "is_unspecified", False)

    def refusal(self, method: str, headers: Headers) -> str | None:
        """Returns the reason to refuse a request, or None."""
        host = headers.get("host")  # missing in HTTP/1.0, unused by browsers
        match = _HOST.fullmatch(host or "")
        name = match and _canonical(match[1])
        if host is not None and name not in self._own and (
                name is None or isinstance(name, str) or not self._any_address):
            return (f"Host {checks.shown(host)} is no name of this server; if it is one of yours, start the server "
                    "with --allow_host and the name.")
        origin = headers.get("origin")
        if origin is not None and not self._is_own_page(origin, name, match and match[2]):
            return (f"Pages of {checks.shown(origin)} may not use this server; if they are yours, start it with "
                    "--allow_host and the name of their host.")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and method not in ("GET", "HEAD") and site not in ("none", "same-origin"):
            return "Pages of other sites may not use this server."
        return None

    def _is_own_page(self, origin, name, port):
        try:
            page = urllib.parse.urlsplit(origin)
            default = {"http": 80, "https": 443}[page.scheme]
            address, own = _canonical(page.hostname or ""), page.port or default
            return address in self._allowed or (address, own) == (
                name, int((port or ":")[1:] or default))
        except (ValueError, KeyError):  # no number, or not HTTP's, as in "null"
            return False


class Server:
    """Answers requests to a model in batches.

    `app`: Starlette app for an ASGI server such as uvicorn. Its shutdown answers waiting requests first.

    * `POST /v1/models/<name>:predict`, `{"instances": ["a text", ...]}` to `{"predictions": [{"outputs", "scores"},
      ...]}`, as TensorFlow Serving does for the `serving_default` of `exporting.export_texts`. `others` are a beam's
      further results. `cut` counts the tokens beyond the model's length.
    * `POST /v1/models/<name>:look`, `{"instance": "a text"}` to its prediction and `TextModel.routes`.
    * `GET /v1/models/<name>`, a description of the model; `/health`; `/metrics`, for Prometheus; `/`, the page.

    Errors have the body `{"error": "..."}` and a status: 400 for other JSON, 403 for a foreign `Host` or `Origin`, 404,
    405, 408 after `READ_SECONDS`, 413 for a request or text that is too long, 500 for a failure of the model,
    503 if too many requests wait.

    Args:
        text_model: Preferably with one program for all batches: `batch_size=None`, or on a back end with fixed shapes
            the server's own `batch_size`.
        name: Of the model in URLs.
        about: JSON-able description of the model.
        batch_size: Largest number of texts in a batch.
        max_waiting: Largest number of waiting texts of all requests.
    """

    def __init__(self, text_model: TextModel, name: str, about: dict, batch_size: int, max_waiting: int,
                 max_request_bytes: int, hosts: Hosts):
        self._text_model = text_model
        self.name = name
        self._max_request_bytes = max_request_bytes
        self._max_characters = max(_FEWEST_CHARACTERS, _CHARACTERS_PER_TOKEN * text_model.inputs_length)
        self._num_bytes_held, self._max_bytes_held = 0, max(_MOST_BYTES_HELD, 2 * max_request_bytes)
        self._num_bytes_prepared = self._num_texts_prepared = 0
        self._turn = asyncio.Lock()  # to tokenise, in the order of arrival
        self._parsing = asyncio.Lock()  # of long requests
        self._num_answered = 0
        self._answers = Batcher(self._answer, batch_size, max_waiting)
        self._looks = Batcher(lambda asked: [text_model.routes(inputs.ids, outputs) for inputs, outputs in asked],
                              1, _MAX_LOOKING)
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "switch_tf_requests", "Requests, by what became of them: a status, or hung_up.", ["path", "status"],
            registry=registry)
        self._seconds = prometheus_client.Histogram(
            "switch_tf_request_seconds", "From a request's first line to its answer.", ["path"], registry=registry)
        self._batch_sizes = prometheus_client.Histogram(
            "switch_tf_batch_size", "Texts that were answered at a time.", registry=registry,
            buckets=[2**power for power in range(10)])
        self._tokens = prometheus_client.Counter(
            "switch_tf_output_tokens", "Tokens that were decoded.", registry=registry)
        prometheus_client.Gauge("switch_tf_waiting_texts", "Texts that no batch has taken yet.",
                                registry=registry).set_function(lambda: self._answers.num_waiting)
        self._hosts = hosts
        self._about = {**about, "inputs_length": text_model.inputs_length, "max_length": text_model.max_length,
                       "sampler": str(text_model.sampler), "batch_size": batch_size, "max_waiting": max_waiting,
                       "max_request_bytes": max_request_bytes, "max_characters": self._max_characters}
        endpoints = [
            ("POST", "/v1/models/{name}:predict", self._predict), ("POST", "/v1/models/{name}:look", self._look),
            ("GET", "/v1/models/{name}", self._describe), ("GET", "/health", self._health),
            ("GET", "/metrics", self._scraped), ("GET", "/", self._page)]
        self.app = Starlette(
            routes=[Route(path, self._watched(path, endpoint), methods=[method])
                    for method, path, endpoint in endpoints],
            exception_handlers={HTTPException: _refuse, Exception: _fail},
            lifespan=self._lifespan)
        self.app.router.redirect_slashes = False  # its address would come from the request

    @contextlib.asynccontextmanager
    async def _lifespan(self, app):
        yield
        for batcher in (self._answers, self._looks):
            await run_in_threadpool(batcher.stop)

    def _answer(self, inputs):
        self._batch_sizes.observe(len(inputs))
        rows = range(self._num_answered, self._num_answered + len(inputs))  # different random numbers for each
        self._num_answered = (self._num_answered + len(inputs)) % 2**30
        answers = self._text_model.answer([text.ids for text in inputs], rows)
        self._tokens.inc(sum(len(results[0].ids) for results in answers))
        return [(results, _prediction(results, text)) for results, text in zip(answers, inputs, strict=True)]

    def _watched(self, path, endpoint):
        """Refuses foreign hosts, and counts and times requests."""

        async def watch(request):
            start = time.perf_counter()
            status = 500
            try:
                if reason := self._hosts.refusal(request.method, request.headers):
                    raise HTTPException(403, reason)
                response = await endpoint(request)
                status = response.status_code
                return response
            except HTTPException as error:
                status = error.status_code
                raise
            except ClientDisconnect:
                status = "hung_up"
                return Response(status_code=400)
            finally:
                self._requests.labels(path, status).inc()
                self._seconds.labels(path).observe(time.perf_counter() - start)

        return watch

    async def _predict(self, request):
        answers = await self._wait(request, self._answers, await self._read(request, "instances"))
        return JSONResponse({"predictions": [prediction for _, prediction in answers]})

    async def _look(self, request):
        inputs = await self._read(request, "instance")
        ((results, prediction),) = await self._wait(request, self._answers, inputs)
        (routes,) = await self._wait(request, self._looks, [(inputs[0], results[0].ids)])
        return JSONResponse({"prediction": prediction, "routes": routes})

    async def _describe(self, request):
        self._check_name(request)
        return JSONResponse({"name": self.name, **self._about})

    async def _health(self, request):
        status, code = ("ok", 200) if self._answers.is_working else ("stopping", 503)
        return JSONResponse({"status": status}, code)

    async def _scraped(self, request):
        return Response(prometheus_client.generate_latest(self._registry),
                        media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _page(self, request):
        address = f"v1/models/{urllib.parse.quote(self.name, safe='')}"
        return HTMLResponse(_PAGE.read_text().replace("$NAME", html.escape(self.name)).replace(
            "$ADDRESS", html.escape(address)), headers={"Content-Security-Policy": (
                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'")})

    def _check_name(self, request):
        if (name := request.path_params["name"]) != self.name:
            raise HTTPException(404, f"The model here is {self.name!r}, not {checks.shown(name)}.")

    async def _read(self, request, key):
        body = await self._body(request)
        size = len(body) if len(body) > _SMALL else 0
        if size and self._num_bytes_prepared + size > _MOST_LONG * self._max_request_bytes:
            raise _busy("Too many long requests at a time")
        self._num_bytes_prepared += size
        try:
            try:
                if size:
                    async with self._parsing:
                        content = await run_in_threadpool(json.loads, body)
                else:
                    content = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise HTTPException(400, f"The body is no JSON object: {first_line(error)}.") from None
            if not isinstance(content, dict):
                raise HTTPException(400, f"The body must be a JSON object, not {checks.shown(content)}.")
            texts = content.get(key)
            if key == "instance":
                texts = [texts]
            elif not isinstance(texts, list) or not texts:
                raise HTTPException(400, 'The body must be {"instances": ["a text", ...]}, a list of one text at '
                                         'least.')
            elif len(texts) > self._answers.max_waiting:
                raise HTTPException(400, f"A request has at most {self._answers.max_waiting} instances, not "
                                         f"{len(texts)}.")
            return await self._tokenised(request, {
                key if key == "instance" else f"{key}[{number}]": text for number, text in enumerate(texts)})
        finally:
            self._num_bytes_prepared -= size

    async def _body(self, request):
        self._check_name(request)
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    # Reads a request that is too long to its end: clients expect no earlier answer.
                    if size <= self._max_request_bytes:
                        body += chunk
                        self._num_bytes_held += len(chunk)
                    if self._num_bytes_held > self._max_bytes_held:
                        raise _busy("Too many long requests at a time")
        except TimeoutError:
            raise HTTPException(408, f"The request was not all there after {READ_SECONDS} seconds.") from None
        finally:
            self._num_bytes_held -= len(body)
        if size > self._max_request_bytes:
            raise HTTPException(413, f"A request has at most {self._max_request_bytes} bytes, not {size}.")
        return bytes(body)

    async def _tokenised(self, request, texts):
        """Tokenises named texts. Requests take turns, so that a long one does not hold up the next.

        Refuses texts without room to wait.
        """
        for name, text in texts.items():
            if not isinstance(text, str):
                raise HTTPException(400, f"{name} must be a text, not {checks.shown(text)}.")
            if len(text) > self._max_characters:
                raise HTTPException(413, f"{name} has {len(text):,} characters, and a text may have "
                                         f"{self._max_characters:,}: the model reads {self._text_model.inputs_length} "
                                         "tokens at most.")
        _check_room(self._answers, self._num_texts_prepared + len(texts))
        tokenised, ends = [], itertools.accumulate(map(len, texts.values()))
        self._num_texts_prepared += len(texts)
        try:
            for _, part in itertools.groupby(texts.items(), lambda _: next(ends) // _CHARACTERS_PER_TURN):
                async with self._turn:
                    tokenised += await run_in_threadpool(list, itertools.starmap(self._inputs, [*part]))
                if await request.is_disconnected():
                    raise ClientDisconnect
        finally:
            self._num_texts_prepared -= len(texts)
        return tokenised

    def _inputs(self, name, text):
        try:
            text.encode()
            return self._text_model.read(text)
        except UnicodeEncodeError:
            raise HTTPException(400, f"{name} holds half of a character (a lone surrogate).") from None
        except Refusal:
            raise HTTPException(400, f"There is no text in {name}.") from None

    async def _wait(self, request, batcher, asked):
        """Returns a batcher's results. A disconnect cancels requests that have not begun."""
        if not batcher.is_working:
            raise HTTPException(503, "The server is stopping.")
        _check_room(batcher, len(asked))
        futures = batcher.submit(asked)
        results = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        end = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait([results, end], return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise ClientDisconnect
        finally:
            end.cancel()
            for future in futures:
                future.cancel()
        for result in results.result():
            if isinstance(result, BaseException):
                raise result
        return results.result()


def _check_room(batcher, count):
    if not batcher.has_room(count):
        raise _busy(f"{batcher.num_waiting} of at most {batcher.max_waiting} texts are waiting")


def _busy(reason):
    return HTTPException(503, f"{reason}; try again later.", {"Retry-After": "1"})


def _prediction(results, inputs):
    best, *alternatives = ({"outputs": result.text, "scores": result.score} for result in results)
    return best | ({"others": alternatives} if alternatives else {}) | (
        {"cut": inputs.num_cut} if inputs.num_cut else {})


async def _hung_up(request):
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request, error):
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _fail(request, error):
    return JSONResponse({"error": f"The model failed: {first_line(error)}."}, 500)


def _canonical(name):
    """Returns a name in lower case, or an address of `ipaddress`."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return name
