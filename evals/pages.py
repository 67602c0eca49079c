"""Write the figures of README and docs from evals/results, so that no figure is written by hand.

    python evals/pages.py            # list the pages that differ from evals/results; exit code 1 if there are any
    python evals/pages.py --write    # write these pages

Each page is generated as a whole, or in sections that stand between two comments. The scripts that make the texts are
in the folder of their measurement or in `page_sections/`. `evals/provenance.py` says what makes a figure stale.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
EVALS = ROOT / "evals"


@functools.cache
def generator(path: str) -> ModuleType:
    """Import the script at a path below evals. It may import modules from its own folder and from evals."""
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


def section_maker(name: str) -> ModuleType:
    """Import a script of `page_sections`, given its name without `.py`."""
    return generator(f"page_sections/{name}.py")


def section(page: str, name: str, text: str) -> str:
    """Return a page in which `text` replaces the section `name`, the part between the two comments with this name."""
    begin, end = f"<!-- {name}: made by evals/pages.py -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{begin.strip()} ... {end}: not in the page; put these two lines where {name} belongs")
    return f"{before}{begin}{text}{chr(10) if text else ''}{end}{after}"


def readme() -> str:
    """Return the section of README with figures; it leaves out stale ones."""
    models = section_maker("models_page")
    sentences = [
        models.sentence(models.newest()),
        generator("cost/cost_page.py").readme_sentence(),
        section_maker("speed_page").readme_sentence(),
        generator("accuracy/page.py").readme_sentence(),
    ]
    return "\n\n".join(filter(None, sentences))


# For each page and section, the function that makes the text. It loads its script when it is called.
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/adapters.md": {"measured": lambda: section_maker("adapter_page").table()},
    "docs/api.md": {"names": lambda: section_maker("api_page").render()},
    "docs/behaviour.md": {"sweep": lambda: section_maker("behaviour_page").table()},
    "docs/distill.md": {"distill": lambda: section_maker("distill_page").table()},
    "docs/formats.md": {
        "rules": lambda: section_maker("engines_page").rules(),
        "vllm": lambda: section_maker("engines_page").vllm(),
        "verified": lambda: section_maker("engines_page").verified(),
        "others": lambda: section_maker("engines_page").others(),
    },
    "docs/gguf.md": {
        "quality": lambda: section_maker("gguf_page").table(),
        "search": lambda: section_maker("gguf_page").searched(),
    },
    "docs/mtp.md": {"acceptance": lambda: section_maker("mtp_page").table()},
    "docs/performance.md": {
        "cost": lambda: generator("cost/cost_page.py").table(),
        "speed": lambda: section_maker("speed_page").tables(),
        "gpu": lambda: generator("gpu/page.py").section(),
    },
    "docs/promises.md": {
        "gpu": lambda: generator("gpu/page.py").standing(),
        "accuracy": lambda: generator("accuracy/page.py").standing(),
    },
    "docs/recipes.md": {"measured": lambda: section_maker("recipes_page").table()},
    "docs/runtime.md": {
        "gpu": lambda: generator("gpu/page.py").standing(),
        "decode": lambda: section_maker("decode_page").table(),
        "types": lambda: section_maker("kv_types_page").tables(),
        "eviction": lambda: section_maker("eviction_page").table(),
    },
    "docs/scale.md": {
        "bytes": lambda: section_maker("scale_page").bytes_table(),
        "measured": lambda: section_maker("scale_page").speed_table(),
        "verified": lambda: section_maker("scale_page").verify_table(),
    },
    "docs/serve.md": {"measured": lambda: generator("serve/page.py").render()},
}
WHOLE: dict[str, Callable[[], str]] = {
    "docs/accuracy.md": lambda: generator("accuracy/page.py").render(),
    "docs/models.md": lambda: section_maker("models_page").render(),
}
PAGES = ("README.md", "docs/cli.md", *WHOLE, *SECTIONS)


def sections_of(name: str) -> dict[str, str]:
    """Return the texts of all generated sections of a page, keyed by section."""
    if name == "README.md":
        return {"measured": readme()}
    if name == "docs/cli.md":
        return dict(section_maker("cli_page").sections())
    return {part: make() for part, make in SECTIONS[name].items()}


def rewritten(name: str) -> tuple[str, str]:
    """Return the text of a page as it is now, and as it should be according to evals/results."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name in WHOLE:
        return text, WHOLE[name]()
    page = text
    for part, new in sections_of(name).items():
        page = section(page, part, new)
    return text, page


def write_all() -> None:
    """Write every page that differs from evals/results."""
    for name in PAGES:
        before, after = rewritten(name)
        if before != after:
            (ROOT / name).write_text(after, encoding="utf-8")
            print(f"wrote {name}", file=sys.stderr)


def main() -> int:
    """Compare the pages with evals/results, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write_all()
        return 0
    old = [name for name in PAGES if len(set(rewritten(name))) > 1]
    print(
        "\n".join(f"{name} differs from evals/results; run evals/pages.py --write" for name in old)
        or "all pages agree with evals/results"
    )
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main())
