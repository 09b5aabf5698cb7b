"""Prompts that share all but their end: what the prefix cache leaves to do."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("prefix", "prefix", steps=32, options=("--batch", "8"))

if __name__ == "__main__":
    main(SCENARIO)
