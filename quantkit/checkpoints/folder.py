"""Find a model by path or Hugging Face hub id, and list the files of its folder, without reading tensor data.

A GGUF file can replace a folder: `gguf_checkpoint` presents its metadata and tensors as those of a folder.
"""

import atexit
import fnmatch
import functools
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.header import TensorInfo, read_header
from quantkit.checkpoints.symlinks import check_links, check_pointers
from quantkit.demo import DEMO_MODEL
from quantkit.errors import CheckpointError, ModelError, first_line
from quantkit.formats import is_gguf
from quantkit.quantities import byte_size
from quantkit.safety.untrusted import MAX_TEXT_BYTES, check_path, read_object, shorten

if TYPE_CHECKING:
    from quantkit.checkpoints.gguf_checkpoint import GGUFModel

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MODELOPT_NAME = "hf_quant_config.json"

_MAX_NAME_BYTES = 255  # longest file name on common file systems
_PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")
_METADATA = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*", "generation_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("license*", "licence*", "notice*", "use_policy*"),
)
# Weights, code and pickles are never copied, even if their names match _METADATA.
_NEVER_CARRIED = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx"),
    *("*.pkl", "*.pickle", "*.py", "*.pyc", "*.npy", "*.npz", "*.tmp", CONFIG_NAME),
)

RUN = "quantkit-run.json"
"""File beside quantkit.json with the record of the run that made a checkpoint: time, memory, and the model's path."""


def check_folder(path: Path) -> Path:
    """Return the path of a model's directory, or of a GGUF file, after checking it.

    Raises:
        ModelError: the path does not exist or is a different kind of file, or the directory links to outside files; see
            `symlinks`.
    """
    check_path(path, ModelError)
    if path.is_dir():
        check_links(path)
        check_pointers(path)
        return path
    if is_gguf(path):
        return path
    if path.exists():
        raise ModelError(f"{path} is a file; give the directory that holds config.json and the weights, or a GGUF file")
    raise ModelError(f"no such model directory: {path}; check the path")


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json; for a GGUF file, build them from its metadata.

    Raises:
        ModelError: the file is missing, unreadable, or not a JSON object.
    """
    path = folder / CONFIG_NAME
    if is_gguf(folder):
        return dict(gguf_model(folder).config)
    if path.is_file():
        config = read_object(path, ModelError)
        beside = folder / _MODELOPT_NAME
        if "quantization_config" not in config and beside.is_file():
            # ModelOpt writes its quantization_config into a separate file.
            config["quantization_config"] = {**read_object(beside, ModelError), "quant_method": "modelopt"}
        return checked_names(config, str(path))
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds an adapter, not a model; give its base model, and this folder as --adapter")
    if any(folder.glob("*.gguf")):
        raise ModelError(f"{folder} holds GGUF files and no config.json; {_GGUF}")
    raise ModelError(f"{path} is missing; give a directory with config.json, *.safetensors and tokenizer files")


def checked_names(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the contents of config.json after checking that model type, dtypes and architectures are strings.

    Entries under text_config are checked too.

    Raises:
        ModelError: one of these entries is not a string.
    """
    inner = config.get("text_config")
    for entries in (config, inner if isinstance(inner, dict) else {}):
        names = {key: entries.get(key) for key in ("model_type", "dtype", "torch_dtype")}
        classes = entries.get("architectures")
        if isinstance(classes, list):
            names |= {f"architectures[{index}]": name for index, name in enumerate(classes)}
        elif classes is not None:
            raise ModelError(f"{where}: architectures is {shorten(classes)}, not a list of names; correct it")
        for key, name in names.items():
            if not isinstance(name, str | None):
                raise ModelError(
                    f"{where}: {key} is {shorten(name)}, not a name; correct the entry, or download the file again"
                )
    return config


