"""Charts of the kept figures: latency against load, cost against growth."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from tests.bench.results import CHARTS, kept
from tests.bench.table import OURS, THEIRS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {OURS: "#0b6e99", THEIRS: "#c4572d"}
LABELS = {OURS: "headrace", THEIRS: "Apache RocketMQ"}
PERCENTILES = (("p50_us", "p50"), ("p99_us", "p99"), ("p999_us", "p99.9"))
GROWTH = (
    ("connections", "connections"),
    ("queues", "queues"),
    ("groups", "consumer groups"),
    ("held-pulls", "idle held pulls"),
    ("backlog", "backlog, GB"),
)
MEASURES = (
    ("broker_cpu_us", "broker CPU, µs/message", "log"),
    ("memory_mb", "memory, MB", "log"),
    ("idle_cpu_percent", "idle CPU, % of a core", "linear"),
)
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "axes.titlesize": 10,
    "savefig.dpi": 110,
}


def draw_latency(results: dict[str, Any]) -> None:
    """docs/charts/latency.png: a panel for each percentile."""
    figure, panels = _figure(1, len(PERCENTILES), (10, 3.6))
    for axes, (key, title) in zip(panels[0], PERCENTILES, strict=True):
        for peer in (OURS, THEIRS):
            rates, middles = _latencies(results["peers"].get(peer, {}), key)
            _plot(axes, peer, rates, middles)
        axes.set(title=title, xlabel="messages/s, thousands")
        axes.set_xlim(left=0)
        _scale_y(axes, "log")
    panels[0][0].set_ylabel("ms from due to answered")
    _save(figure, "latency")


def _latencies(cases: dict[str, Any], key: str) -> tuple[list[float], list[float]]:
    paced = [reports for case, reports in cases.items() if case.startswith("paced")]
    rates = [reports[0]["wanted_rate"] / 1000 for reports in paced]
    return rates, [statistics.median(report[key] / 1000 for report in reports) for reports in paced]


def draw_growth(results: dict[str, Any]) -> None:
    """docs/charts/growth.png: a row for each measure, a column for each thing that grows."""
    cases = [
        (name, title)
        for name, title in GROWTH
        if any(name in points for points in results["peers"].values())
    ]
    figure, panels = _figure(len(MEASURES), len(cases), (2.4 * len(cases) + 0.6, 6.4))
    for row, (key, title, scale) in zip(panels, MEASURES, strict=True):
        for axes, (name, _) in zip(row, cases, strict=True):
            _plot_growth(axes, results, name, key)
            _scale_y(axes, scale)
        row[0].set_ylabel(title)
    for axes, (_, title) in zip(panels[0], cases, strict=True):
        axes.set_title(title)
    _save(figure, "growth")


def _plot_growth(axes: Axes, results: dict[str, Any], name: str, key: str) -> None:
    for peer in (OURS, THEIRS):
        points = results["peers"].get(peer, {}).get(name, [])
        _plot(axes, peer, [point["size"] for point in points], [point[key] for point in points])
    # Linear around 0, where "none" stands.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0 if name == "held-pulls" else 0.8)
    axes.xaxis.set_major_locator(_powers_of_ten(results, name))
    _plain_numbers(axes.xaxis)
    axes.tick_params(axis="x", labelrotation=45)


def _scale_y(axes: Axes, scale: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale(scale)
    if scale == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_ylim(bottom=0)
    _plain_numbers(axes.yaxis)


def _powers_of_ten(results: dict[str, Any], name: str) -> Any:
    from matplotlib.ticker import FixedLocator

    most = max(
        point["size"] for points in results["peers"].values() for point in points.get(name, [])
    )
    return FixedLocator([0, *(10**power for power in range(7) if 10**power <= most)])


def _plot(axes: Axes, peer: str, x: list[float], y: list[float]) -> None:
    if x:
        axes.plot(x, y, marker="o", markersize=4, color=COLORS[peer], label=LABELS[peer])


def _plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _figure(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Figure, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=inches, squeeze=False, layout="constrained")


def _save(figure: Figure, name: str) -> None:
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper left", ncols=len(lines), frameon=False)
    CHARTS.mkdir(exist_ok=True)
    figure.savefig(CHARTS / f"{name}.png", metadata={"Software": None})


def main(_options: list[str]) -> None:
    """Draw all that was kept."""
    for name, draw in (("latency", draw_latency), ("growth", draw_growth)):
        if (results := kept(name)) is not None:
            draw(results)
