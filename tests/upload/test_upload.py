"""Pushing to a local fake of the hub: what arrives is the checkpoint and its card; nothing leaves this machine."""

from __future__ import annotations

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml

from quantkit.api import quantize
from quantkit.cli import main
from quantkit.compress.convert import convert
from quantkit.errors import InputError, ModelError, OutputError
from quantkit.upload import find_origin, hub_card, push
from tests.helpers import make_model

CARD = """---
license: apache-2.0
language: en
tags: [other]
base_model: someone/base
---
# Mine
"""


class FakeHub(ThreadingHTTPServer):
    """Keeps what is uploaded, by repository."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.created: list[dict] = []
        self.refuse = False
        self.authorized: set[str | None] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_args):
        pass

    def answer(self, data, status=200):
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self):
        self.answer({"sha": "0" * 40, "siblings": []})

    def do_PUT(self):
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self):
        data, hub = self.body(), self.server
        hub.authorized.add(self.headers.get("Authorization"))
        if hub.refuse:
            self.answer({"error": "no"}, 403)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(data))
            self.answer({"url": f"{hub.url}/{json.loads(data).get('organization')}/{json.loads(data)['name']}"})
        elif "/preupload/" in self.path:
            files = json.loads(data)["files"]
            modes = ["lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular" for file in files]
            pairs = zip(files, modes, strict=True)
            self.answer({"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False} for f, m in pairs]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            actions = [{"upload": {"href": f"{hub.url}/object/{item['oid']}"}} for item in objects]
            answers = [{**item, "actions": action} for item, action in zip(objects, actions, strict=True)]
            self.answer({"transfer": "basic", "objects": answers})
        elif "/commit/" in self.path:
            for line in data.decode().splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    hub.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                elif item["key"] == "lfsFile":
                    hub.files[item["value"]["path"]] = hub.objects[item["value"]["oid"]]
            self.answer(
                {"success": True, "commitOid": "1" * 40, "commitUrl": f"{hub.url}/me/it/commit/1", "hookOutput": ""}
            )
        else:
            self.answer({})


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # only this machine is reached
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_model(folder / "model", dtype=torch.bfloat16)
    (folder / "model" / "README.md").write_text(CARD)
    (folder / "model" / "LICENSE").write_text("do what you like")
    quantize(folder / "model", "rtn-int4", folder / "q", overrides={"weights.group_size": 32})
    return folder


def test_every_file_arrives_with_a_card(hub, made):
    address = push(made / "q", "me/it", source=made / "model", endpoint=hub.url, token="t")
    assert "it" in address
    assert hub.files == {path.name: path.read_bytes() for path in (made / "q").iterdir() if path.is_file()}
    assert hub.files["LICENSE"] == b"do what you like"
    front = yaml.safe_load(hub.files["README.md"].decode().split("---")[1])
    assert front["license"] == "apache-2.0"
    assert front["base_model"] == "someone/base"
    assert front["base_model_relation"] == "quantized"
    assert front["tags"] == ["quantkit", "quantized", "compressed-tensors"]
    assert b"int4 g32" in hub.files["README.md"]


@pytest.mark.parametrize("refuse", [False, True])
def test_the_users_token_reaches_the_hub_and_nothing_else(hub, made, tmp_path, monkeypatch, capfd, caplog, refuse):
    monkeypatch.setenv("HF_TOKEN", "hf_secretOfTheUser")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    hub.refuse = refuse
    caplog.set_level(logging.DEBUG)
    small = ["--recipe", "rtn-int4", "--set", "weights.group_size=32", "--push-to-hub", "me/it", "--verbose"]
    with pytest.raises(SystemExit) as left:
        main(["quantize", str(made / "model"), *small, "-o", str(tmp_path / "out")])
    assert left.value.code == (4 if refuse else 0)
    assert "Bearer hf_secretOfTheUser" in hub.authorized
    said = [*capfd.readouterr(), caplog.text]
    written = [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    uploaded = [data.decode("latin-1") for data in hub.files.values()]
    assert not any("hf_secret" in text for text in (*said, *written, *uploaded))


def test_a_gguf_file_is_pushed_beside_its_card(hub, made):
    convert(made / "q", "gguf", made / "q.gguf", overwrite=True)
    push(made / "q.gguf", "me/it", source=None, endpoint=hub.url, token="t")
    assert hub.files.keys() == {"q.gguf", "README.md"}
    assert hub.files["q.gguf"] == (made / "q.gguf").read_bytes()
    assert not hub.created[0].get("private")
    assert "llama-cli -m q.gguf" in hub.files["README.md"].decode()


def test_no_licence_is_made_up(made):
    card = hub_card(made / "q", "me/it", {})
    assert "license" not in yaml.safe_load(card.split("---")[1])
    assert find_origin(None) == find_origin("demo") == {}


def test_failures_are_one_line(hub, made, tmp_path):
    hub.refuse = True
    with pytest.raises(OutputError, match="hf auth login") as error:
        push(made / "q", "me/it", source=None, endpoint=hub.url, token="t")
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="user/name"):
        push(made / "q", "it", source=None, endpoint=hub.url, token="t")
    (tmp_path / "README.md").write_text("---\n: [\n---\n")
    with pytest.raises(ModelError, match="not valid YAML"):
        find_origin(tmp_path)