def find_tensors(folder: Path) -> tuple[dict[str, TensorInfo], tuple[Path, ...], Path | None]:
    """Return all tensors of a checkpoint after checking the header of every file.

    If there is an index, it names the file of each tensor, and tensors that it does not list are ignored. But if the
    folder has a model.safetensors that the index does not list, only that file is read, as in transformers.

    Args:
        folder: folder of the model.
    Returns:
        tensors: all tensors, keyed by name.
        files: files that hold the tensors, sorted by name.
        index: path of the index; None = no index was used.
    Raises:
        ModelError: there are no safetensors files; the message says whether there are pickle or GGUF files instead.
        CheckpointError: a file is missing, truncated, inconsistent, or does not match the index.
    """
    if is_gguf(folder):
        model = gguf_model(folder)
        return model.tensors(codes=True), model.files, None
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        weight_map = _read_weight_map(index)
        if not single.is_file() or SINGLE_NAME in weight_map.values():
            return (*_indexed_tensors(folder, weight_map), index)
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not files:
        raise ModelError(_no_weights(folder))
    if single not in files and len(files) > 1:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files ({files[0].name}, ...) but no {INDEX_NAME} "
            f"that lists them; add the index, or keep one file named {SINGLE_NAME}"
        )
    file = single if single in files else files[0]
    return read_header(file), (file,), None


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors; if there is an index, all files in it, even missing ones."""
    index = folder / INDEX_NAME
    if is_gguf(folder):
        return list(gguf_model(folder).files)
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(_read_weight_map(index).values()))]


def metadata_files(folder: Path) -> list[Path]:
    """Return the sorted files to copy into a compressed checkpoint: tokenizer, licence etc., but no weights or code.

    Raises:
        CheckpointError: one of these files is too large for a tokenizer or a licence.
    """
    files = sorted(path for path in text_folder(folder).iterdir() if path.is_file() and is_metadata(path.name))
    for path in files:
        if (size := path.stat().st_size) > MAX_TEXT_BYTES:
            raise CheckpointError(
                f"{path} has {byte_size(size)}, too much for a tokenizer or licence file; move it out of the folder"
            )
    return files


def text_folder(path: Path) -> Path:
    """Return the folder that holds the config.json and the tokenizer of a model.

    For a GGUF file, quantkit writes these files once, to a temporary folder that is deleted when this process ends.

    Raises:
        ModelError, CheckpointError: the GGUF file is damaged, or its tokenizer is not supported.
    """
    return _made_folder(path.absolute(), path.stat().st_mtime_ns) if is_gguf(path) else path


@functools.lru_cache(maxsize=8)
def _made_folder(path: Path, _time: int) -> Path:
    texts, made_by = gguf_model(path).text_files(), os.getpid()
    parent = tempfile.mkdtemp(prefix="quantkit-")
    # A forked child must not delete the folder of its parent.
    atexit.register(lambda: shutil.rmtree(parent, ignore_errors=True) if os.getpid() == made_by else None)
    folder = Path(parent) / path.name
    folder.mkdir()
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def gguf_model(path: Path) -> "GGUFModel":
    """Read the headers of a GGUF file; see `GGUFModel`."""
    # Imported here, because it needs torch and the gguf package; planning and reading a folder do not.
    from quantkit.checkpoints.gguf_checkpoint import open_gguf

    return open_gguf(path)


def is_metadata(name: str) -> bool:
    """Whether a file with this name is copied into a compressed checkpoint; see `metadata_files`."""
    name = name.lower()
    return matches_any(name, _METADATA) and not matches_any(name, _NEVER_CARRIED)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of these shell-style patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


_GGUF = "give the path of a GGUF file instead of its folder"


def _no_weights(folder: Path) -> str:
    for pattern in _PICKLES:
        if pickles := sorted(folder.glob(pattern)):
            return (
                f"{folder} has no safetensors files, only {pickles[0].name}; quantkit never loads pickle files, "
                "which can run code; if you trust the file, convert it to safetensors with transformers: "
                "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
            )
    if any(folder.glob("*.gguf")):
        return f"{folder} has no safetensors files, only GGUF; {_GGUF}"
    return f"{folder} has no safetensors files; download the weights into this folder"


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor in the index; refuse file names that contain a folder."""
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' with tensors; download or copy it again")
    for tensor, name in weight_map.items():
        # Paths are refused here; links are checked when the folder is opened.
        if not isinstance(name, str) or not _is_shard_name(name):
            raise CheckpointError(
                f"{index} says that tensor {shorten(tensor)} is in {shorten(name)}; "
                "only a safetensors file in the same folder is allowed; download the index again"
            )
    return weight_map


