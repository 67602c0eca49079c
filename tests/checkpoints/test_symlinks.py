"""Links in a model's folder: those that stay in it, or in the blobs of its cache, are followed, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantkit.checkpoints.folder import metadata_files
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.symlinks import check_links
from quantkit.cli import main
from quantkit.errors import ModelError
from quantkit.planning.source import from_model
from quantkit.upload import find_origin, push

READ = (
    *("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer_x.json", "chat_template.jinja"),
    *("quantkit.json", "README.md", "generation_config.json", "LICENSE", "additional_chat_templates"),
)


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_text("nobody's business")
    return path


def refused(folder: Path, *words: str) -> None:
    for act in (CheckpointReader, from_model):
        with pytest.raises(ModelError) as caught:
            act(folder)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", READ)
def test_no_file_that_is_read_may_lead_out(name, single, secret):
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to(secret)
    refused(single, str(single / name), f"is a link to {secret}", "outside the model's folder")


def test_a_template_in_its_folder_may_not_lead_out(single, secret):
    (single / "additional_chat_templates").mkdir()
    (single / "additional_chat_templates" / "tool.jinja").symlink_to(secret)
    refused(single, "additional_chat_templates/tool.jinja", str(secret))


def test_a_chain_of_links_counts_by_its_end(single, secret):
    (single / "one.json").symlink_to("tokenizer.json")
    (single / "tokenizer.json").symlink_to(secret)
    refused(single, str(secret))


def test_links_that_stay_inside_and_a_link_to_the_folder_are_followed(tmp_path, single):
    (single / "weights").mkdir()
    (single / "model.safetensors").rename(single / "weights" / "all")
    (single / "model.safetensors").symlink_to("weights/all")
    (single / "tokenizer.json").symlink_to("config.json")
    (single / "gone.json").symlink_to("nowhere")
    (tmp_path / "alias").symlink_to(single)
    reader = CheckpointReader(tmp_path / "alias")
    assert [path.name for path in metadata_files(reader.path)] == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(name, single):
    (single / name).unlink(missing_ok=True)
    os.mkfifo(single / name)
    refused(single, str(single / name), "is a pipe")


def snapshot(tmp_path: Path, single: Path, model: str = "models--x--y", middle: str = "snapshots") -> Path:
    folder, blobs = tmp_path / model / middle / "abc", tmp_path / model / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in single.iterdir():
        path.rename(blobs / f"{path.name}-hash")
        (folder / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    return folder


def test_a_snapshot_may_lead_to_its_own_blobs_only(tmp_path, single, secret):
    folder = snapshot(tmp_path, single)
    CheckpointReader(folder)
    (folder / "tokenizer.json").symlink_to(secret)
    refused(folder, str(secret))


@pytest.mark.parametrize("shape", [{"model": "x"}, {"middle": "other"}])
def test_what_only_resembles_a_cache_is_none(tmp_path, single, shape):
    refused(snapshot(tmp_path, single, **shape), "outside the model's folder")


def test_blobs_that_are_a_link_are_nobody_s(tmp_path, single):
    folder = snapshot(tmp_path, single)
    (tmp_path / "models--x--y" / "blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "models--x--y" / "blobs").symlink_to(tmp_path / "elsewhere")
    refused(folder, "elsewhere")


def test_a_push_uploads_nothing_that_a_link_leads_to(single, secret):
    (single / "deep" / "deeper").mkdir(parents=True)
    (single / "deep" / "deeper" / "notes").symlink_to(secret)
    check_links(single)
    with pytest.raises(ModelError, match="deep/deeper/notes is a link to"):
        push(single, "a/b", source=None, endpoint="http://127.0.0.1:1")


def test_a_card_that_is_a_link_is_not_read(single, secret):
    secret.write_text("---\nlicense: mine\n---\n")
    (single / "README.md").symlink_to(secret)
    with pytest.raises(ModelError, match=r"README\.md is a link"):
        find_origin(single)


@pytest.mark.parametrize("command", [["inspect"], ["quantize", "--recipe", "rtn-int8"], ["convert", "--to", "dense"]])
def test_no_command_copies_a_file_of_the_user(command, tmp_path, single, secret, capsys):
    (single / "tokenizer_x.json").symlink_to(secret)
    output = [] if command == ["inspect"] else ["-o", str(tmp_path / "out")]
    name, *options = command
    with pytest.raises(SystemExit) as ended:
        main([name, str(single), *options, *output])
    assert ended.value.code == 4
    assert f"tokenizer_x.json is a link to {secret}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
