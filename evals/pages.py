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
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
EVALS = ROOT / "evals"
RESULTS = EVALS / "results"


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


def cli(page: str) -> str:
    """docs/cli.md."""
    for name, text in generator("page_sections/cli_page.py").sections().items():
        page = section(page, name, text)
    return page


def api(page: str) -> str:
    """docs/api.md."""
    return section(page, "names", generator("page_sections/api_page.py").render())


def accuracy(page: str) -> str:
    """docs/accuracy.md."""
    return str(generator("accuracy/page.py").render())


def gpu_standing(page: str) -> str:
    """A page with the sentence on whether the kernels have run on a GPU."""
    gpu = generator("gpu/page.py")
    return section(page, "gpu", gpu.standing(gpu.gpu_folders(RESULTS)))


def promises(page: str) -> str:
    """docs/promises.md."""
    page = gpu_standing(page)
    return section(page, "accuracy", generator("accuracy/page.py").standing())


def performance(page: str) -> str:
    """docs/performance.md."""
    gpu = generator("gpu/page.py")
    page = section(page, "cost", generator("cost/cost_page.py").table())
    page = section(page, "speed", generator("page_sections/speed_page.py").tables())
    return str(gpu.replaced(page, gpu.section(gpu.gpu_folders(RESULTS))))


def models(page: str) -> str:
    """docs/models.md."""
    rows = generator("page_sections/models_page.py")
    return str(rows.render(rows.newest()))


def serve(page: str) -> str:
    """docs/serve.md."""
    return section(page, "measured", generator("serve/page.py").render())


def runtime(page: str) -> str:
    """docs/runtime.md."""
    page = section(gpu_standing(page), "decode", generator("page_sections/decode_page.py").table())
    page = section(page, "types", generator("page_sections/kv_types_page.py").table())
    return section(page, "eviction", generator("page_sections/eviction_page.py").table())


def adapters(page: str) -> str:
    """docs/adapters.md."""
    return section(page, "measured", generator("page_sections/adapter_page.py").table())


def mtp(page: str) -> str:
    """docs/mtp.md."""
    return section(page, "acceptance", generator("page_sections/mtp_page.py").table())


def recipes(page: str) -> str:
    """docs/recipes.md."""
    return section(page, "measured", generator("page_sections/recipes_page.py").table())


def scale(page: str) -> str:
    """docs/scale.md."""
    made = generator("page_sections/scale_page.py")
    sections = {"bytes": made.bytes_table, "measured": made.speed_table, "verified": made.verify_table}
    for name, text in sections.items():
        page = section(page, name, text())
    return page


def formats(page: str) -> str:
    """docs/formats.md."""
    engines = generator("page_sections/engines_page.py")
    for name in ("rules", "vllm", "verified", "others"):
        page = section(page, name, getattr(engines, name)())
    return page


def gguf(page: str) -> str:
    """docs/gguf.md."""
    made = generator("page_sections/gguf_page.py")
    return section(section(page, "quality", made.table()), "search", made.searched())


def behaviour(page: str) -> str:
    """docs/behaviour.md."""
    return section(page, "sweep", generator("page_sections/behaviour_page.py").table())


def readme(page: str) -> str:
    """README.md: nothing that is stale."""
    rows = generator("page_sections/models_page.py")
    sentences = [
        rows.sentence(rows.newest()),
        generator("cost/cost_page.py").readme_sentence(),
        generator("page_sections/speed_page.py").readme_sentence(),
        generator("accuracy/page.py").readme_sentence(),
    ]
    return section(page, "measured", "\n\n".join(filter(None, sentences)))


PAGES: dict[str, Callable[[str], str]] = {
    "README.md": readme,
    "docs/accuracy.md": accuracy,
    "docs/adapters.md": adapters,
    "docs/api.md": api,
    "docs/behaviour.md": behaviour,
    "docs/cli.md": cli,
    "docs/formats.md": formats,
    "docs/gguf.md": gguf,
    "docs/performance.md": performance,
    "docs/promises.md": promises,
    "docs/models.md": models,
    "docs/mtp.md": mtp,
    "docs/recipes.md": recipes,
    "docs/serve.md": serve,
    "docs/runtime.md": runtime,
    "docs/scale.md": scale,
}


def rewritten(name: str) -> tuple[str, str]:
    """A page as it is, and as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text, PAGES[name](text)


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
