"""One stream that decodes: nearly all of it is reading weights."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("decode_1", "decode", steps=64, options=("--batch", "1"))

if __name__ == "__main__":
    main(SCENARIO)
