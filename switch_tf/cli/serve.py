"""`switch-tf serve`: a trained model over HTTP, and a page to type a text and see which experts its tokens go to."""

import os
import signal
import socket
import sys
import threading
import time

from switch_tf.checkpoints import folders
from switch_tf.cli import sampler_arguments, trained_run
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal
from switch_tf.training.stopping import INTERRUPTED

_STOPPING_SECONDS = 30  # that requests have to end in, after the first signal

EXAMPLES = r"""
switch-tf serve --run runs/first
switch-tf serve --run runs/first --port 9000 --sampler beam --num_beams 4
"""


def add_arguments(parser) -> None:
    """Declares the run, its checkpoint, the address, the limits, the sampler and the gin arguments."""
    trained_run.add_arguments(parser)
    trained_run.add_checkpoint_argument(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="to listen at; 0.0.0.0 for other machines too, whoever they are (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8501, metavar="N", help="0 for any that is free (default 8501)")
    parser.add_argument("--allow_host", action="append", default=[], metavar="NAME",
                        help="another name that requests and pages may give this server, such as a proxy's; may be "
                             "repeated (by default localhost and the address it listens at)")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N",
                        help="texts that are answered at a time, at most (default 32)")
    parser.add_argument("--max_waiting", type=int, default=256, metavar="N",
                        help="texts that may wait; of more, requests are refused with 503 (default 256)")
    parser.add_argument("--max_request_bytes", type=int, default=2**20, metavar="N",
                        help="of longer requests, which are refused with 413 (default 1048576)")
    trained_run.add_raw_argument(parser)
    sampler_arguments.add_arguments(parser)


def run(arguments) -> dict:
    """Serves until a signal comes; the JSON object says where it did."""
    for name in ("batch_size", "max_waiting", "max_request_bytes"):
        if getattr(arguments, name) < 1:
            raise Refusal(f"--{name} must be at least 1, not {getattr(arguments, name)}.")
    sampler_arguments.check(arguments)
    try:
        import starlette  # noqa: F401  the extra `serve`: only this needs it
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise Refusal(f"Serving needs the package {error.name}, which is not installed; run: pip install --no-deps "
                      "starlette==1.10.0 uvicorn==0.54.0 anyio==4.16.0 h11==0.16.0 (they are the extra serve of "
                      "switch-tf).") from None
    hosts = _hosts(arguments)
    folder = trained_run.folder_of(arguments)
    checkpoint = trained_run.one_checkpoint(arguments, folder)
    with _bound(arguments) as listener:
        described = trained_run.load_on_one_device(arguments, folder)
        try:
            return _serve(arguments, folder, checkpoint, described, listener, hosts)
        except (ValueError, OSError, folders.BrokenCheckpoint) as error:
            raise Refusal(first_line(error)) from error


def _hosts(arguments):
    from switch_tf.inference.hosts import Hosts
    try:
        return Hosts(arguments.host, arguments.allow_host)
    except ValueError as error:
        raise Refusal(str(error)) from error


def _bound(arguments):
    """A socket at the address, taken before anything that takes long."""
    if not 0 <= arguments.port < 2**16:
        raise Refusal(f"--port must be in 0 to {2**16 - 1}, not {arguments.port}.")
    try:
        family, kind, _, _, address = socket.getaddrinfo(arguments.host, arguments.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise Refusal(f"--host {arguments.host} --port {arguments.port} cannot be listened at: "
                      f"{first_line(error)}. Give another --port (0 for any that is free) or --host.") from None
    return listener


def _serve(arguments, folder, checkpoint, described, listener, hosts):
    from switch_tf.inference.server import Server

    start = time.perf_counter()
    print(f"Loading {checkpoint}.", file=sys.stderr, flush=True)
    sampler = sampler_arguments.sampler(arguments)
    text_model, identity = trained_run.load_text_model(described, checkpoint, arguments.max_length, sampler, None,
                                                       arguments.raw)
    config = text_model.model.config
    server = Server(text_model, folder.resolve().name, {
        **identity, "task": described.run.mixture_or_task_name, "parameters": config.num_parameters,
        "experts": config.num_experts if config.sparse_layer_names else 0},
        arguments.batch_size, arguments.max_waiting, arguments.max_request_bytes, hosts)
    print("Compiling.", file=sys.stderr, flush=True)
    server.warm_up()
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _listen(server, listener, lambda: print(
        f"Step {identity['step']} of {folder} is ready after {time.perf_counter() - start:.1f} s: {address}/ is a "
        f"page, {address}/v1/models/{server.name}:predict takes texts. Ctrl-C stops.", file=sys.stderr, flush=True))
    return {"run": str(folder), "step": identity["step"], "address": address}


def _listen(server, listener, say_ready):
    """Serves in a thread of its own, so that this one hears signals: the first stops in order, the next at once."""
    from switch_tf.inference import connections

    listening = connections.HttpServer(server.app, connections.make_room(), log_level="warning",
                                       timeout_graceful_shutdown=_STOPPING_SECONDS)

    def stop(number, _):
        name = signal.Signals(number).name
        if listening.should_exit:
            print(f"{name} once more: ended at once.", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        listening.should_exit = True  # before it is said: who reads that may send the next one at once
        print(f"{name}: answering what waits, {_STOPPING_SECONDS} seconds at most; once more ends at once.",
              file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=listening.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    while thread.is_alive() and not listening.started:
        thread.join(0.01)
    has_started = listening.started
    if has_started:
        say_ready()
    while thread.is_alive():
        thread.join(1)
    for number, handler in previous.items():
        signal.signal(number, handler)
    if not has_started and not listening.should_exit:
        raise OSError("The server could not listen; what it printed above says why.")
