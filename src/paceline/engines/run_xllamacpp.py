"""llama.cpp's server out of the wheel `xllamacpp`, as a program: `python -m paceline.engines.run_xllamacpp`.

Its options, and what it prints, are those of `llama-server`, so both are started and asked in the same way. The API key comes from LLAMA_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

_SPELLED = {"CUDA": "CUDA", "ROCM": "ROCm", "HIP": "ROCm", "VULKAN": "Vulkan", "METAL": "Metal", "MTL": "Metal", "SYCL": "SYCL"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = argparse.ArgumentParser("run_xllamacpp", allow_abbrev=False)
    found.add_argument("--list-devices", action="store_true", help="print list of available devices and exit")
    found.add_argument("--version", action="store_true", help="show version and exit")
    found.add_argument("--model", help="path of a GGUF file")
    found.add_argument("--alias", help="name of the model in the API")
    found.add_argument("--host", default="127.0.0.1", help="address to listen on, or the path of a UNIX socket, which ends in .sock")
    found.add_argument("--port", type=int, default=0, help="port to listen on; 0: any")
    found.add_argument("--ctx-size", type=int, default=0, help="tokens of all slots together; 0: the model's own context")
    found.add_argument("--parallel", type=int, default=1, help="slots")
    found.add_argument("--no-kv-unified", action="store_true", help="divide the context among the slots")
    found.add_argument("--n-gpu-layers", type=int, default=-1, help="layers on the GPU; -1: as many as fit")
    found.add_argument("--threads", type=int, help="threads that compute")
    found.add_argument("--mmproj", help="GGUF file of a multimodal projector")
    found.add_argument("--spec-type", choices=("draft-mtp",), help="draft with the model's own layers (draft-mtp)")
    found.add_argument("--spec-draft-model", help="GGUF file of a draft model")
    found.add_argument("--cache-ram", type=int, help="memory for earlier prompts, in MiB")
    found.add_argument("--cors-origins", help="origin whose pages may read answers")
    for always in ("--offline", "--no-ui", "--jinja", "--metrics"):
        found.add_argument(always, action="store_true", help="always on")
    return found


def main(args: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    asked = parser().parse_args(args)
    if asked.version:
        print(f"version: {version('xllamacpp')}")  # noqa: T201 - a program prints
        return
    xllamacpp: Any = import_module("xllamacpp")

    if asked.list_devices:
        _list_devices(xllamacpp)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # C++ code runs for minutes, and Python's handlers only between two calls of it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        server = xllamacpp.Server(_parameters(xllamacpp, asked))
    except RuntimeError:  # the server has printed why
        sys.exit(1)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201
    while True:
        signal.pause()


def _parameters(xllamacpp: Any, asked: argparse.Namespace) -> Any:
    found = xllamacpp.CommonParams()
    found.model.path = asked.model
    if asked.alias:
        found.model_alias = {asked.alias}
    found.hostnames, found.port = [asked.host], asked.port
    found.n_ctx, found.n_parallel, found.kv_unified = asked.ctx_size, asked.parallel, not asked.no_kv_unified
    found.n_gpu_layers = asked.n_gpu_layers
    if asked.threads:
        found.cpuparams.n_threads = asked.threads
    if asked.mmproj:
        found.mmproj.path = asked.mmproj
    if asked.spec_type:
        found.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        found.load_mtp = True
    if asked.spec_draft_model:
        found.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        found.speculative.draft.mparams.path = asked.spec_draft_model
    if asked.cache_ram is not None:
        found.cache_ram_mib = asked.cache_ram
    if asked.cors_origins:
        found.cors_origins = asked.cors_origins
    if key := os.environ.get("LLAMA_API_KEY"):
        found.api_keys = [key]
    found.ui, found.offline, found.endpoint_metrics = False, True, True
    return found


def _list_devices(xllamacpp: Any) -> None:
    print("Available devices:")  # noqa: T201
    for number, device in enumerate(xllamacpp.get_device_info()):
        name = next((shown for prefix, shown in _SPELLED.items() if device["name"].upper().startswith(prefix)), None)
        if name is not None:
            total, free = (device[key] >> 20 for key in ("memory_total", "memory_free"))
            print(f"  {name}{number}: {device['description']} ({total} MiB, {free} MiB free)")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
