"""kill -9 at random moments of a run, each followed by the same command: the files of an undisturbed run, or a refusal.

    python evals/checks/kill_and_resume.py [--command quantize] [--kills 10] [--recipe gptq-int4] [--seed 0]

Uses the bundled demo model, which convert and verify get in rtn-int4. Prints one line per kill and ends with exit code
1 if any file differs, or if the second run ends otherwise than with exit code 0, or 4 and one line.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# Differ between any two runs; quantkit-run.json also has peaks of memory.
TIMES = re.compile(rb'"seconds": [\d.e-]+|\d{4}-\d\d-\d\dT[\d:+]+')
COMMANDS = {
    "quantize": "quantize --recipe {recipe} --samples {samples} -o out",
    "gguf": "quantize --recipe rtn-int4 --set format=gguf -o out",
    "convert": "convert ../source --to awq -o out",
    "verify": "verify ../source --suite none --no-bench --no-sensitivity --text ../text --gate kl<=1000 -o out",
    "search": "search --recipe {recipe} --set calibration.samples={samples} --bits 6 --candidates int4:64,int8:64 "
    "--text ../text --tokens 64 -o out.yaml",
}


def main() -> None:
    """Measure an undisturbed run, then kill and resume as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", choices=COMMANDS, default="quantize")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--recipe", default="gptq-int4")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    program = [sys.executable, "-m", "quantkit"]
    command = [*program, *COMMANDS[options.command].format(**vars(options)).split(), "--quiet"]
    generator, verdicts = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text("The small fox walks along the river and sleeps. " * 40)
        if "../source" in command:
            source = ["--set", "format=gptq", "-o", str(Path(folder) / "source"), "--quiet"]
            subprocess.run(
                [*program, "quantize", "--recipe", "rtn-int4", *source], check=True, stdout=subprocess.DEVNULL
            )
        expected, seconds = watched(command, Path(folder) / "undisturbed")
        for number in range(options.kills):
            moment = generator.uniform(0, seconds)
            place = Path(folder) / str(number)
            left = kill(command, place, moment)
            ended, files = finish(command, place)
            verdict = {"0": "same" if files == expected else "DIFFERS"}.get(ended, ended)
            verdicts[verdict.partition(":")[0]] += 1
            print(f"kill {number + 1}: {moment:.2f} of {seconds:.2f} s of work, left {left}: {verdict}", flush=True)
    print(f"{options.command}: {len(expected)} files, {options.kills} kills, {dict(verdicts)}")
    sys.exit(1 if verdicts.keys() - {"same", "refused"} else 0)


def watched(command: list[str], place: Path) -> tuple[dict[str, str], float]:
    """Run to the end undisturbed; hashes as `finish`, and the seconds from the first sign of work to the end."""
    place.mkdir()
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL)
    await_work(process, place)
    started = time.perf_counter()
    if process.wait():
        sys.exit("the undisturbed run failed")
    seconds = time.perf_counter() - started
    return finish(command, place)[1], seconds


def await_work(process: subprocess.Popen[bytes], place: Path) -> None:
    """Wait until the run has begun to write; verify writes at its end only, so all of it counts as work."""
    while "verify" not in process.args and process.poll() is None and not any(place.glob("out*")):  # type: ignore[operator]
        time.sleep(0.005)


def finish(command: list[str], place: Path) -> tuple[str, dict[str, str]]:
    """Run to the end: how it ended, and the SHA-256 of every file, times left out."""
    place.mkdir(exist_ok=True)
    ended = "0"
    if not _is_finished(place) or "verify" in command:  # which writes file by file into a folder of the user's
        done = subprocess.run(command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        is_clean = done.returncode == 4 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        ended = f"refused: {done.stderr.strip()}" if is_clean else str(done.returncode)
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return ended, {
        str(path.relative_to(place)): hashlib.sha256(TIMES.sub(b"", path.read_bytes())).hexdigest()
        for path in files
        if path.name != "quantkit-run.json" and not any(name.endswith((".search", ".partial")) for name in path.parts)
    }


def _is_finished(place: Path) -> bool:
    return any((place / name).exists() for name in ("out", "out.yaml"))


def kill(command: list[str], place: Path, moment: float) -> str:
    """Start a run and kill it `moment` seconds after it began to write; what it left behind, in words."""
    place.mkdir()
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL)
    await_work(process, place)
    time.sleep(moment)
    process.kill()
    process.wait()
    left = sorted(path.name for path in [*place.glob("*"), *place.glob("out*/checkpoint/*"), *place.glob("out/*")])
    return f"{len(left)} files and folders, {', '.join(left[:3])}" if left else "nothing"


if __name__ == "__main__":
    main()
