"""`quantkit serve`: serve the engine through OpenAI's HTTP API."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantkit.cli._options import engine_options, option_group, settings_of
from quantkit.cli._output import Command, Output, say
from quantkit.distribution import install_command
from quantkit.errors import InputError
from quantkit.runtime.config import adapter_folders
from quantkit.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Address, access and limits of a server; the text of each setting describes the field."""

    host: str = setting("127.0.0.1", "Address to listen on.", flag="--host")
    port: int = setting(8000, "Port to listen on; 0 = any free port.", flag="--port", minimum=0, maximum=65535)
    api_key: str | None = setting(
        None, "Key that clients must send.", flag="--api-key KEY", kind=str, shown="$QUANTKIT_API_KEY, or none"
    )
    no_api_key: bool = setting(False, "Allow a public address without a key.", flag="--no-api-key")
    served_name: str | None = setting(
        None, "Name that clients use for the model.", flag="--served-name NAME", kind=str, shown="the checkpoint's"
    )
    max_running: int = setting(
        32, "Maximum number of requests that are computed together.", flag="--max-running", minimum=1
    )
    max_waiting: int = setting(
        256, "Maximum number of waiting requests; further ones get status 429.", flag="--max-waiting", minimum=0
    )
    max_prompt: int | None = setting(
        None, "Maximum number of prompt tokens.", flag="--max-prompt", minimum=1, shown="what fits"
    )
    allow_origin: tuple[str, ...] = setting(
        (),
        "Origins of web pages that may send requests; '*' = all.",
        flag="--allow-origin URL,...",
        commas=True,
        shown="none",
    )
    allow_host: tuple[str, ...] = setting(
        (),
        "Further host names by which clients may address a server on a local address; '*' = any.",
        flag="--allow-host NAME,...",
        commas=True,
        shown="localhost and --host",
    )
    drain_seconds: int = setting(
        25, "Seconds that open requests may take after SIGTERM.", flag="--drain-seconds", minimum=0
    )
    log_requests: bool = setting(False, "Print a line per request on stderr, without its text.", flag="--log-requests")


@click.command("serve", cls=Command, short_help="Serve a model over HTTP to OpenAI clients.")
@click.argument("checkpoint", required=False)
@option_group("options", settings_of(ServeOptions))
@engine_options
def command(output_to: Output, *, engine: dict[str, Any], checkpoint: str | None, options: dict[str, Any]) -> None:
    """Serve CHECKPOINT, a directory or a hub id; without it, the bundled demo model.

    With --adapter, which is repeatable, a request chooses an adapter by giving the adapter's name as `model`.

    The server runs until SIGTERM or Ctrl-C; it then answers open requests before it ends. `/health`, `/ready` and
    `/metrics` are for operators; `/openapi.json` describes the other routes.

    \b
    Examples:
      quantkit serve
      quantkit serve demo-awq-int4 --port 8080 --kv-cache int8
      quantkit serve demo-awq-int4 --adapter sql=sql-lora --adapter support-lora
      quantkit serve demo-awq-int4 --host 0.0.0.0 --api-key "$KEY"
    """
    try:
        from quantkit.server.admission import known_hosts
        from quantkit.server.app import Server
        from quantkit.server.bridge import Bridge
        from quantkit.server.run import HttpServer, bind, is_public
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs the package {error.name}, which is not installed; run {install_command('serve')}"
        ) from None
    from quantkit.runtime.llm import LLM

    asked = ServeOptions(**options)
    key = asked.api_key or os.environ.get("QUANTKIT_API_KEY") or None
    if key is None and is_public(asked.host) and not asked.no_api_key:
        raise InputError(
            f"{asked.host} can be reached from other machines, and no key is set; give --api-key, or --no-api-key "
            "to let anybody use the model"
        )
    # Clients on other machines reach a public address by host names that the server cannot know.
    is_any = "*" in asked.allow_host or (is_public(asked.host) and not asked.allow_host)
    name = asked.served_name or ("demo" if checkpoint is None else Path(checkpoint).name)
    if name in adapter_folders(engine.get("adapters", ())):
        raise InputError(f"model and adapter are both named {name!r}; give --adapter NAME=DIR with a different name")
    llm = LLM(checkpoint, lazy=True, max_sequences=asked.max_running, **engine)
    bridge = Bridge(llm, max_waiting=asked.max_waiting, say=say)
    server = Server(
        bridge=bridge,
        name=name,
        max_prompt=asked.max_prompt,
        key=key,
        log=say if asked.log_requests else None,
        origins=tuple(map(_origin, asked.allow_origin)),
        hosts=None if is_any else known_hosts(asked.host, asked.allow_host),
    )
    HttpServer(server, output_to.tell, asked.drain_seconds).run_until_ended(bind(asked.host, asked.port))


def _origin(text: str) -> str:
    """Return an origin in the form that browsers send."""
    origin = text.strip().lower().removesuffix("/")
    if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
        raise InputError(f"--allow-origin {text!r} is not an origin; give SCHEME://HOST[:PORT], or '*' for all")
    return origin
