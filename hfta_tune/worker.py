"""The worker: trials in, rounds, trials out. It knows neither Ray nor Optuna."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

from hfta_tune._checkpoint import CHECKPOINT_FILE, BuiltNumbers, built_numbers, put_state, read_checkpoint, state_of
from hfta_tune._checks import (
    check_closures,
    check_hooks,
    check_own_parameters,
    check_schedule,
    checked_clipping,
    checked_evaluation,
    checked_optimizers,
    checked_options,
    checked_schedulers,
    checked_split,
    checked_steps_per_round,
    overrides,
)
from hfta_tune._loaders import Data, DataCache
from hfta_tune._metrics import RoundMeans
from hfta_tune._prefetch import on_device
from hfta_tune._recording import ConfigPath, copied, numbers_of
from hfta_tune._running import Running
from hfta_tune._snapshot import Snapshot
from hfta_tune._steps import Steps
from hfta_tune.fusion import (
    COMPILED,
    LANE_BY_LANE,
    ONLY,
    RECORDED,
    VMAP,
    FusedArray,
    FusionError,
    FusionWarning,
    Lane,
    LanesDiffer,
    LastOfRound,
    Options,
    Signature,
    Step,
    StepCache,
    TornByOutOfMemory,
    VmapFailed,
    clone_batch,
    first_line,
    form_of_optimizer,
    model_signature,
    obstacle_of_optimizers,
    without_metrics,
)
from hfta_tune.loops import LoopHost
from hfta_tune.rounds import ArrayRound, Round

__all__ = ["CHECKPOINT_FILE", "HostedTrial", "RoundAbandoned", "Worker"]

logger = logging.getLogger(__name__)

_MEMORY_FOR_A_SNAPSHOT = 0.1


class RoundAbandoned(BaseException):
    """Raised by what a round calls between its steps, to end it there; no error of any trial."""


@dataclass(frozen=True, slots=True)
class HostedTrial:
    """What a worker knows of a trial that has a lane, to be read only.

    Attributes:
        lane: Its model, optimizers and schedulers.
        data: Its data loaders, which other trials may share.
        model: The signature of its model.
        optimizers: The forms of its optimizers, the parameters in their groups, the clipping algorithm.
        options: Precision and accumulation.
        steps_per_round: How many batches its rounds have, or None for one pass over the data.
        array: The array that it trains in; None before its first round.
        step_keys: The paths in config that the steps of its class were seen to read as something else than a tensor.
        obstacle: Why it trains lane by lane whatever its steps do, or None.
    """

    lane: Lane
    data: Data
    model: Signature
    optimizers: Any
    options: Options
    steps_per_round: int | None
    array: FusedArray | None
    step_keys: frozenset[ConfigPath]
    obstacle: str | None


@dataclass(eq=False, slots=True)
class _Trial:
    """A trial that has a lane in this worker."""

    name: str
    trainable: Any
    config: dict[Any, Any]
    lane: Lane
    data: Data
    model_signature: Signature
    optimizer_form: Any
    built: BuiltNumbers
    options: Options
    steps_per_round: int | None
    epoch: int = 0
    array: FusedArray | None = None
    key: Any = None
    key_hash: int = 0
    keys_known: int = -1


@dataclass(slots=True)
class _Tally:
    """What an array has done in this round so far."""

    steps: int = 0
    samples: int = 0
    compile_seconds: float = 0.0


class Worker:
    """Hosts up to `lanes` trials on one device and trains trials of equal signature as fused arrays.

    What it did in its last round is `last_round`.

    Args:
        lanes: B, the number of trials that live here at once.
        device: Where to train; by default the CUDA device if there is one, else the CPU.
        strategy: "auto" measures the strategies on each array and takes the fastest. "vmap" or "lane by lane"
            keeps to that one where it can train the array. By default what the environment variable
            HFTA_TUNE_STRATEGY says, else "auto".
        audit: Compare the first fused step of every array with the same step lane by lane, on copies. Where
            they differ, say where and go on lane by lane.

    Raises:
        ValueError: if `lanes` is no positive integer, `device` no device that is there or `strategy` none of the three.
    """

    def __init__(
        self,
        lanes: int = 1,
        *,
        device: str | torch.device | None = None,
        strategy: str | None = None,
        audit: bool = False,
    ) -> None:
        if isinstance(lanes, bool) or not hasattr(lanes, "__index__") or lanes < 1:
            raise ValueError(f"lanes must be a positive integer but got {lanes!r}.")
        self.lanes = int(lanes)
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f'device must be a device of torch, such as "cpu" or "cuda:0", but got {device!r}.'
            ) from error
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device must be one that is there but got {device!r}, and torch sees {torch.cuda.device_count()} CUDA "
                "devices. See that torch is a CUDA build, and that the driver and CUDA_VISIBLE_DEVICES show the device."
            )
        strategy = strategy or os.environ.get("HFTA_TUNE_STRATEGY", "auto")
        if strategy not in ("auto", VMAP, LANE_BY_LANE):
            raise ValueError(f'strategy must be "auto", "{VMAP}" or "{LANE_BY_LANE}" but got {strategy!r}.')
        self._strategies = (VMAP, LANE_BY_LANE, RECORDED, COMPILED) if strategy == "auto" else (strategy,)
        self.running = Running()
        self._audit = audit
        self._fitting = self.lanes
        self._most_in_array: dict[Any, int] = {}
        self._compiled: dict[Any, StepCache] = {}
        self._trials: dict[str, _Trial] = {}
        self._arrays: dict[FusedArray, Any] = {}
        self._array_numbers = itertools.count()
        self._steps: dict[type, Steps] = {}
        self._owners: dict[Lane, tuple[Any, Mapping[Any, Any]]] = {}
        self._loaders = DataCache(self._warn_once)
        self._said: set[str] = set()
        self._held: dict[str, Snapshot] = {}
        self._failed: set[str] = set()
        self._withdrawn: set[_Trial] | None = None
        self._tallies: dict[FusedArray, _Tally] = {}
        self._loops = LoopHost(self._array_numbers, strategy=strategy, audit=audit)
        self.last_round: Round | None = None

    @property
    def free_lanes(self) -> int:
        """How many more trials find a lane here."""
        return max(0, self.fitting_lanes - len(self.trial_ids))

    @property
    def fitting_lanes(self) -> int:
        """How many lanes the worker fills: `lanes`, or fewer once memory has run out."""
        return self._fitting

    @property
    def trial_ids(self) -> list[str]:
        """The trials that have a lane here."""
        return [*self._trials, *self._loops.names]

    def resize(self, lanes: int) -> None:
        """Host up to `lanes` trials from now on; where there are more, they stay."""
        # Where memory has run out, fewer fit whatever is asked for.
        self._fitting = lanes if self._fitting == self.lanes else min(lanes, self._fitting)
        self.lanes = lanes

    def signature_of(self, trial_id: str) -> int:
        """Return a hash of a trial's signature: trials for which it is equal here may share an array.

        It may change when a step is seen to read a key of config that it did not read before.
        """
        if trial_id in self._loops:
            return self._loops.key(trial_id)
        trial = self._trial(trial_id)
        self._key(trial)
        return trial.key_hash

    def place_of(self, trial_id: str) -> dict[str, Any] | None:
        """Return {"array": its number in this worker, "signature": text} of a trial that has a lane, else None.

        "array" is None before the trial's first round. Trials of this worker with equal "signature" may share an array.
        """
        array = None
        if trial_id in self._loops:
            own = self._loops.array_of(trial_id)
            array = None if own is None else own.number
        elif trial_id in self._trials:
            fused = self._trials[trial_id].array
            array = None if fused is None else fused.number
        else:
            return None
        return {"array": array, "signature": f"{self.signature_of(trial_id) % 2**64:016x}"}

    def hosted(self, trial_id: str) -> HostedTrial:
        """Return what decides with which trials a trial shares an array, and what it trains.

        Raises:
            ValueError: if the trial has no lane here, or has one with a loop of its own.
        """
        trial = self._trial(trial_id)
        return HostedTrial(
            trial.lane,
            trial.data,
            trial.model_signature,
            trial.optimizer_form,
            trial.options,
            trial.steps_per_round,
            trial.array,
            frozenset(self._steps[type(trial.trainable)].keys),
            self._obstacle(trial),
        )

    def describe(self) -> dict[str, Any]:
        """Return what the worker does: its arrays with their trials and strategies, and which hook runs now.

        Any thread may ask, also in the middle of a round; so trials may come and go meanwhile.
        """
        names: dict[Any, str] = {trial.lane: trial.name for trial in list(self._trials.values())}
        now = self.running.now
        running = now and {"hook": now[0], "trials": [names.get(trial, trial) for trial in list(now[1])]}
        return {
            "running": running,
            "lanes": self.lanes,
            "fitting_lanes": self.fitting_lanes,
            "device": str(self.device),
            "arrays": [
                {
                    "trials": [names[lane] for lane in list(array.lanes) if lane in names],
                    "strategy": array.strategy,
                    "evaluation_strategy": array.evaluation_strategy,
                    "seconds_a_step": array.seconds_a_step,
                }
                for array in list(self._arrays)
            ]
            + [
                {
                    "trials": list(trials),
                    "strategy": called.strategy,
                    "evaluation_strategy": called.strategy,
                    "seconds_a_step": called.seconds_a_step,
                }
                for called, trials in self._loops.arrays().items()
            ],
        }

    def add(self, trial_id: str, trainable: Any, config: dict[Any, Any], *, placed: bool = False) -> None:
        """Give a trial a lane: build its model, optimizer, schedule and data loaders.

        Args:
            trial_id: The trial's name, also in messages.
            trainable: The trial's own FusedTrainable instance.
            config: The trial's hyperparameters.
            placed: Whether it was given the lane before memory ran out: it may have one that does not fit, and
                trains in an array of its own.

        Raises:
            FusionError: if what the hooks return cannot be trained.
            ValueError: if no lane is free, or the trial has one already.
            Exception: what the trial's own hooks raise. The lane is then free again.
        """
        self._check_lane(trial_id, placed=placed)
        check_hooks(type(trainable))
        config = copied(config)
        with self._own_randomness(int(config.get("seed", trainable.seed))):
            with self.running.hook("build_model", [trial_id]):
                model = trainable.build_model(copied(config))
            if not isinstance(model, nn.Module):
                raise FusionError(f"trial {trial_id}: build_model returned {model!r:.80}; return a torch.nn.Module.")
            check_own_parameters(trial_id, model, {t.name: t.lane.model for t in self._trials.values()})
            model.to(self.device)
            with self.running.hook("build_optimizer", [trial_id]):
                returned = trainable.build_optimizer(model, copied(config))
            optimizers = checked_optimizers(trial_id, returned)
            split = tuple((key, checked_split(trial_id, model, own)) for key, own in optimizers.items())
            built = built_numbers(optimizers)
            with self.running.hook("build_lr_scheduler", [trial_id]):
                scheduler = trainable.build_lr_scheduler(returned, copied(config))
        schedulers = checked_schedulers(trial_id, optimizers, scheduler)
        for key, own in schedulers.items():
            check_schedule(trial_id, trainable, optimizers[key], own)
        options = checked_options(trial_id, trainable, config)
        check_closures(trial_id, optimizers, options)
        with self._own_randomness(int(trainable.seed)):
            in_use = [trial.data for trial in self._trials.values()]
            with self.running.hook("train_dataloader or val_dataloader", [trial_id]):
                data = self._loaders.get(trial_id, trainable, config, in_use)
        if data.validation is not None and not overrides(type(trainable), "validation_step"):
            raise FusionError(
                f"trial {trial_id}: {type(trainable).__name__} has a val_dataloader but no validation_step; "
                "define validation_step(self, model, batch, config) or drop val_dataloader."
            )
        clipping = checked_clipping(trial_id, trainable, config)
        lane = Lane(f"trial {trial_id}", model, optimizers, schedulers, numbers_of(config), clipping)
        self._owners[lane] = (trainable, config)
        self._steps.setdefault(type(trainable), Steps(type(trainable), self._owners, self._warn_once, self.running))
        self._trials[trial_id] = _Trial(
            trial_id,
            trainable,
            config,
            lane,
            data,
            model_signature(model),
            (
                tuple(map(form_of_optimizer, optimizers.values())),
                split,
                None if clipping is None else clipping.algorithm,
            ),
            built,
            options,
            checked_steps_per_round(trial_id, trainable, config),
        )

    def add_loop(
        self,
        trial_id: str,
        function: Callable[[], Any],
        *,
        placed: bool = False,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Give a trial a lane whose function has a loop of its own; it begins with the trial's first round.

        A round of it ends where it calls `LoopLane.park`, with the metrics that it gives there. It has no `state_dict`:
        its own code saves what it needs.

        Args:
            trial_id: The trial's name, also in messages.
            function: The function. What it makes ready with `hfta_tune.prepare` is trained with others as one.
            placed: Whether it was given the lane before memory ran out.
            around: Makes what is entered while any of such functions run.

        Raises:
            ValueError: if no lane is free, or the trial has one already.
        """
        self._check_lane(trial_id, placed=placed)
        self._loops.add(trial_id, function, around)

    def _check_lane(self, trial_id: str, *, placed: bool) -> None:
        if trial_id in self.trial_ids:
            raise ValueError(f"trial {trial_id} has a lane in this worker already.")
        most = self.lanes if placed else self.fitting_lanes
        if len(self.trial_ids) >= most:
            which = "" if most == self.lanes else " that fit into memory"
            raise ValueError(f"trial {trial_id}: all {most} lanes{which} are taken; remove a trial first.")

    def remove(self, trial_id: str) -> None:
        """Free a trial's lane; the others go on undisturbed."""
        if trial_id in self._loops:
            self._loops.remove(trial_id)
            return
        trial = self._trial(trial_id)
        del self._trials[trial_id]
        self._held.pop(trial_id, None)
        self._failed.discard(trial_id)
        self._withdraw(trial)
        del self._owners[trial.lane]

    def run_round(
        self,
        trial_ids: Collection[str] | None = None,
        *,
        rounds_left: float | None = None,
        between_steps: Callable[[], None] | None = None,
    ) -> dict[str, dict[str, float] | Exception]:
        """Train one round: one pass over the training data, then one over the validation data.

        Args:
            trial_ids: The trials that take part; by default all. The others keep their state.
            rounds_left: About how many rounds the worker has before it after this one, where that is known:
                it tells whether compiling pays.
            between_steps: Called between the round's steps. It may add and remove trials, load and save them;
                those that it removes or loads take no further part. If it raises RoundAbandoned, the round ends
                there and leaves the trials in the middle of it; `rewind` takes them back.

        Returns:
            {trial: metrics}. `train_loss` and the validation metrics are means over the round's batches,
            weighted by batch size. A trial whose own code raised has the exception instead, and has
            lost its lane; one that is held loses it when it is released.
        """
        names = self.trial_ids if trial_ids is None else list(trial_ids)
        loops = [name for name in names if name in self._loops]
        taking_part = [self._trial(name) for name in names if name not in self._loops]
        for trial in self._trials.values():
            if trial not in taking_part:
                self._park(trial)
        groups: dict[tuple[Data, type, int | None], list[_Trial]] = {}
        for trial in taking_part:
            groups.setdefault((trial.data, type(trial.trainable), trial.steps_per_round), []).append(trial)
        outcomes: dict[str, dict[str, float] | Exception] = {}
        loop_rounds: tuple[ArrayRound, ...] = ()
        withdrawn: set[_Trial] = set()
        self._withdrawn = withdrawn
        self._tallies.clear()
        begin = time.time()
        try:
            with self.running.hook("round", [trial.lane for trial in taking_part]):
                for trials in groups.values():
                    present = [trial for trial in trials if trial not in withdrawn]
                    if present:
                        outcomes.update(self._run_group(present, rounds_left or 0, between_steps))
            if loops:
                with self.running.hook("the functions of trials", loops), self._own_randomness(0):
                    outcomes.update(self._loops.run(loops))
                loop_rounds = self._loops.tallies(loops)
        finally:
            self._withdrawn = None
        arrays = (*map(self._tallied, _arrays_of(taking_part)), *loop_rounds)
        self.last_round = Round(begin, time.time(), arrays)
        taking_part = [trial for trial in taking_part if trial not in withdrawn]
        for trial in taking_part:
            if isinstance(outcomes[trial.name], Exception):
                if trial.name in self._held:
                    self._failed.add(trial.name)
                else:
                    self.remove(trial.name)
        return {name: outcomes[name] for name in (*(trial.name for trial in taking_part), *loops)}

    # Rounds that may be taken back

    @property
    def can_rewind(self) -> bool:
        """Whether a round that was begun can be taken back: the data must begin anew with each."""
        return all(trial.steps_per_round is None for trial in self._trials.values())

    def hold(self, trial_ids: Iterable[str]) -> bool:
        """Keep the present state of trials: `state_dict` and `save` give it until they are released.

        Returns:
            False if memory is short. Then nothing is held.
        """
        snapshot = Snapshot()
        held = [self._trial(name) for name in trial_ids]
        for trial in held:
            own_code_runs = trial.array is None or trial.array.strategy == LANE_BY_LANE or len(trial.array.lanes) == 1
            snapshot.keep(trial.name, trial.lane, trial.epoch, trial.built, attributes=own_code_runs)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if snapshot.nbytes > _MEMORY_FOR_A_SNAPSHOT * free:
                return False
        try:
            snapshot.copy()
        except RuntimeError:  # torch's word for out of memory, on any device
            return False
        self._held.update((trial.name, snapshot) for trial in held)
        return True

    def release(self, trial_ids: Iterable[str]) -> None:
        """Let the state that trials have by now be theirs; those that have failed since lose their lanes."""
        for name in trial_ids:
            self._held.pop(name, None)
            if name in self._failed:
                self.remove(name)

    def rewind(self, trial_ids: Iterable[str]) -> None:
        """Put held trials back into the state that was kept, and release them."""
        trials = [self._trial(name) for name in trial_ids]
        for array in _arrays_of(trials):
            array.drop_accumulated_gradients()
        for trial in trials:
            snapshot = self._held.pop(trial.name)
            self._failed.discard(trial.name)
            trial.lane.error = None
            in_place = snapshot.fits_in_place(trial.name, trial.lane)
            if not in_place:
                self._park(trial)
            trial.epoch = snapshot.put_back(trial.name, trial.lane, trial.built, in_place=in_place)

    # Checkpoints

    def state_dict(self, trial_id: str) -> dict[str, Any]:
        """Return a trial's checkpoint in plain PyTorch; its tensors are copies on the CPU.

        `model`, `optimizer` and `lr_scheduler` (None without one) are the objects' own state_dict();
        `epoch` counts the rounds trained; `optimizer_numbers` are the groups' numbers as built. Of a trial that
        is held, it is the state that was kept.
        """
        trial = self._trial(trial_id)
        if trial_id in self._held:
            return self._held[trial_id].state(trial_id)
        return state_of(trial.lane, trial.epoch, trial.built)

    def load_state_dict(self, trial_id: str, state: Mapping[str, Any]) -> None:
        """Put a trial into the state of a checkpoint; numbers of the optimizer that config changed since hold.

        Raises:
            FusionError: if the checkpoint does not fit the trial.
        """
        trial = self._trial(trial_id)
        self._withdraw(trial)
        before = state_of(trial.lane, trial.epoch, trial.built)
        try:
            trial.epoch = put_state(trial.lane, state, trial.built)
            self._held.pop(trial_id, None)
        except Exception as error:
            put_state(trial.lane, before, trial.built)
            raise FusionError(
                f"trial {trial_id}: the checkpoint does not fit the trial's model or optimizer "
                f"({type(error).__name__}: {error}). Restore it with the config that it was saved with."
            ) from error

    def save(self, trial_id: str, directory: str | os.PathLike[str]) -> None:
        """Write a trial's checkpoint to `directory`, as one file that torch.load reads with weights_only=True."""
        torch.save(self.state_dict(trial_id), Path(directory) / CHECKPOINT_FILE)

    def load(self, trial_id: str, directory: str | os.PathLike[str]) -> None:
        """Read a trial's checkpoint from `directory`.

        Raises:
            FusionError: if the file is missing, corrupt, or does not fit the trial.
        """
        self._trial(trial_id)
        self.load_state_dict(trial_id, read_checkpoint(trial_id, directory, self.device))

    # Arrays

    def _trial(self, trial_id: str) -> _Trial:
        if trial_id not in self._trials:
            raise ValueError(f"trial {trial_id} has no lane in this worker; those that do: {', '.join(self._trials)}.")
        return self._trials[trial_id]

    def _withdraw(self, trial: _Trial) -> None:
        """Take a trial out of its array, and out of the round if one is running."""
        self._park(trial)
        if self._withdrawn is not None:
            self._withdrawn.add(trial)

    def _park(self, trial: _Trial) -> None:
        """Take a trial out of its array; it keeps its state in its own objects."""
        array = trial.array
        if array is not None:
            trial.array = None
            array.change_lanes(leave=[trial.lane])
            if not array.lanes:
                del self._arrays[array]

    def _key(self, trial: _Trial) -> Any:
        steps = self._steps[type(trial.trainable)]
        if trial.keys_known != len(steps.keys):
            trial.keys_known = len(steps.keys)
            trial.key = (
                type(trial.trainable),
                (trial.data, trial.steps_per_round),
                trial.model_signature.key,
                trial.optimizer_form,
                trial.options,
                steps.signature(trial.config),
            )
            trial.key_hash = hash((trial.data.number, trial.key))
        return trial.key

    @staticmethod
    def _obstacle(trial: _Trial) -> str | None:
        attribute = trial.model_signature.obstacle
        if attribute is not None:
            return (
                f"its models cannot be compared ({attribute}); keep only plain values and tensors as "
                "attributes of modules"
            )
        return obstacle_of_optimizers(trial.lane.optimizers)

    def _arrange(self, trials: Iterable[_Trial], *, apart: bool = False) -> list[FusedArray]:
        """Put trials of equal signature into one array each; return the arrays.

        Args:
            trials: The trials.
            apart: Keep them out of the arrays of other trials, which may have had this step already.
        """
        trials = list(trials)
        for trial in trials:
            if trial.array is not None and self._arrays[trial.array] != self._key(trial):
                self._park(trial)
        joining: dict[Any, list[_Trial]] = {}
        for trial in trials:
            if trial.array is None:
                joining.setdefault(self._key(trial), []).append(trial)
        for key, members in joining.items():
            arrays = [array for array, own in self._arrays.items() if own == key and not apart]
            most = self._most_in_array.get(key, self.lanes)
            while members:
                array = next((a for a in arrays if len(a.lanes) < most), None)
                if array is None:
                    array = self._new_array(key, members[0])
                    arrays.append(array)
                taken = members[: most - len(array.lanes)]
                members = members[len(taken) :]
                array.change_lanes(join=[member.lane for member in taken])
                for member in taken:
                    member.array = array
        return _arrays_of(trials)

    def _new_array(self, key: Any, trial: _Trial) -> FusedArray:
        kind = type(trial.trainable).__name__
        obstacle = self._obstacle(trial)
        array = FusedArray(
            self.device,
            number=next(self._array_numbers),
            options=trial.options,
            strategies=self._strategies if obstacle is None else (LANE_BY_LANE,),
            pools=obstacle is None,
            compiled=self._compiled.setdefault((key[0], *key[2:]), {}),
            audit=(lambda found: self._warn_once(f"audit of {kind}: {found}.")) if self._audit else None,
        )
        self._arrays[array] = key
        if obstacle is not None:
            self._warn_once(f"{kind} trains lane by lane: {obstacle}.")
        return array

    # Rounds

    def _run_group(
        self, trials: list[_Trial], rounds_left: float, between_steps: Callable[[], None] | None
    ) -> dict[str, dict[str, float] | Exception]:
        def between() -> None:
            if between_steps is not None:
                between_steps()
                assert self._withdrawn is not None
                alive[:] = [trial for trial in alive if trial not in self._withdrawn]

        data, kind = trials[0].data, type(trials[0].trainable)
        steps = self._steps[kind]
        means = RoundMeans(self.device)
        alive = list(trials)
        failed: dict[str, dict[str, float] | Exception] = {}
        first_epoch = min(trial.epoch for trial in trials)
        seed = int(trials[0].trainable.seed) * 1_000_003 + first_epoch
        with self._own_randomness(seed):
            try:
                arrays = self._arrange(alive)
                self._set_mode(arrays, training=True)
                for trial in alive:
                    trial.lane.drop_gradients()
                for array in arrays:
                    array.numbers_may_have_changed()
                    array.set_surroundings(steps.surroundings(trials[0].trainable))
                number = -1
                batches = data.round_of_training(trials[0].steps_per_round, first_epoch)
                accumulate = any(trial.options.accumulate > 1 for trial in trials)
                given = self._batches(batches, "train_dataloader")
                self.running.now = "train_dataloader", [trial.lane for trial in trials]
                # Only where it matters whether a batch is the last: looking ahead, a loader draws its random
                # numbers before the step that it would draw them after.
                for number, (batch, last) in enumerate(
                    _with_last(given) if accumulate else zip(given, itertools.repeat(False))
                ):
                    self._train_on(batch, number, last, steps, alive, failed, means)
                    between()
                self._compile_what_pays(_arrays_of(alive), steps, rounds_left * (number + 1))
                if data.validation is not None and alive:
                    self._set_mode(self._arrange(alive), training=False)
                    self.running.now = "val_dataloader", [trial.lane for trial in trials]
                    for batch in self._batches(data.validation, "val_dataloader"):
                        self._evaluate_on(batch, steps, alive, failed, means)
                        between()
            except Exception as error:  # of the data loader, which all of them share
                for trial in list(alive):
                    self._fail(trial, error, alive, failed)
            results = means.read([trial.lane for trial in alive])
            for trial in list(alive):
                try:
                    self._finish_round(trial, results[trial.lane])
                except Exception as error:
                    self._fail(trial, error, alive, failed)
        return {**failed, **{trial.name: results[trial.lane] for trial in alive}}

    def _compile_what_pays(self, arrays: Iterable[FusedArray], steps: Steps, steps_left: float) -> None:
        for array in arrays:
            surroundings = steps.surroundings(self._owners[array.lanes[0]][0])
            if surroundings is None:  # the compiled step would not see what the user's code does to self
                continue
            array.set_surroundings(surroundings)
            with self.running.hook("recording of training_step", array.lanes):
                seconds = array.compile_if_it_pays(steps_left)
            if seconds is not None:
                logger.info("Recorded or compiled the training step of %d lanes in %.1f s.", len(array.lanes), seconds)
                self._tallies.setdefault(array, _Tally()).compile_seconds += seconds

    def _train_on(
        self,
        batch: Any,
        number: int,
        last: bool,
        steps: Steps,
        alive: list[_Trial],
        failed: dict[str, Any],
        means: RoundMeans,
    ) -> None:
        size = _batch_size(batch)
        train = functools.partial(FusedArray.train_step, batch_number=number, last=last)
        for array, losses in self._on_each_array(batch, steps, alive, train, failed, training=True):
            tally = self._tallies.setdefault(array, _Tally())
            tally.steps, tally.samples = tally.steps + 1, tally.samples + size
            _note_training(losses, array.lanes, size, means)
            self._drop_failed(array, alive, failed)
        for trial in list(alive):
            if trial.lane.schedulers and trial.trainable.lr_scheduler_interval == "step":
                assert trial.array is not None
                if not trial.array.updates_after(number, last=last):
                    continue
                trial.array.numbers_may_have_changed()
                try:
                    trial.lane.step_schedulers()
                except Exception as error:
                    self._fail(trial, error, alive, failed)

    def _evaluate_on(
        self, batch: Any, steps: Steps, alive: list[_Trial], failed: dict[str, Any], means: RoundMeans
    ) -> None:
        size = _batch_size(batch)
        for array, metrics in self._on_each_array(
            batch, steps, alive, FusedArray.evaluation_step, failed, training=False
        ):
            if isinstance(metrics, dict):
                for name, values in metrics.items():
                    means.add(name, array.lanes, values, size)
            else:
                for lane, own in zip(array.lanes, metrics, strict=True):
                    for name, value in own.items():
                        means.add(name, [lane], value.reshape(1), size)
            self._drop_failed(array, alive, failed)

    def _on_each_array(
        self,
        batch: Any,
        steps: Steps,
        alive: list[_Trial],
        run: Callable[[FusedArray, Step, Any], Any],
        failed: dict[str, Any],
        *,
        training: bool,
    ) -> Iterator[tuple[FusedArray, Any]]:
        """Run a step on every array; yield each with what it returned.

        An array whose lanes turn out to differ is split, and a step that vmap cannot do runs lane by lane.
        """
        step = steps.training if training else steps.validation
        hook = "training_step" if training else "validation_step"
        pending = _arrays_of(alive)
        while pending:
            array = pending.pop()
            # A step may change its batch in place; only its last reader gets the loader's own tensors.
            own = clone_batch(batch) if pending else batch
            try:
                with self.running.hook(hook, array.lanes):
                    outcome = run(array, step, own)
            except LanesDiffer:
                pending.extend(self._rearranged(array, alive, training=training))
                continue
            except torch.OutOfMemoryError as error:
                if len(array.lanes) > 1:
                    pending.extend(self._halved(array, alive, error, training=training))
                    continue
                raise
            except TornByOutOfMemory as error:
                for lane in array.lanes:
                    lane.error = error.cause
                self._drop_failed(array, alive, failed)
                continue
            except VmapFailed as failure:
                if steps.must_be_python_numbers(array, step, own):
                    pending.extend(self._rearranged(array, alive, training=training))
                    continue
                array.give_up_vmap(training=training)
                with self.running.hook(hook, array.lanes):
                    outcome = run(array, step, own)
                if training or array.strategy != LANE_BY_LANE:  # else the same was said of the training
                    self._say_fallback(array, steps.kind, "trains" if training else "evaluates", failure)
            yield array, outcome

    def _rearranged(self, array: FusedArray, alive: list[_Trial], *, training: bool) -> list[FusedArray]:
        """Split an array whose lanes turned out to differ."""
        arrays = self._arrange([trial for trial in alive if trial.array is array], apart=True)
        self._set_mode(arrays, training=training)
        return arrays

    def _halved(
        self, array: FusedArray, alive: list[_Trial], error: torch.OutOfMemoryError, *, training: bool
    ) -> list[FusedArray]:
        """Split an array that does not fit into memory into halves, and take fewer trials from now on."""
        members = [trial for trial in alive if trial.array is array]
        lanes = len(members)
        keys = {self._key(trial) for trial in members}
        half = min(-(-lanes // 2), *(self._most_in_array.get(key, lanes) for key in keys))
        self._most_in_array.update(dict.fromkeys(keys, half))
        others = sum(self._key(trial) not in keys for trial in self._trials.values())
        self._fitting = min(self._fitting, others + half)
        self._warn_once(
            f"{lanes} lanes do not fit into the memory of {self.device} ({first_line(error)}). They train on in arrays "
            f"of {half}, and this worker takes no more than {self._fitting} trials from now on. Set B to that."
        )
        for trial in members:
            self._park(trial)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        arrays = self._arrange(members, apart=True)
        self._set_mode(arrays, training=training)
        return arrays

    @staticmethod
    def _set_mode(arrays: Iterable[FusedArray], *, training: bool) -> None:
        for array in arrays:
            array.set_mode(training=training)

    def _drop_failed(self, array: FusedArray, alive: list[_Trial], failed: dict[str, Any]) -> None:
        for trial in [trial for trial in alive if trial.array is array and trial.lane.error is not None]:
            assert trial.lane.error is not None
            self._fail(trial, trial.lane.error, alive, failed)

    def _fail(self, trial: _Trial, error: Exception, alive: list[_Trial], failed: dict[str, Any]) -> None:
        alive.remove(trial)
        self._park(trial)
        failed[trial.name] = error

    def _finish_round(self, trial: _Trial, results: dict[str, float]) -> None:
        trial.epoch += 1
        if overrides(type(trial.trainable), "evaluate"):
            model = trial.lane.model
            was_training = model.training
            model.eval()
            try:
                with torch.no_grad(), self.running.hook("evaluate", [trial.name]):
                    own = trial.trainable.evaluate(model, copied(trial.config))
            finally:
                model.train(was_training)
            results.update(checked_evaluation(trial.name, own))
        trainable, schedulers = trial.trainable, trial.lane.schedulers
        if not schedulers or trainable.lr_scheduler_interval != "epoch":
            return
        monitor = trainable.lr_scheduler_monitor
        if monitor not in results and any(isinstance(own, ReduceLROnPlateau) for own in schedulers.values()):
            raise FusionError(
                f"trial {trial.name}: lr_scheduler_monitor is {monitor!r}, which is none of the round's results "
                f"({', '.join(sorted(results))}). Set it to one of them."
            )
        trial.lane.step_schedulers(results.get(monitor))

    def _batches(self, loader: Iterable[Any], hook: str) -> Iterator[Any]:
        """The loader's batches, on the device."""
        empty = True
        for batch in loader if self.device.type == "cpu" else on_device(loader, self.device):
            empty = False
            yield batch
        if empty:
            raise FusionError(
                f"{hook} gave no batch in this round. Check the data set's size, the batch size and drop_last; "
                "a loader must give its batches again each round."
            )

    @contextlib.contextmanager
    def _own_randomness(self, seed: int) -> Iterator[None]:
        """Seed torch for what follows, and leave the caller's generators as they were."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # Not torch.manual_seed: without CUDA it spends milliseconds on noting where it was called.
            torch.default_generator.manual_seed(seed % 2**63)
            if devices:
                torch.cuda.manual_seed(seed % 2**63)
            yield

    def _tallied(self, array: FusedArray) -> ArrayRound:
        names = {trial.lane: trial.name for trial in self._trials.values()}
        trials = tuple(names[lane] for lane in array.lanes)
        tally = self._tallies.get(array) or _Tally()
        return ArrayRound(
            array.number,
            trials,
            array.strategy,
            tally.steps,
            tally.samples,
            tally.compile_seconds,
            array.seconds_a_step,
        )

    # Messages

    def _say_fallback(self, array: FusedArray, kind: type, what: str, failure: VmapFailed) -> None:
        if any(lane.error is None for lane in array.lanes):
            self._warn_once(f"{kind.__name__} {what} lane by lane: vmap stopped at {failure}")

    def _warn_once(self, message: str) -> None:
        if self.lanes > 1 and message not in self._said:  # alone there is nothing to lose
            self._said.add(message)
            warnings.warn(message, FusionWarning, stacklevel=3)


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last."""
    remaining = iter(items)
    for item in remaining:
        for following in remaining:
            yield item, False
            item = following
        yield item, True


def _arrays_of(trials: Iterable[_Trial]) -> list[FusedArray]:
    return list({trial.array: None for trial in trials if trial.array is not None})


def _note_training(given: Mapping[str, Tensor], lanes: Sequence[Lane], size: int, means: RoundMeans) -> None:
    """Note losses and metrics of a training step; a metric called "train_loss" takes the place of the losses' sum."""
    losses = without_metrics(given)
    metrics = [name for name in given if name not in losses]
    if "train_loss" not in metrics:
        means.add("train_loss", lanes, sum(losses.values()), size)  # type: ignore[arg-type]
    if list(losses) != [ONLY]:
        for name, own in losses.items():
            means.add(f"train_loss_{name}", lanes, own, size)
    for name in metrics:
        if isinstance(name, LastOfRound):
            means.replace(str(name), lanes, given[name])
        else:
            means.add(str(name), lanes, given[name], size)


def _batch_size(batch: Any) -> int:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return 1
