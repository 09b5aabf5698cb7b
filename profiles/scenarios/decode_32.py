"""Thirty-two streams that decode, with 512 tokens each behind them: attention and the sampler begin to matter."""

from profiles.harness import Scenario, main

SCENARIO = Scenario("decode_32", "decode", steps=32, options=("--batch", "32", "--context", "512"))

if __name__ == "__main__":
    main(SCENARIO)
