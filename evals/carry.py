"""Keep figures current over a change of the code behind them that changes no byte.

    python evals/checks/same_bytes.py --write BEFORE.json     # in a checkout of the commit before the change
    python evals/carry.py BEFORE.json [--without autoround]   # after it

A figure is stale where the code that decides codes is another than it was (`provenance.py`). This checks all cases of
`same_bytes.py` against BEFORE.json; if it finds a difference, it ends with exit code 1 and leaves the figures stale.
Otherwise, it replaces the digests that were right at that commit by those of today, in all results, and adds a line to
evals/results/same_bytes/carried.json. A figure that was stale before stays stale. With --without STEP, recipes with
this step are not checked, and figures that rest on the step stay stale.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import provenance

CHECK = Path(__file__).parent / "checks" / "same_bytes.py"
RESULTS = Path(__file__).parent / "results"
CARRIED = RESULTS / "same_bytes" / "carried.json"


def main() -> None:
    """Check, replace, note."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--without", metavar="STEP", help="step whose recipes may write other bytes; default: none")
    options = parser.parse_args()
    before, without = options.before, options.without
    record = json.loads(before.read_text(encoding="utf-8"))
    then, now = record["about"]["commit"], provenance.commit()
    if "+" in then + now:
        sys.exit(f"commit first: the two states are {then} and {now}, and files differ from a commit with +")
    changed = changes(then)
    if not changed:
        sys.exit(f"no module that decides codes has changed since {then}")
    left_out = [] if without is None else ["--without", without]
    if subprocess.run([sys.executable, CHECK, "--check", before, *left_out], check=False).returncode:
        sys.exit(1)
    if without is not None and changed.pop(f"compress.algorithms.{without}", None) is None:
        sys.exit(f"the module of {without} has not changed, so its figures would not stay stale")
    files = [file for file in sorted(RESULTS.rglob("*.json")) if file != CARRIED]
    written = [file for file in files if replace_in(file, changed)]
    known = json.loads(CARRIED.read_text(encoding="utf-8")) if CARRIED.exists() else []
    line = {"from": then, "to": now, "cases": len(record["cases"]), "modules": sorted(changed)}
    line |= {} if without is None else {"without": without}
    provenance.write_json(CARRIED, [*known, line])
    print(f"{len(changed)} modules changed and no byte; {len(written)} files of results carried from {then} to {now}")


def changes(commit: str) -> dict[str, tuple[str, str]]:
    """Modules that decide codes whose digest is another than at a commit: the digest then, and today's."""
    with tempfile.TemporaryDirectory() as folder:
        kept = subprocess.run(
            ["git", "archive", commit, "quantkit"], cwd=provenance.ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=kept.stdout, check=True)
        then, today = digests(Path(folder)), digests(provenance.ROOT)
    return {name: (then[name], today[name]) for name in then.keys() & today.keys() if then[name] != today[name]}


def digests(root: Path) -> dict[str, str]:
    """Digest of each module that decides codes, in a checkout; names without `quantkit.`."""
    packages = [root.joinpath(*name.split(".")) for name in provenance.DECIDE]
    files = [file for package in packages for file in package.rglob("*.py")]
    names = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in files}
    return {
        name.removeprefix("quantkit.").removesuffix(".__init__"): provenance.module_digest(file)
        for file, name in names.items()
    }


def replace_in(file: Path, changed: Mapping[str, tuple[str, str]]) -> bool:
    """Replace digests in a file of results, and nothing else; returns whether there was one."""
    before = text = file.read_text(encoding="utf-8")
    for name, (then, today) in changed.items():
        text = re.sub(rf'("{re.escape(name)}":\s*)"{then}"', rf'\g<1>"{today}"', text)
    if text != before:
        file.write_text(text, encoding="utf-8")
    return text != before


if __name__ == "__main__":
    main()
