"""Prompts of 512 tokens, one after the other: what computes rather than reads."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("prefill", "prefill", steps=16, options=("--batch", "2", "--context", "512"))

if __name__ == "__main__":
    main(SCENARIO)
