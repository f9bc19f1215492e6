"""The page: what others wrote stays text, nothing is loaded, and a browser shows all of it."""

import importlib.resources
import json
import re
import shutil
import subprocess

import pytest

from MaxText.errors import UserError
from MaxText.monitoring.run_record import read_run
from MaxText.reports.page import PageSection, PageTable, Verbatim
from MaxText.reports.report_writer import write_report
from tests.reports.run_files import RunFiles, completed

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def page_of(output, *folders, **keys):
    return write_report([read_run(folder) for folder in folders], output, **keys)


def without_programs(page):
    """The page without plotly's program and this project's, which hold addresses of their own."""
    return re.sub(r"<script>.*?</script>", "", page.read_text("utf-8"), flags=re.DOTALL)


def figures_next_to(page):
    return sorted(path.stem for path in page.parent.glob("*.png"))


@pytest.fixture(scope="module")
def one(tmp_path_factory, completed_run):
    return page_of(tmp_path_factory.mktemp("one"), completed_run)


@pytest.fixture(scope="module")
def two(tmp_path_factory, completed_run, eventful_run):
    return page_of(tmp_path_factory.mktemp("two"), completed_run, eventful_run)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Of groups of seeds next to a run with hostile texts."""
    folder = tmp_path_factory.mktemp("many")
    seeds = [completed(folder / f"a_rather_long_name_of_a_run_seed{n}", seed=n) for n in range(2)]
    evil = RunFiles(folder / "evil")
    data = {"train": EVIL, "identity": EVIL, "tokenizer": "other"}
    evil.start(run_name=EVIL, device_kind=EVIL, data=data)
    evil.steps(0, 30, every=10)
    evil.add("sample", 0.1, 29, text=EVIL + "x" * 500)
    evil.add("step_skipped", 0.0, 29, reason=EVIL)
    evil.add("stop", 0.1, 29, reason=EVIL)
    keys = {EVIL: EVIL, **dict.fromkeys([f"num_of_a_kind_{n}" for n in range(12)], 1_000_000)}
    wide = PageSection("Wide", ["x" * 300], PageTable(["a" * 90] * 9, [["1"] * 9]))
    section = PageSection(EVIL, [EVIL], PageTable([EVIL], [[EVIL]]), [Verbatim(EVIL, EVIL)])
    return page_of(
        folder / "page",
        *seeds,
        evil.write(config=keys),
        title=EVIL,
        warnings=[EVIL],
        groups={EVIL: [str(seed) for seed in seeds]},
        sections=[wide, section],
    )


def test_all_files_of_a_run(one):
    assert figures_next_to(one) == ["loss_flops", "loss_time", "loss_tokens"]
    assert len([path for path in one.parent.iterdir() if path.is_file()]) == 4
    assert len(without_programs(one)) < 1.5e6


def test_text_of_others_is_never_markup(many):
    text = without_programs(many)
    assert "<img" not in text
    assert text.count("<script") == 1  # the data
    assert "loss" in json.loads(re.search(r'id="data">(.*?)</script>', text)[1])


def test_nothing_is_loaded_from_anywhere(one):
    text = without_programs(one)
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", text)
    assert "default-src 'none'" in text
    assert 'http-equiv="refresh"' not in text


def test_another_report_takes_the_place_of_the_first(tmp_path, run):
    """Also of its figures, one of which may have nothing to show any more."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "loss_time.png").touch()
    page = page_of(tmp_path / "out", run.write(), refresh=30)
    assert figures_next_to(page) == []
    assert "No step is recorded yet." in page.read_text()
    assert '<meta http-equiv="refresh" content="30">' in page.read_text()
    with pytest.raises(UserError, match=r"output=.*report\.html"):
        page_of(page, run.folder)


def sections_of(page):
    return re.findall(r"<section><h2>(.*?)</h2>", without_programs(page))


def test_the_curve_comes_first_and_the_result_of_a_comparison_before_it(one, many, completed_run):
    assert sections_of(one)[:3] == ["Curves", "Run", "Provenance"]
    text = without_programs(one)
    assert text.find('id="loss"') < text.find('id="controls"') < text.find('id="learning_rate"')
    assert "Each point of a training line is the median of the reports around it" in text
    result = PageSection("Result", ["a is lower"], PageTable(["configuration"], [["a"]]))
    page = page_of(one.parent / "compare", completed_run, leading=[result])
    assert sections_of(page)[:3] == ["Result", "Curves", "Run"]
    assert sections_of(many)[:3] == ["Curves", "Runs", "Wide"]


