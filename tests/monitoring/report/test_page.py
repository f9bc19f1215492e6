"""The page: what others wrote stays text, nothing is loaded, and a browser shows all of it."""

import json
import re

import pytest

from MaxText.errors import UserError
from MaxText.monitoring.report.content import Section, Table, Verbatim
from MaxText.monitoring.report.writing import write_report
from MaxText.monitoring.run_record import read_run
from tests.monitoring.report.browser import chromium
from tests.monitoring.report.run_files import RunFiles, completed, eventful

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def page_of(output, *folders, **keys):
    return write_report([read_run(folder) for folder in folders], output, **keys)


def without_programs(page):
    """The page without plotly's program and ours, which hold addresses of their own."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_all_files_of_a_run(tmp_path):
    page = page_of(tmp_path / "out", completed(tmp_path / "run"))
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "goodput.png",
        "gradient_norm.png",
        "learning_rate.png",
        "loss_flops.png",
        "loss_time.png",
        "loss_tokens.png",
        "mfu.png",
        "report.html",
        "tokens_per_second.png",
    ]


def test_a_picture_of_an_earlier_report_does_not_stay(tmp_path):
    page_of(tmp_path / "out", completed(tmp_path / "run"))
    run = RunFiles(tmp_path / "new")
    run.start()
    page = page_of(tmp_path / "out", run.write())
    assert sorted(path.name for path in page.parent.iterdir()) == ["goodput.png", "report.html"]
    assert "No update is on record yet." in page.read_text()


def test_text_of_others_is_never_markup(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start(run_name=EVIL, device_kind=EVIL, data={"train": EVIL, "identity": EVIL})
    run.steps(0, 20, every=5)
    run.add("sample", 0.1, 19, text=EVIL)
    run.add("skip", 0.0, 19, reason=EVIL)
    run.add("stop", 0.1, 19, reason=EVIL)
    section = Section(EVIL, [EVIL], Table([EVIL], [[EVIL]]), [Verbatim(EVIL, EVIL)])
    page = page_of(
        tmp_path / "out",
        run.write(config={EVIL: EVIL}),
        completed(tmp_path / "other"),
        title=EVIL,
        sections=[section],
        warnings=[EVIL],
        groups={EVIL: [str(tmp_path / "other")]},
    )
    text = without_programs(page)
    assert "<img" not in text
    assert text.count("<script") == 1  # the data
    assert json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["charts"]


def test_nothing_is_loaded_from_anywhere(tmp_path):
    text = without_programs(page_of(tmp_path / "out", completed(tmp_path / "run")))
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", text)
    assert "default-src 'none'" in text


def test_it_loads_itself_again_only_while_asked_to(tmp_path):
    folder = completed(tmp_path / "run")
    assert 'http-equiv="refresh"' not in page_of(tmp_path / "a", folder).read_text()
    page = page_of(tmp_path / "b", folder, refresh=30)
    assert '<meta http-equiv="refresh" content="30">' in page.read_text()


def test_an_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output=.* cannot be written: "):
        page_of(tmp_path / "file", completed(tmp_path / "run"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run, of two, and of groups of seeds beside a run with hostile texts."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [completed(folder / "first"), eventful(folder / "second")]
    seeds = [completed(folder / f"a_rather_long_name_of_a_run_seed{n}", seed=n) for n in range(3)]
    evil = RunFiles(folder / "evil")
    evil.start(run_name=EVIL, data={"tokenizer": "other"})
    evil.steps(0, 30, every=10)
    evil.add("sample", 0.1, 29, text=EVIL + "x" * 500)
    return {
        "one": page_of(folder / "one", runs[0]),
        "two": page_of(folder / "two", *runs),
        "many": page_of(
            folder / "many",
            *seeds,
            evil.write(),
            groups={"seeds": [str(seed) for seed in seeds]},
            sections=[Section("Wide", ["x" * 300], Table(["a" * 90] * 9, [["1"] * 9]))],
        ),
    }


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["one", "two", "many"])
def test_a_browser_shows_it(browser, pages, tmp_path, name, width):
    browser.open(pages[name], width)
    assert browser.errors == []
    assert browser.requests == [pages[name].resolve().as_uri()]
    assert browser.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert browser.evaluate("document.title !== 'taken'")
    # Every chart has curves, and they have a size.
    drawn = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map((plot) => "
        "[plot.querySelectorAll('.scatterlayer path.js-line').length, plot.clientWidth])"
    )
    assert len(drawn) == 5
    assert all(curves and size > 0.4 * min(width, 800) for curves, size in drawn)
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 50_000


def test_the_buttons_change_what_is_shown(browser, pages):
    browser.open(pages["two"], 1280)

    def press(text):
        browser.evaluate(
            "[...document.querySelectorAll('#controls button')]"
            f".find((button) => button.textContent === {json.dumps(text)}).click()"
        )

    def shown(what):
        return browser.evaluate(f"document.querySelector('.wide .plot').{what}")

    assert shown("layout.xaxis.title.text") == "tokens"
    curves = shown("data.filter((trace) => trace.mode === 'lines').length")
    press("time")
    assert shown("layout.xaxis.title.text") == "time running (minutes)"
    press("raw (unsmoothed)")
    assert shown("data.filter((trace) => trace.mode === 'lines').length") == curves - 2
    press("log loss")
    assert shown("layout.yaxis.type") == "log"
    press("second")
    assert shown("data.filter((trace) => trace.mode === 'lines').length") == 1
    marks = "data.filter((trace) => trace.mode === 'markers' && trace.x.length).length"
    assert shown(marks) == 1
    press("|checkpoint")
    assert shown(marks) == 0
    assert browser.errors == []
    # What was chosen outlives the page's loading itself again.
    browser.open(pages["two"], 1280)
    assert shown("layout.xaxis.title.text") == "time running (minutes)"


def test_dark_and_light(browser, pages):
    colours = {}
    for scheme in ("light", "dark"):
        browser.open(pages["one"], 1280, scheme=scheme)
        colours[scheme] = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, "
            "document.querySelector('.plot').layout.font.color]"
        )
    assert colours["light"][0] == "rgb(255, 255, 255)"
    assert colours["dark"][0] != colours["light"][0]
    assert colours["dark"][1] != colours["light"][1]
