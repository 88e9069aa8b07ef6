"""Function trainables whose trials share a worker, beside stock Tune's on the same seeds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hfta_tune
from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

EPOCHS = 5


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long())


def train(config: dict[str, Any]) -> None:
    """An ordinary function trainable: its own loop, a schedule, checkpoints, and a fault if it is asked to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, config.get("width", 16)), nn.ReLU(), nn.Linear(config.get("width", 16), 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(data(), batch_size=32, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    first = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = config["lr"]
        first = state["epoch"] + 1
    model, optimizer, scheduler, loader, criterion = hfta_tune.prepare(model, optimizer, scheduler, loader, criterion)
    marker = config.get("fails_once")
    for epoch in range(first, config.get("epochs", EPOCHS)):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            hfta_tune.backward(loss)
            optimizer.step()
        scheduler.step()
        if marker and epoch == 3 and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("as asked")
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if config.get("saves"):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(directory, "state.pt"))
                saved = tune.Checkpoint.from_directory(directory)
            result = {"loss": loss.item(), "epoch": epoch, "first": first, "id": tune.get_context().get_trial_id()}
            tune.report(result, checkpoint=saved)


def run(storage: str, config: dict[str, Any], *, packed: bool, base: Any = None, **more: Any) -> Any:
    given = {
        "config": config,
        "name": "packed" if packed else "stock",
        "search_alg": BasicVariantGenerator(random_state=0),
        "scheduler": HFTAPacker(base, B=4) if packed else base,
        "resources_per_trial": {"cpu": 2 if packed else 1},
        "reuse_actors": False,
        "storage_path": storage,
        "raise_on_failed_trial": False,
        "verbose": 0,
    }
    return tune.run(hfta_tune.fusible(train) if packed else train, **{**given, **more})


def trials_of(analysis: Any) -> list[Any]:
    """In the order they were proposed; Tune moves a trial that is tried again to the end."""
    return sorted(analysis.trials, key=lambda trial: trial.trial_id)


def results_of(analysis: Any) -> list[list[dict[str, Any]]]:
    frames = analysis.trial_dataframes
    return [frames[trial.trial_id].to_dict("records") for trial in trials_of(analysis)]


def test_results_checkpoints_and_files_are_stock_tunes(storage: str) -> None:
    config = {"lr": tune.grid_search([1e-3, 3e-3, 1e-2, 2e-2]), "saves": True}
    packed, stock = (run(storage, config, packed=packed) for packed in (True, False))
    assert [trial.status for trial in packed.trials] == ["TERMINATED"] * 4
    assert len({trial.last_result["pid"] for trial in packed.trials}) == 1
    for ours, theirs in zip(results_of(packed), results_of(stock), strict=True):
        assert [row["epoch"] for row in ours] == list(range(EPOCHS)) == [row["epoch"] for row in theirs]
        assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
        assert ours[0].keys() >= theirs[0].keys()
    for ours, theirs in zip(trials_of(packed), trials_of(stock), strict=True):
        assert ours.last_result["id"] == ours.trial_id
        files = [{path.name.split(".")[0] for path in Path(trial.path).glob("*")} for trial in (ours, theirs)]
        assert files[0] == files[1]
        states = [torch.load(Path(trial.checkpoint.path, "state.pt"), weights_only=True) for trial in (ours, theirs)]
        for name, tensor in states[1]["model"].items():
            torch.testing.assert_close(states[0]["model"][name], tensor, rtol=1e-4, atol=1e-6)
        sizes = [Path(trial.checkpoint.path, "state.pt").stat().st_size for trial in (ours, theirs)]
        assert sizes[0] < 1.1 * sizes[1]  # a row of the array, not the array


def test_asha_stops_the_same_trials_and_refills(storage: str) -> None:
    config = {"lr": tune.grid_search([1e-2, 1e-4, 2e-2, 1e-5, 5e-3, 1e-3, 3e-2, 1e-4]), "epochs": 9}

    def asha() -> ASHAScheduler:
        return ASHAScheduler(metric="loss", mode="min", max_t=9, grace_period=1, reduction_factor=3)

    packed = run(storage, config, packed=True, base=asha())
    rows = results_of(packed)
    lengths = [len(own) for own in rows]
    assert [trial.status for trial in packed.trials] == ["TERMINATED"] * 8
    assert max(lengths) == 9 and min(lengths) < 9
    plain = results_of(run(storage, config, packed=False))
    for ours, theirs in zip(rows, plain, strict=True):
        assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs[: len(ours)]], rel=1e-4)


