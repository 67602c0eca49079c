"""README and the pages of docs that show figures, again from evals/results; no figure in them is written by hand.

    python evals/pages.py            # which pages differ from what is kept, and which figures are stale; exit code 1
    python evals/pages.py --write    # write them

What is generated is a whole page, or what stands between two comments. A measurement that has a folder makes its part
in that folder; `page_sections/` makes all others. `evals/provenance.py` says what makes a figure stale.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
EVALS = ROOT / "evals"


@functools.cache
def generator(path: str) -> ModuleType:
    """A script below evals as a module, with what it imports from its own folder and from this one."""
    file = EVALS / path
    for folder in (str(EVALS), str(file.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    name = "pages_" + re.sub(r"\W", "_", path)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def section(page: str, name: str, text: str) -> str:
    """The page with what stands between the two comments of a name replaced."""
    begin, end = f"<!-- {name}: made by evals/pages.py -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{begin.strip()} ... {end}: not in the page; put these two lines where {name} belongs")
    return f"{before}{begin}{text}{chr(10) if text else ''}{end}{after}"


def readme() -> str:
    """What README says of figures: nothing that is stale."""
    models = generator("page_sections/models_page.py")
    sentences = [
        models.sentence(models.newest()),
        generator("cost/cost_page.py").readme_sentence(),
        generator("page_sections/speed_page.py").readme_sentence(),
        generator("accuracy/page.py").readme_sentence(),
    ]
    return "\n\n".join(filter(None, sentences))


# Section of a page -> script below evals that makes it, and its function.
GPU = ("gpu/page.py", "standing")
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "docs/adapters.md": {"measured": ("page_sections/adapter_page.py", "table")},
    "docs/api.md": {"names": ("page_sections/api_page.py", "render")},
    "docs/behaviour.md": {"sweep": ("page_sections/behaviour_page.py", "table")},
    "docs/formats.md": {
        name: ("page_sections/engines_page.py", name) for name in ("rules", "vllm", "verified", "others")
    },
    "docs/gguf.md": {
        "quality": ("page_sections/gguf_page.py", "table"),
        "search": ("page_sections/gguf_page.py", "searched"),
    },
    "docs/mtp.md": {"acceptance": ("page_sections/mtp_page.py", "table")},
    "docs/performance.md": {
        "cost": ("cost/cost_page.py", "table"),
        "speed": ("page_sections/speed_page.py", "tables"),
        "gpu": ("gpu/page.py", "section"),
    },
    "docs/promises.md": {"gpu": GPU, "accuracy": ("accuracy/page.py", "standing")},
    "docs/recipes.md": {"measured": ("page_sections/recipes_page.py", "table")},
    "docs/runtime.md": {
        "gpu": GPU,
        "decode": ("page_sections/decode_page.py", "table"),
        "types": ("page_sections/kv_types_page.py", "tables"),
        "eviction": ("page_sections/eviction_page.py", "table"),
    },
    "docs/scale.md": {
        "bytes": ("page_sections/scale_page.py", "bytes_table"),
        "measured": ("page_sections/scale_page.py", "speed_table"),
        "verified": ("page_sections/scale_page.py", "verify_table"),
    },
    "docs/serve.md": {"measured": ("serve/page.py", "render")},
}
WHOLE = {
    "docs/accuracy.md": ("accuracy/page.py", "render"),
    "docs/models.md": ("page_sections/models_page.py", "render"),
}
PAGES = ("README.md", "docs/cli.md", *WHOLE, *SECTIONS)


def made(source: tuple[str, str]) -> str:
    """What a script makes."""
    script, function = source
    return str(getattr(generator(script), function)())


def sections_of(name: str) -> dict[str, str]:
    """The generated sections of a page."""
    if name == "README.md":
        return {"measured": readme()}
    if name == "docs/cli.md":
        return dict(generator("page_sections/cli_page.py").sections())
    return {part: made(source) for part, source in SECTIONS[name].items()}


def rewritten(name: str) -> tuple[str, str]:
    """A page as it is, and as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name in WHOLE:
        return text, made(WHOLE[name])
    page = text
    for part, new in sections_of(name).items():
        page = section(page, part, new)
    return text, page


def write_all() -> None:
    """Write every page that is not what the results give."""
    for name in PAGES:
        before, after = rewritten(name)
        if before != after:
            (ROOT / name).write_text(after, encoding="utf-8")
            print(f"wrote {name}", file=sys.stderr)


def main() -> int:
    """Compare or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write_all()
        return 0
    old = [name for name in PAGES if len(set(rewritten(name))) > 1]
    print(
        "\n".join(f"{name}: not what evals/results gives" for name in old) or "all pages are what evals/results gives"
    )
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main())