def test_names_break_behind_their_punctuation_and_not_inside_of_words(tmp_path, run):
    config = {"gradient_accumulation_steps": 4, "dataset_path": "/data/some_long/<folder>"}
    changed = {key: str(value) for key, value in config.items()}
    run.rows[0]["changed_keys"] = changed
    run.steps(0, 3)
    text = without_programs(page_of(tmp_path / "out", run.write(config=config)))
    assert "<dt>gradient_<wbr>accumulation_<wbr>steps</dt>" in text
    assert "/<wbr>data/<wbr>some_<wbr>long/" in text
    assert "&lt;folder&gt;" in text


def test_the_table_of_runs_has_no_hashes(tmp_path):
    folders = []
    for number in range(2):
        run = RunFiles(tmp_path / f"run{number}")
        run.start()
        run.steps(0, 3)
        modules = {f"/parts/mine{number}.py": f"{number}" * 64}
        config = {
            "learning_rate": number,
            "import_modules": [*modules],
            "imported_modules": modules,
        }
        folders.append(run.write(config=config))
    text = without_programs(page_of(tmp_path / "out", *folders))
    tables = dict(re.findall(r"<h2>(.*?)</h2>(.*?)</section>", text, re.DOTALL))
    assert "learning_<wbr>rate" in tables["Runs"]
    assert "mine0.py" not in tables["Runs"]
    assert "mine0.py" in tables["Configuration differences"]


@pytest.fixture(scope="module")
def chromium():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    return program or pytest.skip("needs chromium (Debian: apt-get install chromium)")


