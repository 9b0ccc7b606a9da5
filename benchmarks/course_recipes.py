"""The course's recipes from beginning to end: dev accuracy, and its ratio to always giving the commonest answer.

Meant for a GPU (about seven minutes with both side by side on an H200; --set shortens it for a trial).

    python benchmarks/course_recipes.py [--recipes birthplaces/course-vanilla birthplaces/course-rope] [--out DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import headway


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["birthplaces/course-vanilla", "birthplaces/course-rope"])
    parser.add_argument("--out", type=Path, default=Path("runs/course"))
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    options = parser.parse_args()

    sets = [part for assignment in options.set for part in ("--set", assignment)]
    folders = {recipe: options.out / recipe.replace("/", "-") for recipe in options.recipes}
    started = [
        subprocess.Popen([sys.executable, "-m", "headway", "train", recipe, "--out", str(folder), *sets])
        for recipe, folder in folders.items()
    ]
    if any(process.wait() for process in started):
        raise SystemExit("a training run failed; its message is above")
    for recipe, folder in folders.items():
        run = headway.load(folder)
        accuracy = run.evaluate("dev")["accuracy"]
        answer, baseline = run.task.baseline("dev")
        print(
            f"{recipe:30} dev {accuracy:.1%}   always '{answer}' {baseline:.1%}   ratio {accuracy / baseline:.1f} ×   "
            f"{run.state.seconds:.0f} s of training on {run.device}"
        )


if __name__ == "__main__":
    main()
