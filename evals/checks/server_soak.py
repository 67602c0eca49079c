"""Thousands of requests to a server, a third of which go away at some moment, with slow readers among them.

    python evals/checks/server_soak.py [--requests 5000] [--model DIR] [--kv-cache TYPE --kv-memory SIZE] [--seed 0]
        [--out FILE]
    python evals/checks/server_soak.py --hostile 200

The server runs in a process of its own with a fifth of the pages that its requests would like to have, three lengths
of prompt and prefixes that are shared. At the end: every request that stayed was answered, every page is free, nothing
is open, and memory has not grown (resident bytes of the last quarter against the first). Integrity is checked in the
server after every step. Prints one JSON object and writes it to FILE; exit code 1 where something does not hold.

With `--hostile` so many requests that are made to cost much are sent beside 8 streams: megabytes of lists, objects and
tools, costly schemas, texts of millions of characters, a thousand prompts. Meanwhile `/health` answers within a second,
memory grows by less than 200 MB, and every stream is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
from record import about, save

SERVER = """
import sys
from quantkit.runtime.engine.engine import Engine
from quantkit.cli import main
step = Engine.step
def checked(self):
    outputs = step(self)
    self.check_integrity()
    return outputs
Engine.step = checked
main(sys.argv[1:])
"""
# Asks `/health` again and again, each time on a new connection, until its stdin ends. In a process of its own: this one
# is busy with the bodies that it sends.
WATCH = """
import http.client, json, select, sys, time
seconds = []
while not select.select([sys.stdin], [], [], 0.05)[0]:
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=90)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    finally:
        seconds.append(time.monotonic() - began)
        connection.close()
