"""Client of a server with OpenAI's API: quantkit, vLLM, llama-server."""

import contextlib
import json
import os
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from quantkit.distribution import install_command
from quantkit.errors import InputError, ModelError, RequestError, first_line
from quantkit.safety.untrusted import parse_object, shorten

try:
    import aiohttp
except ModuleNotFoundError:
    raise InputError(f"talking to a server needs aiohttp; run {install_command('serve')}") from None

KEY_VARIABLES = ("QUANTKIT_API_KEY", "OPENAI_API_KEY")
_CONNECT_SECONDS, _SILENT_SECONDS = 10.0, 600.0
_DONE = b"[DONE]"
_KEPT = 64  # maximum number of attempts that fail because the server has closed a kept-alive connection


class Remote:
    """Connection to a server, for use with `async with`.

    Args:
        url: `http://host:port`, with or without `/v1` at its end.
        key: API key; None = the key in the environment, if there is one (see `KEY_VARIABLES`).
        model: model to use; None = the first model that the server offers.
    """

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._key = key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)

    async def __aenter__(self) -> "Remote":
        """Connect, and choose the server's first model if no model is given.

        Raises:
            InputError: no server answers at the URL, or the server offers no model.
        """
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)  # as many connections as there are requests
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        try:
            if self.model is None:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        try:
            async with self._session.get(f"{self.url}/v1/models") as answer:
                await _check(answer)
                models = parse_object(await answer.read(), f"{self.url}/v1/models", ModelError, "check the URL")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InputError(f"no server answers at {self.url}; check the URL: {first_line(error)}") from None
        served = models.get("data")
        if not (isinstance(served, list) and served and isinstance(served[0], dict) and served[0].get("id")):
            text = f"the server at {self.url} lists no model ({shorten(served)})"
            raise InputError(f"{text}; check the URL and the server's settings")
        return str(served[0]["id"])

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of a streamed answer.

        Args:
            path: path of the endpoint, such as `/v1/completions`.
            body: body of the request; `model` and `stream` are added to it.
        Raises:
            RequestError: the server refuses the request, fails or disconnects.
        """
        asked = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            async with await self._post(path, asked) as answer:
                await _check(answer)
                async for line in answer.content:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == _DONE:
                        continue
                    part = json.loads(data)
                    if "error" in part:
                        raise RequestError(f"the server at {self.url} reports: {shorten(part['error'], 500)}")
                    yield part
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError(
                f"the server at {self.url} ended the answer early: {type(error).__name__}: {first_line(error)}"
            ) from None

    async def _post(self, path: str, asked: dict[str, Any]) -> aiohttp.ClientResponse:
        """Send a request; repeat it if the server has closed a kept-alive connection."""
        for _ in range(_KEPT):
            try:
                return await self._session.post(self.url + path, json=asked)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                continue
        return await self._session.post(self.url + path, json=asked)


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raise RequestError unless the response has status 200."""
    if answer.status == 200:
        return
    text = (await answer.text(errors="replace"))[:2000]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    raise RequestError(f"{answer.url}: status {answer.status}: {first_line(ValueError(text))}")