def _is_shard_name(name: str) -> bool:
    fits = name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES
    return fits and name.endswith(".safetensors") and "/" not in name and "\\" not in name


def _indexed_tensors(folder: Path, weight_map: dict[str, str]) -> tuple[dict[str, TensorInfo], tuple[Path, ...]]:
    counts = Counter(weight_map.values())
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name in sorted(counts):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; {INDEX_NAME} says that it holds {counts[name]} tensors; download or copy it again"
            )
        headers[name] = read_header(path)
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise CheckpointError(
                f"{folder / name} does not hold tensor {shorten(tensor)}, although {INDEX_NAME} says that it does; "
                "index and files are from different downloads: download or copy them again"
            )
    tensors = {tensor: headers[name][tensor] for tensor, name in weight_map.items()}
    return tensors, tuple(folder / name for name in sorted(counts))


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DOWNLOADED = (
    *("*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.tiktoken", "chat_template*"),
    *("LICENSE*", "NOTICE*", "README*"),
)
# Not downloaded. Subfolders hold exports in other layouts; "consolidated" files repeat the same weights.
_LEFT_THERE = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.py", "*.pkl", "*.gguf", "*.onnx")


def is_hub_id(model: str) -> bool:
    """Whether a text has the form of a hub id, rather than of a mistyped path."""
    return _HUB_ID.fullmatch(model) is not None


def resolve(model: str | Path | None) -> Path:
    """Return the directory of a model; download a model on the hub first, without pickle files and code.

    Args:
        model: a directory, or a hub id such as `Qwen/Qwen3-0.6B`; None = the bundled demo model.
    Returns:
        The directory itself, or the snapshot in the hub's cache.
    Raises:
        ModelError: the path does not exist or is a file, or the id cannot be downloaded; the message says what to do.
    """
    if model is None:
        return DEMO_MODEL
    path = Path(model).expanduser()
    # An existing path is never looked up on the hub, even if it looks like an id.
    return check_folder(path) if path.exists() or not is_hub_id(str(model)) else download(str(model))


def download(model: str, file: str | None = None) -> Path:
    """Download a model, or one file of a model, from the hub unless it is in the cache; return its path in the cache.

    Args:
        model: hub id.
        file: name of the file to download; None = all files that a model needs.
    Raises:
        ModelError: the download failed; the message says what to do.
    """
    try:
        # Imported late: a local directory must not depend on the hub's library.
        from huggingface_hub import hf_hub_download, snapshot_download

        if file is not None:
            return Path(hf_hub_download(model, file))
        return Path(snapshot_download(model, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_LEFT_THERE)))
    except Exception as error:
        # The hub's errors (HTTP, connection, validation, cache, missing package) share no class.
        raise ModelError(
            f"{model!r} is not a local directory and cannot be downloaded from the hub ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); check the spelling and the network, log in with `hf auth login` if the "
            "model is gated, or give a directory"
        ) from error


def find_baseline(path: Path, given: str | Path | None, made: Mapping[str, Any]) -> tuple[str, Path]:
    """Return the name and the directory of the model that a checkpoint was made from.

    Args:
        path: directory of the checkpoint.
        given: the model, if the user names it: a directory or a hub id.
        made: contents of quantkit-run.json; empty if there is none.
    Raises:
        ModelError: nothing names the model, or it does not exist.
    """
    if given is not None:
        folder = resolve(str(given))
        return "demo model" if folder == DEMO_MODEL else str(given), folder
    model = made.get("model")
    if model == "demo":
        return "demo model", DEMO_MODEL
    if not isinstance(model, str):
        raise ModelError(f"{path} does not name the model it was made from; give that model as --baseline")
    if not Path(model).is_dir():  # without the user's word, quantkit downloads nothing that a file names
        raise ModelError(
            f"{path} was made from {shorten(model)}, which does not exist here; give the original as --baseline"
        )
    return model, resolve(model)