print(json.dumps([len(seconds), max(seconds)]))
"""
LENGTHS, MOST_NEW = (8, 100, 300), 60
STREAMS, RUNNING = 64, 32
GOOD_STREAMS, HOSTILE_AT_ONCE, MOST_HOSTILE_SECONDS = 8, 8, 90.0
MOST_HEALTH_SECONDS, MOST_GROWTH, FAR_TOO_MUCH = 1.0, 200 << 20, 3 << 30
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


async def ask(session: aiohttp.ClientSession, url: str, number: int, chance: random.Random, seen: Counter[str]) -> None:
    """One request, which may go away before it is answered."""
    length = chance.choice(LENGTHS)
    shared = [3 + index % 50 for index in range(length // 2)]
    prompt = shared + [3 + chance.randrange(200) for _ in range(length - len(shared))]
    body = {"prompt": prompt, "max_tokens": chance.randrange(1, MOST_NEW), "temperature": chance.choice([0, 1])}
    body |= {"stream": chance.random() < 0.6, "ignore_eos": True}
    leaves_after = chance.expovariate(8) if chance.random() < 1 / 3 else None
    while True:
        try:
            async with asyncio.timeout(leaves_after):
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    text = await answer.text()
        except TimeoutError:
            seen["left"] += 1
            return
        if answer.status == 429:
            seen["busy"] += 1
            await asyncio.sleep(0.05)
            continue
        complete = answer.status == 200 and ("[DONE]" in text if body["stream"] else "finish_reason" in text)
        seen["answered" if complete and "server_error" not in text else f"status {answer.status}"] += 1
        return


async def read_slowly(url: str, until: asyncio.Event) -> None:
    """A client that takes a few bytes at a time, again and again."""
    port = int(url.rpartition(":")[2])
    asked = {"prompt": [5] * 4, "max_tokens": 200, "stream": True, "logprobs": 20, "ignore_eos": True}
    body = json.dumps(asked).encode()
    while not until.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        for _ in range(200):
            if until.is_set() or not await reader.read(64):
                break
            await asyncio.sleep(0.01)
        writer.close()


def pages_wanted() -> int:
    """Of requests that are computed together, all of them the longest."""
    from quantkit.runtime.config import DEFAULT_PAGE_SIZE

    return -(-(max(LENGTHS) + MOST_NEW) // DEFAULT_PAGE_SIZE) * RUNNING


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def soak(url: str, pid: int, count: int, seed: int) -> dict[str, Any]:
    """Send the requests; what became of them, and memory while they ran."""
    chance, seen, memory = random.Random(seed), Counter[str](), list[int]()
    waiting, until = iter(range(count)), asyncio.Event()
    slow = [asyncio.create_task(read_slowly(url, until)) for _ in range(2)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for number in waiting:
                await ask(session, url, number, chance, seen)
                memory.append(resident(pid))

        await asyncio.gather(*(client() for _ in range(STREAMS)))
        until.set()
        await asyncio.gather(*slow, return_exceptions=True)
        metrics: dict[str, float] = {}
        for _ in range(100):
            async with session.get(f"{url}/metrics") as answer:
                found = re.findall(r"^(quantkit_\w+) ([0-9.e+]+)$", await answer.text(), re.M)
            metrics = {name: float(value) for name, value in found}
            if not (metrics["quantkit_requests_running"] or metrics["quantkit_requests_waiting"]):
                break
            await asyncio.sleep(0.1)
    quarter = len(memory) // 4
    growth = statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter])
    first = statistics.median(memory[:quarter])
    return {
        "outcomes": dict(seen),
        "pages": metrics["quantkit_kv_pages"],
        "pages_used": metrics["quantkit_kv_pages_used"],
        "running": metrics["quantkit_requests_running"],
        "waiting": metrics["quantkit_requests_waiting"],
        "preemptions": metrics["quantkit_preemptions_total"],
        "prefix_hit_tokens": metrics["quantkit_prefix_hit_tokens_total"],
        "resident_first_quarter": first,
        "resident_last_over_first": statistics.median(memory[-quarter:]) / first,
        "resident_last_over_second": growth,
    }


@lru_cache
def _listed(item: str, size: int = 12 << 20) -> str:
    """A JSON list of so many bytes."""
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def _conversation(**further: str) -> bytes:
    fields = {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": "4", **further}
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


def _schema(schema: dict[str, object]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _conversation(response_format=json.dumps(form))


def _prompt(value: str) -> bytes:
    return f'{{"prompt": {value}, "max_tokens": 4}}'.encode()


# Path and body by the number of the request; what a server may keep of the last one does not help with the next.
HOSTILE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "objects": (TEXT, lambda _: _prompt(_listed("{}"))),
    "lists": (TEXT, lambda _: _prompt(_listed("[]"))),
    "empty texts": (TEXT, lambda _: _prompt("[" + _listed('""') + "]")),
    "token ids": (TEXT, lambda _: _prompt(_listed("5", 10_000_000))),
    "tools": (CHAT, lambda _: _conversation(tools=_listed("{}"))),
    "content parts": (CHAT, lambda _: _conversation(messages=f'[{{"role": "user", "content": {_listed("{}")}}}]')),
    "multipleOf": (
        CHAT,
        lambda number: _schema(
            {"type": "number", "multipleOf": 999_983 - 2 * number, "minimum": 0, "maximum": 10**9 + number}
        ),
    ),
    "enum": (CHAT, lambda number: _schema({"enum": [f"{number}-{index}" for index in range(500_000)]})),
    "a long text": (TEXT, lambda _: _prompt(json.dumps("word, " * 660_000))),
    "1,024 texts": (TEXT, lambda number: _prompt(json.dumps([f"{number} words of a prompt " * 200] * 1024))),
}


def ended(watcher: subprocess.Popen[bytes]) -> tuple[int, float]:
    """How often `/health` was asked, and its slowest answer in seconds."""
    try:
        asked, slowest = json.loads(watcher.communicate(timeout=10)[0])
    except subprocess.TimeoutExpired:
        watcher.kill()
        watcher.communicate()
        return 0, MOST_HOSTILE_SECONDS
    return asked, slowest


async def flood(url: str, pid: int, count: int) -> dict[str, Any]:
    """Send hostile requests beside good streams; how both fared."""
    outcomes, streams, until = Counter[str](), Counter[str](), asyncio.Event()
    before = resident(pid)
    most, slowest = before, dict.fromkeys(HOSTILE, 0.0)
    command = [sys.executable, "-c", WATCH, url.rpartition(":")[2]]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    body = {"prompt": [5] * 20, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream() -> None:
            while not until.is_set():
                async with session.post(url + TEXT, json=body) as answer:
                    text = await answer.text()
                is_complete = '"finish_reason":"length"' in text and text.endswith("[DONE]\n\n")
                streams["complete" if is_complete else "broken"] += 1

        async def attack(numbers: list[int]) -> None:
            for number in numbers:
                name = list(HOSTILE)[number % len(HOSTILE)]
                path, made = HOSTILE[name]
                data = await asyncio.to_thread(made, number)
                began = time.monotonic()
                try:
                    async with session.post(url + path, data=data) as answer:
                        await answer.read()
                    outcomes[f"status {answer.status}"] += 1
                except aiohttp.ClientError:  # refused while it was being sent
                    outcomes["cut"] += 1
                slowest[name] = round(max(slowest[name], time.monotonic() - began), 2)

        async def measure() -> None:
            nonlocal most
            while most - before < FAR_TOO_MUCH:
                most = max(most, resident(pid))
                await asyncio.sleep(0.02)

        good = [asyncio.create_task(stream()) for _ in range(GOOD_STREAMS)]
        attacks = asyncio.gather(*(attack(list(range(n, count, HOSTILE_AT_ONCE))) for n in range(HOSTILE_AT_ONCE)))
        measured = asyncio.create_task(measure())
        await asyncio.wait([attacks, measured], timeout=MOST_HOSTILE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        until.set()
        asked, health = await asyncio.to_thread(ended, watcher)
        # A stream that is under way may end; one that waits behind minutes of work is not waited for.
        _, open_streams = await asyncio.wait(good, timeout=10)
        streams["unfinished"] = len(open_streams)
        for task in (attacks, measured, *open_streams):
            task.cancel()
        await asyncio.gather(attacks, measured, *good, return_exceptions=True)
    outcomes["unanswered"] = count - sum(outcomes.values())
    return {
        "outcomes": dict(outcomes),
        "slowest_s": slowest,
        "streams": dict(streams),
        "health_asked": asked,
        "health_slowest_s": round(health, 2),
        "resident_before": before,
        "resident_growth": most - before,
    }


def held_of_flood(result: dict[str, Any], said: str) -> dict[str, bool]:
    """What is asked of a flood."""
    streams = result["streams"]
    return {
        "health": result["health_slowest_s"] <= MOST_HEALTH_SECONDS and result["health_asked"] > 20,
        "memory": result["resident_growth"] < MOST_GROWTH,
        "streams": streams.get("complete", 0) >= GOOD_STREAMS and not streams.get("broken", 0) + streams["unfinished"],
        "answered": not result["outcomes"]["unanswered"],
        "end": result["exit_code"] == 0 and "a step failed" not in said,
    }


def held_of_soak(result: dict[str, Any], said: str, count: int) -> dict[str, bool]:
    """What is asked of a soak."""
    outcomes = result["outcomes"]
    return {
        "answered": outcomes.get("answered", 0) + outcomes.get("left", 0) == count,
        "pages": result["pages_used"] == result["running"] == result["waiting"] == 0,
        "memory": result["resident_last_over_first"] <= 1.02,
        "pool": 0.15 <= result["pages"] / pages_wanted() <= 0.25,
        "end": result["exit_code"] == 0 and "a step failed" not in said,
    }


def with_template(folder: Path) -> Path:
    """The demo model with a chat template, which it has none of: schemas belong to conversations."""
    from quantkit.demo import bundled_folder

    copy = Path(shutil.copytree(bundled_folder("demo") / "model", folder / "demo"))
    path = copy / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return copy


def serve(arguments: list[str], work: Callable[[str, int], Awaitable[dict[str, Any]]]) -> tuple[dict[str, Any], str]:
    """What comes of a server, and what it said."""
    command = [*arguments, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.search(r"http://\S+:\d+", line)
        assert address, line
        began = time.monotonic()
        result = asyncio.run(work(address.group(), server.pid))
        result["seconds"] = round(time.monotonic() - began, 1)
        server.terminate()
        try:
            said = server.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            server.kill()
            said = server.communicate()[1]
        result["exit_code"], result["said"] = server.returncode, said.splitlines()[-3:]
    return result, said


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--hostile", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--kv-memory", default="10MiB", help="so much that the pool has a fifth of the pages wanted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.hostile and options.kv_cache != "auto":
        parser.error("--kv-cache has no effect with --hostile")
    count = options.hostile or options.requests
    origin = about(
        requests=count,
        seed=options.seed,
        model=options.model or "demo",
        kv_cache=options.kv_cache,
        kv_memory=options.kv_memory,
    )
    if options.hostile:
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or str(with_template(Path(folder)))
            command = [sys.executable, "-m", "quantkit", "serve", model]
            result, said = serve(command, lambda url, pid: flood(url, pid, count))
        held = held_of_flood(result, said)
    else:
        given = [options.model] if options.model else []
        # With the demo model, a fifth of what so many of the longest would like; `held` says whether it was that.
        cache = ["--kv-cache", options.kv_cache, "--kv-memory", options.kv_memory]
        limits = ["--max-running", str(RUNNING), "--max-waiting", "48", "--max-length", "400", *cache]
        command = [sys.executable, "-c", SERVER, "serve", *given, *limits]
        result, said = serve(command, lambda url, pid: soak(url, pid, count, options.seed))
        held = held_of_soak(result, said, count)
    data = {"about": origin, **result, "held": held}
    print(json.dumps(data, indent=1))
    if options.out is not None:
        save(options.out, data)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
