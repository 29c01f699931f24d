"""How fast memlint is beside TorchFix and torch-preflight: ratios measured in one run.

    python benchmarks/speed.py --torchfix-tree TRANSFORMERS_SDIST --preflight-tree TIMM_SDIST

Needs `torchfix` and `torch-preflight` on the PATH (or named by options); a tool that is missing is left out, which is
said.
Each tool gets the same number of processes. TorchFix and torch-preflight run once, since they take minutes; memlint,
which is over in seconds, runs several times without its cache, and the median counts. Exit status 1 where a ratio is
below `--at-least`.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

MEMLINT = [sys.executable, "-m", "memlint", "check", "--isolated", "--no-cache", "--select", "ALL", "--exit-zero"]


def seconds(command: list[str]) -> float:
    """The wall time of a command, whatever it finds. Exits where the command cannot run."""
    # an installed package has its bytecode compiled; a checkout must be allowed to write it
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, env=environment)
    taken = time.perf_counter() - start
    if done.returncode not in (0, 1, 2):
        sys.exit(f"{shlex.join(command)}: exit status {done.returncode}: {done.stderr.decode()[-300:]}")
    return taken


def compare(name: str, command: list[str], tree: Path, repeats: int, jobs: int) -> float | None:
    """Print how many times faster memlint is than another tool on a tree; None where the tool is missing."""
    if shutil.which(command[0]) is None:
        print(f"{name}: {command[0]} is not installed: left out")
        return None
    ours = [*MEMLINT, "--jobs", str(jobs), "--output-format", "concise", str(tree)]
    times = [seconds(ours) for _ in range(repeats)]
    other = seconds([*command, str(tree)])
    mine = statistics.median(times)
    spread = f"{min(times):.2f} to {max(times):.2f}"
    print(f"{name} on {tree.name}: {other:.1f} s, memlint {mine:.2f} s ({spread}), {other / mine:.1f} times faster")
    return other / mine


def start_up(repeats: int) -> float:
    """Print the time of checking one small file as a multiple of importing libcst."""
    small = Path(__file__).parent.parent / "fixtures" / "rules" / "ML106" / "quiet.py"
    importing, checking = [], []
    for _ in range(repeats):
        importing.append(seconds([sys.executable, "-c", "import libcst"]))
        checking.append(seconds([*MEMLINT, str(small)]))
    ratio = statistics.median(checking) / statistics.median(importing)
    print(f"one small file: {statistics.median(checking):.3f} s, {ratio:.2f} times `import libcst`")
    return ratio


def peak_memory(tree: Path, jobs: int) -> None:
    """Print the largest resident set of any memlint process on a tree."""
    seconds([*MEMLINT, "--jobs", str(jobs), str(tree)])
    kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"largest process on {tree.name}: {kib / 1024:.0f} MiB")


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torchfix-tree", type=Path, help="extracted sdist of transformers")
    parser.add_argument("--preflight-tree", type=Path, help="extracted sdist of timm")
    parser.add_argument("--torchfix", default="torchfix --select ALL", help="TorchFix's command")
    parser.add_argument("--preflight", default="torch-preflight check", help="torch-preflight's command")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=0.0, help="exit 1 below this ratio")
    args = parser.parse_args()
    ratios = []
    start_up(max(args.repeats, 5))
    # before anything else runs as a child: the figure is the largest of all children so far
    for tree in (args.torchfix_tree, args.preflight_tree):
        if tree is not None:
            peak_memory(tree, args.jobs)
    if args.torchfix_tree is not None:
        command = [*shlex.split(args.torchfix), "--jobs", str(args.jobs)]
        ratios.append(compare("TorchFix", command, args.torchfix_tree, args.repeats, args.jobs))
    if args.preflight_tree is not None:
        command = [*shlex.split(args.preflight), "--jobs", str(args.jobs)]
        ratios.append(compare("torch-preflight", command, args.preflight_tree, args.repeats, args.jobs))
    if any(ratio is not None and ratio < args.at_least for ratio in ratios):
        sys.exit(1)


if __name__ == "__main__":
    main()
