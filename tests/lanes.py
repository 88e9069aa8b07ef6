"""An observer that keeps what it is told, and checks that no two trials have one lane."""

from __future__ import annotations

from hfta_tune.rounds import Observer, Round


class Recorder(Observer):
    """What a run has told."""

    def __init__(self) -> None:
        self.lanes: dict[int, int] = {}
        self.present: dict[str, tuple[int, int]] = {}
        self.places: dict[str, list[tuple[int, int]]] = {}
        self.reasons: dict[str, str] = {}
        self.rounds: list[tuple[int, Round]] = []
        self.closed: list[int] = []
        self.waiting: list[int] = []
        self.over = 0

    def worker_opened(self, worker: int, lanes: int) -> None:
        self.lanes[worker] = lanes

    def worker_closed(self, worker: int) -> None:
        self.closed.append(worker)

    def trial_joined(self, trial_id: str, worker: int, lane: int) -> None:
        assert trial_id not in self.present and (worker, lane) not in self.present.values()
        self.present[trial_id] = worker, lane
        self.places.setdefault(trial_id, []).append((worker, lane))

    def trial_left(self, trial_id: str) -> None:
        del self.present[trial_id]

    def trial_ended(self, trial_id: str, reason: str) -> None:
        assert trial_id not in self.reasons
        self.reasons[trial_id] = reason

    def round_ended(self, worker: int, own: Round) -> None:
        self.rounds.append((worker, own))

    def trials_wait(self, trials: int) -> None:
        self.waiting.append(trials)

    def run_ended(self) -> None:
        self.over += 1
