"""A program that behaves as engines do: it loads, serves, hangs, runs out of memory, crashes and forks. It imports little, so that it starts in no time.

python -S engine_program.py MODE SOCKET [LAYERS]

SOCKET is the path of a Unix socket, or HOST:PORT.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

CUDA_FULL = """ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4403.49 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 4617397248
llama_model_load: error loading model: unable to allocate CUDA0 buffer
srv    load_model: failed to load model"""
HOST_FULL = """ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 68719476768
llama_model_load: error loading model: unable to allocate CPU buffer"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a program prints


def serve(path: str, n_answers: int = -1) -> None:
    """Answer every request with 200, as many as asked for."""
    host, _, port = path.rpartition(":")
    listening = socket.create_server((host, int(port))) if port.isdigit() else socket.socket(socket.AF_UNIX)
    if not port.isdigit():
        listening.bind(path)
        listening.listen()
    while n_answers:
        connection, _ = listening.accept()
        connection.recv(4096)
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.close()
        n_answers -= 1


def main(mode: str, path: str, layers: str = "-") -> None:
    started = Path(os.environ["FOLDER"]) / "started"
    n_started = int(started.read_text()) if started.exists() else 0
    started.write_text(str(n_started + 1))
    match mode.split(":"):
        case ["serve"]:
            say(f"layers {layers}, key {os.environ.get('LLAMA_API_KEY')}")
            serve(path)
        case ["fits", most]:  # that many layers
            if layers == "-" or int(layers) > int(most):
                say(CUDA_FULL)
                sys.exit(1)
            serve(path)
        case ["host-full"]:
            say(HOST_FULL)
            sys.exit(1)
        case ["wrong"]:
            say("llama_model_load: error loading model: unknown model architecture: 'new'")
            sys.exit(1)
        case ["silent"]:
            time.sleep(600)
        case ["talks"]:
            while True:
                say(".")
                time.sleep(0.005)
        case ["crashes"]:  # as soon as it was seen to be ready
            serve(path, 1)
            os.abort()
        case ["once"]:  # and fails at every later start
            if n_started:
                say("the driver is gone")
                sys.exit(3)
            serve(path, 1)
            os.abort()
        case ["stubborn"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            serve(path)
        case ["forks"]:
            for leaves in (False, True):  # one in the engine's session, one in its own, whose parent ends
                if os.fork() == 0:
                    if leaves:
                        os.setsid()
                        if os.fork():
                            os._exit(0)
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    time.sleep(600)
            os.wait()  # for the one that left its session, and ended
            serve(path)
        case ["bare"]:  # it has a process whose environment is empty
            if os.fork() == 0:
                os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)"], {})
            serve(path)
        case ["floods"]:
            for _ in range(300):
                os.write(2, b"x" * 9999 + b"\n")
            serve(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
