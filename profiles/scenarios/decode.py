"""Eight streams that decode: what a server does most of its time, and what `make profile` shows."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("decode", "decode", steps=64, options=("--batch", "8"))

if __name__ == "__main__":
    main(SCENARIO)
