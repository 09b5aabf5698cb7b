"""Which peer, from how many tokens on, and whether it is the same model."""

from collections import Counter
from pathlib import Path

from streamengine.transfer.choose import FIRST_THRESHOLD, NEVER, PROBE_EVERY, Threshold, choose, key_of
from streamengine.transfer.identity import SAMPLE_BYTES, identify

KEYS = [key_of("", range(i, i + 16), 16) for i in range(1000)]
PEERS = ["a", "b", "c", "d"]


def idle(*peers: str) -> dict[str, int]:
    return dict.fromkeys(peers, 0)


def test_prompts_that_begin_alike_meet_at_one_peer_and_tenants_apart():
    assert key_of("", range(40), 16) == key_of("", range(50), 16) != key_of("t", range(40), 16)
    counts = Counter(choose(key, idle(*PEERS)) for key in KEYS)
    assert min(counts.values()) > 200


def test_when_a_peer_goes_only_its_own_prompts_move():
    before = [choose(key, idle(*PEERS)) for key in KEYS]
    after = [choose(key, idle("a", "b", "c")) for key in KEYS]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != "d")
    assert choose(KEYS[0], {}) is None


def test_a_peer_with_more_than_its_share_is_passed_over():
    favourite = choose(KEYS[0], idle(*PEERS))
    assert favourite is not None
    assert choose(KEYS[0], idle(*PEERS) | {favourite: 3}) != favourite
    loads = idle(*PEERS)
    for _ in range(100):
        loads[choose(KEYS[0], loads) or ""] += 1
    assert max(loads.values()) <= 32


def test_the_threshold_is_where_a_transfer_takes_half_the_time_of_the_prefill():
    threshold = Threshold(None, page_bytes=1600, page_size=16)  # 100 bytes a token
    assert threshold.tokens == FIRST_THRESHOLD
    threshold.computed(100, 0.1)  # 1 ms a token
    threshold.moved(1_000_000, 1.0, 0.02)  # 0.1 ms a token, and 20 ms whatever is moved
    # 0.02 + 0.0001 n = n * 0.001 / 2
    assert threshold.tokens == 50


def test_where_moving_a_token_takes_longer_than_computing_it_nothing_is_moved():
    threshold = Threshold(None, page_bytes=1600, page_size=16)
    threshold.computed(100, 0.001)
    threshold.moved(1_000_000, 1.0, 0.0)
    assert threshold.tokens == NEVER
    # But for one now and then, or it would stay so for ever.
    assert sum(threshold.worth(FIRST_THRESHOLD) for _ in range(100)) == 100 // PROBE_EVERY
    assert not any(threshold.worth(FIRST_THRESHOLD - 1) for _ in range(100))
    for _ in range(40):
        threshold.moved(1_000_000, 0.001, 0.0)
    assert threshold.worth(FIRST_THRESHOLD)


def test_a_threshold_that_was_given_is_kept_to():
    threshold = Threshold(7, page_bytes=1600, page_size=16)
    threshold.computed(100, 0.001)
    threshold.moved(1_000_000, 1.0, 0.0)
    assert threshold.tokens == 7 and threshold.worth(7) and not any(threshold.worth(6) for _ in range(100))


def test_a_model_is_known_by_its_content_wherever_it_lies(tmp_path: Path):
    def folder(name: str, config: bytes = b"{}", weights: bytes = b"w" * 3 * SAMPLE_BYTES) -> str:
        place = tmp_path / name
        place.mkdir()
        (place / "config.json").write_bytes(config)
        (place / "model.safetensors").write_bytes(len(b"header").to_bytes(8, "little") + b"header" + weights)
        return str(place)

    known = identify(folder("one"))
    assert known == identify(folder("two"))
    others = [
        identify(folder("config", config=b'{"a": 1}')),
        identify(folder("longer", weights=b"w" * (3 * SAMPLE_BYTES + 1))),
        identify(folder("end", weights=b"w" * (3 * SAMPLE_BYTES - 1) + b"x")),
        identify(""),
    ]
    assert len({known, *others}) == 5
