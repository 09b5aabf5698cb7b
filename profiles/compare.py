"""Today's profiles against the baselines of this machine: 1 if something became slower, and what, and why.

.venv/bin/python -m profiles.compare decode prefill --threshold 10%
.venv/bin/python -m profiles.compare decode --keep     # today's becomes the baseline
"""

import argparse
from importlib import import_module
from pathlib import Path

from profiles import harness
from streamengine.profile.diff import compare, lines, share
from streamengine.profile.record import read

NAMES = sorted(path.stem for path in (Path(__file__).resolve().parent / "scenarios").glob("[!_]*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenarios", nargs="*", choices=[*NAMES, []], help="all of them if none is named")
    parser.add_argument("--model", default=harness.MODEL)
    parser.add_argument("--runs", type=int, default=3, help="the quietest of so many counts")
    parser.add_argument("--threshold", default="10%", help="above what two runs of one version differ by")
    parser.add_argument("--keep", action="store_true", help="keep today's profiles as the baselines")
    asked = parser.parse_args()
    threshold, slower = share(asked.threshold), False
    for name in asked.scenarios or NAMES:
        scenario: harness.Scenario = import_module(f"profiles.scenarios.{name}").SCENARIO
        profile = read(harness.run(scenario, asked.model, asked.runs) / "profile.json")
        path = harness.baseline(scenario, profile)
        print(f"\n{name}, against {path.relative_to(harness.HERE)}")
        if asked.keep:
            harness.keep(profile, path)
        elif path.exists():
            difference = compare(read(path), profile, threshold)
            print("\n".join(lines(difference)))
            slower |= difference.slower
        else:
            print("there is none for this machine: keep one with --keep")
    return int(slower)


if __name__ == "__main__":
    raise SystemExit(main())
