"""Four streams decode while prompts come in: steps of all sizes."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("mixed", "mixed", steps=32, options=("--batch", "8"))

if __name__ == "__main__":
    main(SCENARIO)
