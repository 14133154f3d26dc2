"""A model over HTTP: texts in and out as JSON, in TensorFlow Serving's form, and a page to look at its experts."""

import asyncio
import contextlib
import html
import json
import pathlib
import time
import urllib.parse

import prometheus_client
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from switch_tf import checks
from switch_tf.inference.batching import Batcher, Full, Stopped
from switch_tf.inference.hosts import Hosts, OnlyOwnHosts
from switch_tf.inference.text_model import TextModel
from switch_tf.inference.token_routes import TokenRoutes
from switch_tf.messages import first_line

READ_SECONDS = 30  # in which a request has to be there
_PAGE = pathlib.Path(__file__).with_name("page.html")
_MOST_BYTES_HELD = 2**28  # of requests that are not all there yet
_CHARACTERS_PER_TOKEN = 64  # of a text that the model reads; more of it is not worth the time to tokenise it
_FEWEST_CHARACTERS = 2**14  # that a text may always have
_CHARACTERS_PER_TURN = 2**14  # that are tokenised of one request before another one has its turn
_MAX_LOOKING = 16  # requests of the page that may wait: each computes one text by itself


class Server:
    """Answers requests to a model, those that come at a time in one batch.

    `app`: Starlette, what an ASGI server such as uvicorn runs. Its end answers what waits.
    `name`: str.

    * `POST /v1/models/<name>:predict`, `{"instances": ["a text", ...]}` to `{"predictions": [{"outputs", "scores"},
      ...]}`, as TensorFlow Serving does for the `serving_default` of `exporting.export`. `others` are the further
      results of a beam, `cut` says by how many tokens a text was too long.
    * `POST /v1/models/<name>:look`, `{"instance": "a text"}` to its prediction and to where its tokens went, see
      `TokenRoutes`.
    * `GET /v1/models/<name>`, what the model is; `/health`; `/metrics`, for Prometheus; `/`, the page.

    What cannot be answered has the body `{"error": "..."}` and a status: 400 no such JSON, 403 a foreign `Host` or
    `Origin`, 404, 405, 408 not all there after `READ_SECONDS`, 413 a request or a text that is too long, 500 the model
    failed, 503 more than may wait.

    Args:
        text_model: TextModel, best with `batch_size=None`, which compiles one program for all batches.
        name: str, of the model in addresses.
        about: dict, JSON-able, what the model is.
        batch_size: int, texts that are answered at a time.
        max_waiting: int, texts that may wait, of all requests together.
        max_request_bytes: int.
        hosts: Hosts, that requests may name; by default those of this machine alone.
    """

    def __init__(self, text_model: TextModel, name: str, about: dict, batch_size=32, max_waiting=256,
                 max_request_bytes=2**20, hosts: Hosts | None = None):
        self._text_model = text_model
        self.name = checks.text("The name of a model", name)
        self._max_request_bytes = checks.integer("max_request_bytes", max_request_bytes, 1)
        self._max_characters = max(_FEWEST_CHARACTERS, _CHARACTERS_PER_TOKEN * text_model.inputs_length)
        self._num_bytes_held, self._max_bytes_held = 0, max(_MOST_BYTES_HELD, 2 * self._max_request_bytes)
        self._turn = asyncio.Lock()  # to tokenise; who has waited longest is next
        self._token_routes = TokenRoutes(text_model)
        self._num_answered = 0
        self._metrics = _Metrics(lambda: self._answers.num_waiting)
        self._answers = Batcher(self._answer, checks.integer("batch_size", batch_size, 1),
                                checks.integer("max_waiting", max_waiting, 1), self._metrics.batch_size.observe)
        self._looks = Batcher(self._look, 1, _MAX_LOOKING)
        self._about = {**about, "inputs_length": text_model.inputs_length, "max_length": text_model.max_length,
                       "sampler": str(text_model.sampler), "batch_size": batch_size, "max_waiting": max_waiting,
                       "max_request_bytes": max_request_bytes, "max_characters": self._max_characters}
        endpoints = [
            ("POST", "/v1/models/{name}:predict", self._predict), ("POST", "/v1/models/{name}:look", self._look_at),
            ("GET", "/v1/models/{name}", self._describe), ("GET", "/health", self._health),
            ("GET", "/metrics", self._scraped), ("GET", "/", self._page)]
        self.app = Starlette(
            routes=[Route(path, self._metrics.watched(path, endpoint), methods=[method])
                    for method, path, endpoint in endpoints],
            middleware=[Middleware(OnlyOwnHosts, hosts or Hosts())],
            exception_handlers={HTTPException: _refuse, ClientDisconnect: _refuse_nobody, Exception: _fail},
            lifespan=self._lifespan)
        self.app.router.redirect_slashes = False  # to an address that is made of what the request says

    def warm_up(self) -> None:
        """Compiles the programs, by answering and looking at a text."""
        ids = [self._text_model.features.inputs.eos_id]
        answer = self._text_model.answer([ids, ids], [0, 0])[0][0]
        self._token_routes.of(ids, answer.ids)

    def stop(self) -> None:
        """Takes no more requests, and returns when those that wait are answered."""
        self._answers.stop()
        self._looks.stop()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app):
        yield
        await run_in_threadpool(self.stop)

    # What the batchers call, each in its thread.

    def _answer(self, inputs):
        rows = range(self._num_answered, self._num_answered + len(inputs))  # so that each draws anew
        self._num_answered = (self._num_answered + len(inputs)) % 2**30
        answers = self._text_model.answer([one.ids for one in inputs], rows)
        self._metrics.tokens.inc(sum(len(results[0].ids) for results in answers))
        return [(results, _as_json(results, one)) for results, one in zip(answers, inputs, strict=True)]

    def _look(self, asked):
        return [self._token_routes.of(inputs.ids, outputs) for inputs, outputs in asked]

    # What requests reach.

    async def _predict(self, request):
        texts = (await self._read(request)).get("instances")
        if not isinstance(texts, list) or not texts:
            raise HTTPException(400, 'The body must be {"instances": ["a text", ...]}, a list of one text at least.')
        if len(texts) > self._answers.max_waiting:
            raise HTTPException(400, f"A request has at most {self._answers.max_waiting} instances, not {len(texts)}.")
        inputs = await self._tokenised({f"instances[{number}]": text for number, text in enumerate(texts)})
        found = await self._wait(request, self._answers, inputs)
        return JSONResponse({"predictions": [prediction for _, prediction in found]})

    async def _look_at(self, request):
        text = (await self._read(request)).get("instance")
        (inputs,) = await self._tokenised({"instance": text})
        ((results, prediction),) = await self._wait(request, self._answers, [inputs])
        (routes,) = await self._wait(request, self._looks, [(inputs, results[0].ids)])
        return JSONResponse({"prediction": prediction, "routes": routes})

    async def _describe(self, request):
        self._check_name(request)
        return JSONResponse({"name": self.name, **self._about})

    async def _health(self, request):
        is_well = self._answers.is_working and self._looks.is_working
        return JSONResponse({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    async def _scraped(self, request):
        return Response(prometheus_client.generate_latest(self._metrics.registry),
                        media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _page(self, request):
        address = f"v1/models/{urllib.parse.quote(self.name, safe='')}"
        return HTMLResponse(_PAGE.read_text().replace("$NAME", html.escape(self.name)).replace(
            "$ADDRESS", html.escape(address)), headers={"Content-Security-Policy": (
                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'")})

    def _check_name(self, request):
        if (name := request.path_params["name"]) != self.name:
            raise HTTPException(404, f"The model here is {self.name!r}, not {checks.shown(name)}.")

    async def _read(self, request) -> dict:
        """The JSON object of a request."""
        self._check_name(request)
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    # What is too long is read to its end all the same: a sender hears no answer before.
                    if size <= self._max_request_bytes:
                        body += chunk
                        self._num_bytes_held += len(chunk)
                    if self._num_bytes_held > self._max_bytes_held:
                        raise HTTPException(503, "Too many long requests at a time; try again later.",
                                            {"Retry-After": "1"})
        except TimeoutError:
            raise HTTPException(408, f"The request was not all there after {READ_SECONDS} seconds.") from None
        finally:
            self._num_bytes_held -= len(body)
        if size > self._max_request_bytes:
            raise HTTPException(413, f"A request has at most {self._max_request_bytes} bytes, not {size}.")
        try:
            found = await run_in_threadpool(json.loads, bytes(body))
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"The body is no JSON object: {first_line(error)}.") from None
        if not isinstance(found, dict):
            raise HTTPException(400, f"The body must be a JSON object, not {checks.shown(found)}.")
        return found

    async def _tokenised(self, texts: dict) -> list:
        """The inputs of texts, by their names in the request; requests take turns, however much one asks."""
        for name, text in texts.items():
            self._check_text(name, text)
        found, waiting = [], list(texts.items())
        while waiting:
            part, size = [], 0
            while waiting and (not part or size + len(waiting[0][1]) <= _CHARACTERS_PER_TURN):
                part.append(waiting.pop(0))
                size += len(part[-1][1])
            async with self._turn:
                found += await run_in_threadpool(lambda part=part: [self._inputs(*one) for one in part])
        return found

    def _check_text(self, name, text):
        if not isinstance(text, str):
            raise HTTPException(400, f"{name} must be a text, not {checks.shown(text)}.")
        if len(text) > self._max_characters:
            raise HTTPException(413, f"{name} has {len(text):,} characters, and a text may have "
                                     f"{self._max_characters:,}: the model reads {self._text_model.inputs_length} "
                                     "tokens at most.")

    def _inputs(self, name, text):
        try:
            text.encode()
            return self._text_model.read(text)
        except UnicodeEncodeError:
            raise HTTPException(400, f"{name} holds half of a character (a lone surrogate).") from None
        except ValueError:
            raise HTTPException(400, f"There is no text in {name}.") from None

    async def _wait(self, request, batcher, asked):
        """The results of what is asked; where the client hangs up, what has not begun is left out."""
        try:
            futures = batcher.submit(asked)
        except Full:
            raise HTTPException(503, f"{batcher.num_waiting} of at most {batcher.max_waiting} texts are waiting; try "
                                     "again later.", {"Retry-After": "1"}) from None
        except Stopped:
            raise HTTPException(503, "The server is stopping.") from None
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


def _as_json(results, inputs):
    best, *others = results
    found = {"outputs": best.text, "scores": best.score}
    if others:
        found["others"] = [{"outputs": one.text, "scores": one.score} for one in others]
    return {**found, "cut": inputs.num_cut} if inputs.num_cut else found


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request, error):
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _refuse_nobody(request, error):
    return Response(status_code=400)


async def _fail(request, error):
    return JSONResponse({"error": f"The model failed: {first_line(error)}."}, 500)


class _Metrics:
    """What Prometheus is told."""

    def __init__(self, num_waiting):
        self.registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "switch_tf_requests", "Requests, by what became of them: a status, or hung_up.", ["path", "status"],
            registry=self.registry)
        self._seconds = prometheus_client.Histogram(
            "switch_tf_request_seconds", "From a request's first line to its answer.", ["path"], registry=self.registry)
        self.batch_size = prometheus_client.Histogram(
            "switch_tf_batch_size", "Texts that were answered at a time.", registry=self.registry,
            buckets=[2**power for power in range(10)])
        self.tokens = prometheus_client.Counter(
            "switch_tf_output_tokens", "Tokens that were decoded.", registry=self.registry)
        waiting = prometheus_client.Gauge(
            "switch_tf_waiting_texts", "Texts that no batch has taken yet.", registry=self.registry)
        waiting.set_function(num_waiting)

    def watched(self, path, endpoint):
        """The endpoint, counted and timed."""

        async def watch(request):
            start = time.perf_counter()
            status = 500
            try:
                response = await endpoint(request)
                status = response.status_code
                return response
            except HTTPException as error:
                status = error.status_code
                raise
            except ClientDisconnect:
                status = "hung_up"
                raise
            finally:
                self._requests.labels(path, status).inc()
                self._seconds.labels(path).observe(time.perf_counter() - start)

        return watch
