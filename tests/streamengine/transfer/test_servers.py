"""Two servers, one for each role: what clients, probes and scrapes of each are told."""

from pathlib import Path

from streamengine.config import TransferConfig
from tests.serving import engine_over, eventually, roomy_runner, serving
from tests.streamengine.test_metrics import scrape

PROMPT = "a prompt of some length, so that it is worth the way"


def test_servers_of_both_roles_say_what_they_do_for_each_other(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p"
    here = TransferConfig(role="decode", peers=(address,), prefill_threshold=16)
    there = TransferConfig(role="prefill", listen=address)
    with (
        serving(engine_over(roomy_runner(shared=True), transfer=there)) as prefill,
        serving(engine_over(roomy_runner(shared=True), transfer=here)) as decode,
    ):
        eventually(lambda: scrape(decode)["streamengine_remote_prefill_peers"] == 1)
        with decode.connect() as client:
            client.generate("r", prompt=PROMPT, max_tokens=5)
            done = client.until("done")[-1]
        assert done["timing"]["remote_prefill"] == "done"
        metrics = scrape(decode)
        assert (
            metrics["streamengine_remote_prefills_landed_total"] == metrics["streamengine_remote_prefills_total"] == 1
        )
        assert metrics["streamengine_remote_prefill_bytes_total"] > 0 == metrics["streamengine_prompt_tokens_total"]
        assert metrics["streamengine_generation_tokens_total"] == 5
        eventually(lambda: scrape(prefill)["streamengine_transfer_pages"] == 0)
        assert scrape(prefill)["streamengine_peer_prefills_total"] == 1
        # The one for prefills is alive and ready, and answers nobody.
        assert prefill.get("/health")[0] == prefill.get("/ready")[0] == 200
        with prefill.connect() as client:
            client.generate("r", prompt=PROMPT)
            error = client.until("error")[-1]
        assert error["code"] == "unsupported_feature" and "role prefill" in error["message"]
        assert prefill.get("/v1/stats")[2]["engine_refused_unsupported_feature"] == 1


def test_a_fallback_is_counted_by_its_reason(tmp_path: Path) -> None:
    role = TransferConfig(role="decode", peers=(f"unix:{tmp_path}/nobody",), prefill_threshold=16)
    with serving(engine_over(roomy_runner(shared=True), transfer=role)) as decode:
        with decode.connect() as client:
            client.generate("r", prompt=PROMPT, max_tokens=5)
            assert client.until("done")[-1]["timing"]["remote_prefill"] == "no_peer"
        assert scrape(decode)["streamengine_remote_prefill_fallbacks_total", "no_peer"] == 1
