"""A timeline as a figure of plotly: a row a lane, a bar a trial."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hfta_tune.monitor.timeline import Ending, LaneStay, Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure, Scatter

__all__ = ["figure_of"]

# Okabe and Ito's colours, which people who are colour-blind can tell apart.
_ENDINGS: dict[Ending, tuple[str, str]] = {
    "done": ("done", "#009E73"),
    "pruned": ("pruned", "#E69F00"),
    "stopped": ("stopped with the run", "#7F8C8D"),
    "error": ("error", "#C0392B"),
    "nan": ("NaN", "#CC79A7"),
    "paused": ("paused, or to be retried", "#B8A9C9"),
    "running": ("running", "#56B4E9"),
}
_IDLE = "#E3E6E8"
_ROUND = "#5D6D7E"
_COMPILATION = "#2C1A4D"
_BETWEEN = "rgba(255, 255, 255, 0.6)"
_TEXT = "#222222"

_ROW_PIXELS = 26
_MOST_PIXELS = 1600
# A gap between rounds that is a smaller share of the whole time would hardly be seen.
_SMALLEST_GAP = 1e-3
# More lines than this hide what lies under them; the legend shows them.
_MOST_ROUND_LINES = 400
# Browsers take seconds to find out which of more labels fit.
_MOST_LABELS = 2000


def figure_of(timeline: Timeline) -> Figure:
    """Draw a timeline.

    Raises:
        ImportError: plotly is missing.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ImportError(
            "A timeline's picture needs plotly. Install it with: pip install 'hfta-tune[plot]'"
        ) from error

    rows = _Rows(timeline)
    bars = [*_bars_of_stays(timeline, rows), _idle(timeline, rows), *_of_rounds(timeline, rows)]
    if len(timeline.stays) <= _MOST_LABELS:
        bars.append(_labels(timeline, rows))
    figure = graph_objects.Figure(bars)
    trials = len({stay.trial for stay in timeline.stays})
    figure.update_layout(
        title={
            "text": f"Lanes of {timeline.name}",
            "subtitle": {
                "text": f"{trials} trials, {len(rows.of_worker)} worker{'s' * (len(rows.of_worker) > 1)}, "
                f"lanes in use {timeline.lanes_in_use:.0%} of the time, "
                f"workers in rounds {timeline.in_rounds:.0%}"
            },
        },
        barmode="overlay",
        bargap=0,
        height=min(_MOST_PIXELS, 190 + _ROW_PIXELS * rows.count),
        plot_bgcolor="white",
        hovermode="closest",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis={
            "title": "seconds since the start",
            "range": [0, timeline.seconds],
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={
            "tickvals": list(rows.ticks),
            "ticktext": list(rows.ticks.values()),
            "range": [rows.count - 0.4, -0.6],
            "showgrid": False,
            "zeroline": False,
        },
    )
    for time in timeline.resumed:
        figure.add_vline(time, line={"dash": "dash", "color": "black", "width": 1}, annotation_text="resumed")
    return figure


class _Rows:
    """Which row each lane has; above the lanes of a worker is the row of its rounds, and above that an empty one.

    Attributes:
        count: How many there are.
        ticks: What stands beside them.
        of_worker: The row of a worker's rounds, and its number of lanes.
    """

    def __init__(self, timeline: Timeline) -> None:
        lanes: dict[str, int] = {}
        for span in timeline.workers:
            lanes[span.worker] = max(span.lanes, lanes.get(span.worker, 0))
        self.count = 0
        self.ticks: dict[int, str] = {}
        self.of_worker: dict[str, tuple[int, int]] = {}
        self._without = {stay.worker for stay in timeline.stays if stay.lane is None}
        for_each = _ROW_PIXELS * (sum(lanes.values()) + 2 * len(lanes)) <= _MOST_PIXELS
        for worker, number in lanes.items():
            self.of_worker[worker] = self.count, number
            self.ticks[self.count] = f"<b>{worker}</b> rounds"
            if for_each:
                self.ticks |= {self.count + 1 + lane: f"lane {lane}" for lane in range(number)}
            self.count += number + 2
        for worker in self._without:
            self.ticks[self.count] = worker
            self.count += 1

    def of(self, worker: str, lane: int | None) -> int:
        """The row of a lane."""
        return self.count - 1 if lane is None else self.of_worker[worker][0] + 1 + lane

    def middle_of(self, worker: str) -> float:
        """The middle of a worker's rows."""
        row, lanes = self.of_worker[worker]
        return row + lanes / 2


def _bars_of_stays(timeline: Timeline, rows: _Rows) -> list[Bar]:
    from plotly.graph_objects import Bar

    bars = []
    for ending, (name, color) in _ENDINGS.items():
        stays = [stay for stay in timeline.stays if stay.ending == ending]
        if stays:
            bars.append(
                Bar(
                    name=f"{name} ({len(stays)})",
                    marker={"color": color, "line": {"color": "white", "width": 1}},
                    customdata=[[stay.trial, stay.rounds, *_place(stay)] for stay in stays],
                    hovertemplate="<b>trial %{customdata[0]}</b><br>%{customdata[2]}<br>%{base:.2f} s to %{x:.2f} s, "
                    f"%{{customdata[1]}} rounds<br>{name}<extra></extra>",
                    **_places(rows, stays),
                )
            )
    return bars


def _labels(timeline: Timeline, rows: _Rows) -> Bar:
    """The trials' names on bars that cannot be seen, so that nothing covers them."""
    from plotly.graph_objects import Bar

    return Bar(
        name="numbers",
        showlegend=False,
        marker={"color": "rgba(0, 0, 0, 0)", "line": {"width": 0}},
        text=[_label(stay) for stay in timeline.stays],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": _TEXT},
        constraintext="inside",
        hoverinfo="skip",
        **_places(rows, timeline.stays),
    )


def _label(stay: LaneStay) -> str:
    """What fits on a bar: "12" of Tune's trial "3f2a1_00012"."""
    return stay.trial.rpartition("_")[2].lstrip("0") or "0"


def _place(stay: LaneStay) -> list[str]:
    return [f"{stay.worker}, lane {stay.lane}" if stay.lane is not None else "it ended before it had trained"]


def _places(rows: _Rows, spans: Iterable[Any]) -> dict[str, Any]:
    """Where bars lie."""
    spans = list(spans)
    return {
        "orientation": "h",
        "base": [span.begin for span in spans],
        "x": [span.end - span.begin for span in spans],
        "y": [rows.of(span.worker, span.lane) for span in spans],
        "width": 0.9,
    }


def _idle(timeline: Timeline, rows: _Rows) -> Bar:
    from plotly.graph_objects import Bar

    idle = timeline.idle
    return Bar(
        name="idle",
        marker={"color": _IDLE, "line": {"width": 0}},
        customdata=[[each.end - each.begin, f"{each.worker}, lane {each.lane}"] for each in idle],
        hovertemplate="<b>idle</b> for %{customdata[0]:.2f} s<br>%{customdata[1]}<extra></extra>",
        **_places(rows, idle),
    )


def _of_rounds(timeline: Timeline, rows: _Rows) -> list[Bar | Scatter]:
    """The strips of rounds, where rounds end, and the shades of compilations."""
    from plotly.graph_objects import Bar, Scatter

    strips: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    ends: dict[str, list[Any]] = {"x": [], "y": []}
    numbers: dict[str, int] = {}
    for own in timeline.rounds:
        row, lanes = rows.of_worker[own.worker]
        number = numbers[own.worker] = numbers.get(own.worker, 0) + 1
        label = "<br>".join(
            [f"<b>round {number}</b>, {own.end - own.begin:.3f} s"]
            + [f"array {array.number}: {len(array.trials)} trials, {array.strategy}" for array in own.arrays]
        )
        strips["x"] += [own.begin, own.end, None]
        strips["y"] += [row, row, None]
        strips["text"] += [label, label, None]
        ends["x"] += [own.end, own.end, None]
        ends["y"] += [row + 0.55, row + 0.45 + lanes, None]
    gaps = [gap for gap in timeline.between_rounds if gap[2] - gap[1] > _SMALLEST_GAP * timeline.seconds]
    compilations = [(each.worker, each.begin, each.end) for each in timeline.compilations]
    return [
        Bar(
            name="between rounds, pale",
            legendgroup="between",
            showlegend=False,
            marker={"color": _BETWEEN, "line": {"width": 0}},
            hoverinfo="skip",
            **_across(rows, gaps if timeline.rounds else []),
        ),
        Scatter(  # white on white says nothing: the legend shows a colour made pale
            name="no round, pale",
            legendgroup="between",
            mode="markers",
            marker={"symbol": "square", "size": 12, "color": "rgba(0, 158, 115, 0.4)"},
            x=[None],
            y=[None],
        ),
        Scatter(
            name="rounds",
            mode="lines",
            line={"color": _ROUND, "width": 8},
            hovertemplate="%{text}<extra></extra>",
            **strips,
        ),
        Scatter(
            name="a trial takes the lane",
            mode="markers",
            marker={"symbol": "triangle-right", "size": 9, "color": "black", "line": {"width": 1, "color": "white"}},
            x=[stay.begin for stay in timeline.stays],
            y=[rows.of(stay.worker, stay.lane) for stay in timeline.stays],
            hoverinfo="skip",
        ),
        Scatter(
            name="ends of rounds",
            mode="lines",
            line={"color": "rgba(0, 0, 0, 0.2)", "width": 1},
            hoverinfo="skip",
            visible=True if max(numbers.values(), default=0) <= _MOST_ROUND_LINES else "legendonly",
            **ends,
        ),
        Bar(
            name="compiling",
            marker={"color": _COMPILATION, "opacity": 0.35, "line": {"width": 0}},
            customdata=[end - begin for _, begin, end in compilations],
            hovertemplate="<b>compiling</b> for %{customdata:.2f} s<extra></extra>",
            **_across(rows, compilations),
        ),
    ]


def _across(rows: _Rows, spans: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Where bars across all rows of a worker lie; spans are (worker, begin, end)."""
    return {
        "orientation": "h",
        "base": [begin for _, begin, _ in spans],
        "x": [end - begin for _, begin, end in spans],
        "y": [rows.middle_of(worker) for worker, _, _ in spans],
        "width": [rows.of_worker[worker][1] + 1 for worker, _, _ in spans],
    }
