"""Eight streams that keep to a schema: what masks cost beside the model."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("guided", "guided", steps=32, options=("--batch", "8"))

if __name__ == "__main__":
    main(SCENARIO)
