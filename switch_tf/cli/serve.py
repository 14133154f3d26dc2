"""`switch-tf serve`: serves a trained model over HTTP, with a page that shows the experts of a text's tokens."""

import argparse
import gc
import sys
import time

from etils import epy

from switch_tf.checkpoints.run_folder import select_one
from switch_tf.cli import options
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf.inference import hosts, listening, server

EXAMPLES = r"""
switch-tf serve --run runs/first
switch-tf serve --run runs/first --port 9000 --sampler beam --num_beams 4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, its checkpoint, the address, the limits, the sampler and the gin arguments."""
    options.add_decoding_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="to listen at; 0.0.0.0 for other machines too, whoever they are (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8501, metavar="N", help="0 for any that is free (default 8501)")
    parser.add_argument("--allow_host", action="append", default=[], metavar="NAME",
                        help="another name that requests and pages may give this server, such as a proxy's; may be "
                             "repeated (by default localhost and the address it listens at)")
    parser.add_argument("--batch_size", at_least=1, default=32,
                        help="texts that are answered at a time, at most (default 32)")
    parser.add_argument("--max_waiting", at_least=1, default=256,
                        help="texts that may wait; further requests are refused with 503 (default 256)")
    parser.add_argument("--max_request_bytes", at_least=1, default=2**20,
                        help="largest request; longer ones are refused with 413 (default 1048576)")


def run(arguments: argparse.Namespace) -> dict:
    """Serves until a signal comes; returns the address."""
    options.check_decoding(arguments)
    try:
        import starlette  # noqa: F401  the extra `serve`, which no other command needs
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise Refusal(f"Serving needs the package {error.name}, which is not installed; run: pip install --no-deps "
                      "starlette==1.10.0 uvicorn==0.54.0 anyio==4.16.0 h11==0.16.0 (they are the extra serve of "
                      "switch-tf).") from None
    folder = options.folder_of(arguments)
    checkpoint = select_one(folder, arguments.step)
    quiet.import_tensorflow()
    allowed = hosts.Hosts(arguments.host, arguments.allow_host)
    with listening.bind(arguments.host, arguments.port) as listener:  # before the model is loaded
        start = time.perf_counter()
        print(f"Loading {checkpoint}.", file=sys.stderr, flush=True)
        task, text_model, identity = options.load_text_model(arguments, folder, checkpoint, arguments.batch_size,
                                                                 any_batch=True)
        config = text_model.model.config
        served = server.Server(text_model, folder.resolve().name, {
            **identity, "task": task, "parameters": config.num_parameters,
            "experts": config.num_experts if config.sparse_layer_names else 0},
            arguments.batch_size, arguments.max_waiting, arguments.max_request_bytes, allowed)
        print("Compiling.", file=sys.stderr, flush=True)
        served.warm_up()
        gc.collect()
        gc.freeze()  # or a large request would have all of TensorFlow's objects looked at, again and again
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        listening.HttpServer(served.app, listening.make_room(), lambda: print(
            f"Step {identity['step']} of {folder} is ready after {time.perf_counter() - start:.1f} s: {address}/ is a "
            f"page, {address}/v1/models/{served.name}:predict takes texts. Ctrl-C stops.", file=sys.stderr, flush=True)
        ).run([listener])
        return {"run": str(folder), "step": identity["step"], "address": address}
