"""docs/reference/results.md: its table is that of the runs in results.csv."""

import runpy

from tests.house.sources import REPOSITORY


def test_the_table_and_figure_are_of_the_runs(tmp_path):
    page = runpy.run_path(str(REPOSITORY / "docs/plot_results.py"))
    rows, differences = page["table"](page["losses"]())
    assert rows in page["PAGE"].read_text(encoding="utf-8")
    page["draw"](differences, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000