def test_a_failed_trial_goes_on_from_its_checkpoint_and_the_others_do_not_notice(storage: str, tmp_path: Path) -> None:
    config = {"lr": tune.grid_search([1e-3, 1e-2, 2e-2]), "saves": True}
    marked = {
        **config,
        "fails_once": tune.sample_from(lambda own: str(tmp_path / "failed") if own["lr"] == 1e-2 else ""),
    }
    analysis = run(storage, marked, packed=True, max_failures=1)
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
    assert [trial.num_failures for trial in trials_of(analysis)] == [0, 1, 0]
    rows = results_of(analysis)
    assert [row["epoch"] for row in rows[1]] == list(range(EPOCHS)) and rows[1][-1]["first"] == 3
    plain = results_of(run(storage, config, packed=False))
    for number in (0, 2):
        losses = [[row["loss"] for row in own[number]] for own in (rows, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_error_names_its_trial_and_its_line(storage: str, tmp_path: Path) -> None:
    config = {"lr": tune.grid_search([1e-3, 1e-2]), "fails_once": str(tmp_path / "failed")}
    analysis = run(storage, config, packed=True)
    [failed] = [trial for trial in analysis.trials if trial.status == "ERROR"]
    assert "as asked" in Path(failed.error_file).read_text() and "in train" in Path(failed.error_file).read_text()


def test_pbt_exploits(storage: str) -> None:
    base = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="loss",
        mode="min",
        perturbation_interval=2,
        quantile_fraction=0.34,
        hyperparam_mutations={"lr": [1e-2, 2e-2]},
        synch=True,
        require_attrs=False,
    )
    config = {"lr": tune.grid_search([1e-6, 1e-2, 2e-2]), "saves": True, "epochs": 6}
    analysis = run(storage, config, packed=True, base=base, stop={"training_iteration": 6})
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
    worst = results_of(analysis)[0]
    assert worst[-1]["first"] > 0 and trials_of(analysis)[0].config["lr"] > 1e-6
    assert worst[-1]["loss"] < worst[1]["loss"]


def test_with_parameters_and_resources_and_what_it_refuses(storage: str) -> None:
    def reads(config: dict[str, Any], rows: list[int]) -> dict[str, int]:
        return {"total": sum(rows) + config["plus"]}

    kind = hfta_tune.fusible(tune.with_parameters(reads, rows=[1, 2, 3]))
    analysis = tune.run(
        tune.with_resources(kind, {"cpu": 2}),
        config={"plus": tune.grid_search([1, 2])},
        scheduler=HFTAPacker(B=2),
        storage_path=storage,
        verbose=0,
    )
    assert [trial.last_result["total"] for trial in analysis.trials] == [7, 8]
    for wrong in (lambda: None, lambda config, more: None, 3, kind):
        with pytest.raises(TypeError, match="fusible takes a function of one argument"):
            hfta_tune.fusible(wrong)


def test_without_the_packer_it_runs_as_any_trainable(storage: str) -> None:
    config = {"lr": tune.grid_search([1e-3]), "saves": True}
    alone = tune.run(hfta_tune.fusible(train), config=config, storage_path=storage, verbose=0)
    assert len(results_of(alone)[0]) == EPOCHS and alone.trials[0].checkpoint is not None