def opened(program, page, folder, width, *switches):
    """The page after its programs ran, and what they said."""
    done = subprocess.run(
        [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"),
            *("--hide-scrollbars", "--enable-logging=stderr", f"--window-size={width},900"),
            *(f"--user-data-dir={folder}", *switches, "--dump-dom", page.resolve().as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "two", "many"])
def test_a_browser_draws_every_chart(chromium, name, tmp_path, request):
    document, console = opened(chromium, request.getfixturevalue(name), tmp_path, 1280)
    assert console == []
    assert "<title>taken" not in document
    _, *charts = re.split(r'<details class="chart', document.partition("<footer")[0])
    assert len(charts) > 10
    for chart in charts:
        assert ("main-svg" in chart) == ("open" in chart.partition(">")[0])
        assert "aria-label=" in chart


def with_program(page, program, copy):
    """A copy of the page that also runs a program of the test."""
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.*?>", "", page.read_text())
    copy.write_text(f"{text}<script>{program}</script>")
    return copy


PRESSES = """
const plot = document.querySelector(".wide .plot");
const form = document.getElementById("controls");
const said = [];
function say() {
  const shown = plot.data.filter((trace) => trace.visible);
  const kinds = shown.map((trace) => trace.meta.kind);
  const title = plot.layout.xaxis.title.text;
  said.push([title, plot.layout.yaxis.type, ["raw", "line", "dots", "mark"].map(
    (kind) => kinds.filter((each) => each === kind).length)]);
}
say();
for (const value of ["2", "raw", "validation", "run b", "mark checkpoint"]) {
  form.querySelector(`[value="${value}"]`).click();
  say();
}
form.querySelector('[name="log loss"]').click();
form.only.value = "b";
form.only.dispatchEvent(new Event("input", { bubbles: true }));
say();
const table = document.querySelector("table");
table.querySelectorAll("th button")[2].click();
table.querySelectorAll("th button")[2].click();
said.push(table.tBodies[0].textContent.trim()[0]);
const tables = [...document.querySelectorAll("table")];
const sizes = tables.find((each) => each.textContent.includes("KV cache"));
sizes.querySelectorAll("th button")[1].click();
said.push([...sizes.tBodies[0].rows].map((row) => row.cells[1].textContent));
const parts = tables.find((each) => each.textContent.includes("feed-forward"));
const share = [...parts.querySelectorAll("th")].findLast((each) => each.textContent === "share");
share.firstElementChild.click();
said.push([...parts.tBodies[0].rows].map((row) => row.cells[share.cellIndex].textContent));
const mfu = document.querySelector('[data-name="mfu"]');
Plotly.relayout(plot, { "xaxis.range[0]": 1, "xaxis.range[1]": 2 }).then(() => {
  const [curves] = document.querySelectorAll(".charts");
  const linked = [...curves.querySelectorAll("details[open]:not(.wide) .plot")];
  said.push(linked.map((each) => each.layout.xaxis.range));
  return Plotly.relayout(mfu, { "yaxis.range": [0, 0.02] });
}).then(() => {
  said.push([...mfu.querySelectorAll(".ytick text")].map((each) => each.textContent));
  const page = document.documentElement;
  said.push([page.scrollWidth, page.clientWidth, plot.clientWidth], Object.keys(sessionStorage));
  document.body.append("said: " + JSON.stringify(said) + ";");
});
"""


@pytest.mark.slow
def test_the_controls_change_what_is_shown(chromium, two, tmp_path):
    """On a narrow screen, which it does not leave; the page itself lets no other program run."""
    copy = with_program(two, PRESSES, tmp_path / "copy.html")
    document, console = opened(chromium, copy, tmp_path / "browser", 500)
    assert console == []
    reported = json.loads(re.search(r"said: (\[.*\]);", document)[1])
    *states, first, sizes, shares, zoomed, ticks, widths, kept_settings = reported
    assert states == [
        ["tokens", "linear", [2, 2, 2, 6]],
        ["time running (minutes)", "linear", [2, 2, 2, 6]],
        ["time running (minutes)", "linear", [0, 2, 2, 6]],
        ["time running (minutes)", "linear", [0, 2, 0, 6]],
        ["time running (minutes)", "linear", [0, 1, 0, 1]],
        ["time running (minutes)", "linear", [0, 1, 0, 0]],
        ["time running (minutes)", "log", [0, 0, 0, 0]],
    ]
    assert zoomed == [[1, 2]] * 4
    assert first == "b"  # by validation loss, descending
    assert sizes == sorted(sizes, key=lambda size: (size[-3:] == "MiB", float(size[:-4])))
    assert shares == sorted(shares, key=lambda share: float(share.rstrip(" %")))
    assert len(set(ticks)) == len(ticks) > 3  # of a small MFU
    assert widths[0] == widths[1] == 500
    assert widths[2] > 200
    assert kept_settings == [f"report:{copy}"]  # whatever its title


WIDTHS = (400, 1280, 2560)
PAPER = 718  # pixels between the margins of A4
AXE = """
const cells = [...document.querySelectorAll(":is(th, td:not(:first-child)):not(.long, .wider *)")];
const broken = cells.flatMap((cell) => {
  const texts = document.createNodeIterator(cell, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    for (const { 0: word, index } of text.data.matchAll(/\\w+/g)) {
      const range = document.createRange();
      range.setStart(text, index);
      range.setEnd(text, index + word.length);
      if (new Set([...range.getClientRects()].map(({ top }) => top)).size > 1) found.push(word);
    }
  }
  return found;
});
const { scrollWidth, clientWidth } = document.documentElement;
const excess = scrollWidth - clientWidth;
axe.run().then(({ violations, passes }) => {
  const ids = violations.map(({ id, impact, nodes }) => [id, impact, nodes[0].html]);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  parent.postMessage([innerWidth, dark, passes.length > 15, excess, broken, ids], "*");
});
"""
FRAMES = """
addEventListener("message", ({ data }) => {
  document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(data);
});
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("medium", "name"), [("light", "two"), ("dark", "two"), ("print", "two"), ("print", "many")]
)
def test_nothing_keeps_anyone_from_reading_it(chromium, medium, name, tmp_path, request):
    """Checked by axe-core at three widths and on paper; no word is broken, nothing sticks out."""
    page = request.getfixturevalue(name)
    axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    copy = with_program(page, axe + AXE, tmp_path / "copy.html")
    is_dark, widths = medium == "dark", (PAPER,) if medium == "print" else WIDTHS
    if medium == "print":
        copy.write_text(copy.read_text().replace("@media print", "@media all"))
    frames = [f'<iframe src="copy.html" width={w} height=900></iframe>' for w in widths]
    host = tmp_path / "host.html"
    host.write_text(f"<body><script>{FRAMES}</script>{''.join(frames)}")
    scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    switches = ["--virtual-time-budget=60000", *scheme]
    document, console = opened(chromium, host, tmp_path / "browser", 2600, *switches)
    assert console == []
    messages = sorted(json.loads(text) for text in re.findall("<pre>(.*?)</pre>", document))
    assert messages == [[width, is_dark, True, 0, [], []] for width in widths]
