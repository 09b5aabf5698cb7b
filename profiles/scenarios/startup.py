"""A start with nothing compiled: seconds of each stage, and of each piece."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("startup", "startup", steps=16)

if __name__ == "__main__":
    main(SCENARIO)
