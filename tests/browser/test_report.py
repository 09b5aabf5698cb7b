"""The report of a profile, opened from disk in a real browser."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamengine.profile.record import Kernel, Overhead, Profile
from streamengine.profile.report import render
from tests.profiles import LAST, MIDDLE, burning, profile

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"><!-- "


@pytest.fixture
def tab(browser: Any, watched: Callable[[Any], Any], complaints: list[str]) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    tab = watched(context.new_page())
    tab.set_default_timeout(20_000)
    tab.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
    yield tab
    context.close()


def show(tab: Any, folder: Path, document: Profile) -> Any:
    path = folder / "report.html"
    path.write_text(render(document), encoding="utf-8")
    tab.goto(path.as_uri())
    return tab


def names(tab: Any) -> list[str]:
    texts: list[str] = tab.locator("#table tbody th").all_text_contents()
    return texts


@pytest.mark.parametrize(
    ("document", "worst"),
    [(profile(), MIDDLE), (profile(burning("lm_head", 0.02)), LAST), (profile(host_s=0.1), "host")],
)
def test_the_most_expensive_is_told_first_and_has_the_first_bar(
    tab: Any, tmp_path: Path, document: Profile, worst: str
) -> None:
    show(tab, tmp_path, document)
    assert worst in tab.locator("#verdict .worst .big").text_content()
    assert worst in tab.locator("#bars .kind").first.text_content()
    assert tab.locator("#verdict .worst").bounding_box()["y"] < 250
    widths = [box.bounding_box()["width"] for box in tab.locator("#bars .bar rect:first-child").all()]
    assert widths == sorted(widths, reverse=True)


def test_an_interrupted_run_says_so(tab: Any, tmp_path: Path) -> None:
    show(tab, tmp_path, profile())
    assert tab.locator(".notice").count() == 0
    calls = tuple(msgspec.structs.replace(call, p50_s=call.mean_s / 2) for call in profile().calls)
    show(tab, tmp_path, profile(calls=calls))
    assert "14.4 ms in the mean and 7.22 ms by their medians" in tab.locator(".notice").text_content()


def test_all_parts_are_there_and_add_up_to_the_step(tab: Any, tmp_path: Path) -> None:
    show(tab, tmp_path, profile())
    assert tab.locator("#sum").text_content() == "calls 14.4 ms + host/other 620 µs = step 15.1 ms (mean of 100)"
    assert tab.locator("#timeline rect").count() == 62 + 61 + 1  # calls, gaps between them, and the one before
    assert tab.locator("#roofline circle").count() == 4
    assert tab.locator("#ledger .amount").count() == 3
    assert tab.locator("#tokens .amount").all_text_contents() == ["1–46 steps", "5–890 steps", "9–644 steps"]


def test_the_table_is_sorted_by_any_column_and_unknown_comes_last(tab: Any, tmp_path: Path) -> None:
    show(tab, tmp_path, profile())
    assert names(tab)[0] == MIDDLE
    tab.check("#places")
    assert tab.locator("#table tbody tr").count() == 63
    tab.click("#table >> text=GFLOP/s")
    assert names(tab)[0].startswith("layers.29: o_proj") and names(tab)[-1].startswith("host")
    assert tab.locator('th[aria-sort="descending"]').text_content() == "GFLOP/s"
    tab.click("#table >> text=GFLOP/s")
    assert names(tab)[0] == "layers.2: attention" and names(tab)[-1].startswith("host")
    tab.click("#table >> text=Call >> nth=0")
    tab.fill("#filter", "layers.7:")
    assert [name.split(":")[0] for name in names(tab)] == ["layers.6", "layers.7", "layers.7"]


def test_a_piece_tells_its_layers_its_code_and_how_it_was_compiled(tab: Any, tmp_path: Path) -> None:
    show(tab, tmp_path, profile())
    tab.locator("#bars a", has_text=LAST).click()
    piece = tab.locator("#piece-last")
    assert piece.get_attribute("open") is not None
    assert "missed: threads 1 → 2" in piece.text_content()
    assert "layers29" in piece.text_content()
    piece.locator("text=4 kernels").click()
    piece.locator("text=cpp_fused__to_copy_add_cat_linear_mean_mul_neg_pow_rsqrt_slice_split_with_sizes_0").click()
    assert piece.locator("pre").first.is_visible()
    assert piece.locator("pre").first.text_content().startswith('extern "C" void kernel')
    assert not piece.locator("pre").last.is_visible()


def test_the_timeline_zooms_and_is_read_with_the_keyboard(tab: Any, tmp_path: Path) -> None:
    show(tab, tmp_path, profile())
    width = tab.locator("#timeline svg").bounding_box()["width"]
    tab.fill("#zoom", "3")
    assert tab.locator("#timeline svg").bounding_box()["width"] == pytest.approx(8 * width, rel=0.01)
    tab.focus("#timeline svg")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "embed_tokens" in tab.locator("#step-event").text_content()


def test_what_a_profile_holds_is_never_markup(tab: Any, tmp_path: Path) -> None:
    piece, *others = profile().pieces
    bad = msgspec.structs.replace(
        piece, name=HOSTILE, key='"><b>', code=HOSTILE, graph=HOSTILE, kernels=(Kernel(name=HOSTILE, source=HOSTILE),)
    )
    calls = tuple(msgspec.structs.replace(call, name=HOSTILE + call.name) for call in profile().calls)
    document = profile(model=HOSTILE, pieces=(bad, *others), calls=calls, ledger={HOSTILE: 1.0})
    show(tab, tmp_path, document)
    assert "owned" not in tab.title().split("·")[-1] and tab.title() != "owned"
    assert tab.locator("img").count() == 0 and tab.locator("script").count() == 2
    assert tab.locator("h1").text_content().startswith(HOSTILE)


def test_names_without_a_space_make_the_page_no_wider(tab: Any, tmp_path: Path) -> None:
    long = "/folder" * 60
    show(tab, tmp_path, profile(model=long, architecture=long, trace=long, ledger={long: 1.0}, startup={long: 1.0}))
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("on_s", "told"),
    [(0.011, "measuring makes a step 10.0 % longer"), (0.009, "what measuring costs is lost in noise")],
)
def test_what_measuring_costs_is_never_less_than_nothing(tab: Any, tmp_path: Path, on_s: float, told: str) -> None:
    show(tab, tmp_path, profile(overhead=Overhead(off_s=0.01, on_s=on_s)))
    assert told in tab.locator("#about").text_content()


def test_a_profile_without_pieces_roofs_or_timeline_is_shown_as_far_as_it_goes(tab: Any, tmp_path: Path) -> None:
    bare = [
        msgspec.structs.replace(
            call, bytes=None, flops=None, gbps=None, gflops=None, of_ceiling=None, p50_s=None, min_s=None
        )
        for call in profile().calls
    ]
    empty: dict[str, Any] = {"ceilings": None, "timeline": None, "overhead": None, "pieces": ()}
    show(tab, tmp_path, profile(**empty, calls=tuple(bare), rows=(), tokens=(), ledger={}, startup={}))
    assert tab.locator("#bars .kind").count() == 6
    assert tab.locator("#step, #roof, #pieces").count() == 0
    assert tab.locator("#verdict .tile").count() == 2
    assert "NaN" not in tab.locator("main").inner_text()


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_has_the_colours_that_are_wished(
    browser: Any, watched: Callable[[Any], Any], tmp_path: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = show(watched(context.new_page()), tmp_path, profile())
    tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    brightness = tab.evaluate("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (brightness > 200) == (scheme == "light")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("document.querySelector('#timeline svg').getBoundingClientRect().width <= innerWidth")
    context.close()
