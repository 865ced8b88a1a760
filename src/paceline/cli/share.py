"""`paceline share`: its options. What it does is in `cli.engine_shares`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson

app = typer.Typer()


@app.command()
def share(
    url: Annotated[
        str | None, typer.Argument(help="The engine's address: loopback or https. Without it: show what is shared.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What clients call its model. Default: as the engine does.")] = "",
    models: Annotated[
        str, typer.Option("--models", metavar="NAME,...", help="Those to share, as the engine names them. Default: all.")
    ] = "",
    key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file with the engine's key. It stays on this machine, readable for you alone.")
    ] = None,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="Allow http to another machine: prompts cross the network unencrypted.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Share it no more. The engine itself is not touched.")] = False,
    as_json: AsJson = False,
) -> None:
    """Offer an engine that runs already: llama-server, Ollama, LM Studio, vLLM, mlx_lm.server, or any other OpenAI endpoint."""
    from paceline.cli.engine_shares import list_shares, run_share, run_unshare

    if url is None:
        list_shares(as_json=as_json)
    elif remove:
        run_unshare(url)
    else:
        named = tuple(part.strip() for part in models.split(",") if part.strip())
        run_share(url, name=name, models=named, key_file=key_file, plain_http=plain_http)
