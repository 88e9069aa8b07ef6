"""What a module's code finds while its trial's hooks run it: the numbers of its lane, and somebody to log to."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune.fusion import FusionError, LastOfRound, MetricName

__all__ = ["NO_BATCH_INDEX", "Logged", "lane_class", "running", "takes"]

_HYPERPARAMETERS = ("_hparams", "_hparams_initial")


class Logged:
    """What a module logs in one call of a hook.

    Args:
        hook: "training_step", "validation_step" or the hook at an epoch's end.
        config: The trial's config, which speaks for all lanes of a call.
        samples: How many samples the batch has, or None.
    """

    def __init__(self, hook: str, config: Mapping[str, Any], samples: int | None) -> None:
        self.config = config
        self.metrics: dict[str, Any] = {}
        self._hook = hook
        self._samples = samples

    def log(self, name: str, value: Any, on_step: bool | None, on_epoch: bool | None, fx: Any, size: Any) -> None:
        """Note a metric by the names under which Lightning has it in `Trainer.callback_metrics`."""
        if not isinstance(value, (Tensor, int, float)):
            raise FusionError(
                f"{self._hook} logs {name!r} as a {type(value).__name__}; log a number, such as one of "
                "torchmetrics.functional: a metric object that adds up batches has one state for all lanes."
            )
        if fx not in ("mean", "avg", torch.mean):
            raise FusionError(f"{self._hook} logs {name!r} with reduce_fx={fx!r}; a round reports means. Leave it out.")
        if size is not None and self._samples is not None and size != self._samples:
            raise FusionError(
                f"{self._hook} logs {name!r} with batch_size={size!r} for a batch of {self._samples} samples, by which "
                "means are weighed. Leave it out."
            )
        training = self._hook == "training_step"
        on_step = training if on_step is None else on_step
        on_epoch = not training if on_epoch is None else on_epoch
        if training and on_step:
            self.metrics[LastOfRound(f"{name}_step" if on_epoch else name)] = value
        if on_epoch or not training:
            self.metrics[MetricName(name)] = value
            if on_step:
                self.metrics[MetricName(f"{name}_epoch")] = value


_running: list[Logged] = []


@contextlib.contextmanager
def running(hook: str, config: Mapping[str, Any], batch: Any = None) -> Iterator[Logged]:
    """While a hook of a module runs: what it logs, and what hyperparameters it reads from."""
    first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    _running.append(Logged(hook, config, None if first is None else len(first)))
    try:
        yield _running[-1]
    finally:
        _running.pop()


class _Hyperparameters(Mapping[str, Any]):
    """`hparams` in a step: entries of the config, and what the module takes by default."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config, self._defaults = config, defaults

    def __getitem__(self, name: str) -> Any:
        return self._config[name] if name in self._config else self._defaults[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"hparams has no {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter({**self._config, **self._defaults})

    def __len__(self) -> int:
        return len({**self._config, **self._defaults})


class _Lane:
    """Mixed into the class of a module that is trained in a lane.

    Numbers that it was built with tell no trials apart: they are kept beside it, and a step reads them from config.
    """

    def __getattr__(self, name: str) -> Any:
        kept = _kept.get(self)  # type: ignore[call-overload]
        if name in _HYPERPARAMETERS and kept is not None and name in kept:
            return kept[name]
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name in _HYPERPARAMETERS:
                raise
            if _running and (kept is None or name in kept) and name in _running[-1].config:
                return _running[-1].config[name]
            if kept is not None and name in kept:
                return kept[name]
            raise

    @property
    def hparams(self) -> Any:
        """The hyperparameters that save_hyperparameters() has saved."""
        if _running:
            return _Hyperparameters(_running[-1].config, vars(self)["_hfta_tune_defaults"])
        return _kept.get(self, {}).get("_hparams", {})  # type: ignore[call-overload]

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Note a metric for the trial's result."""
        if _running:
            _running[-1].log(name, value, on_step, on_epoch, reduce_fx, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **keywords: Any) -> None:
        """Note several metrics."""
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **keywords)

    @property
    def trainer(self) -> Any:
        """There is none."""
        raise _unknown("trainer", "pass what you need of it to the module as a hyperparameter")

    @property
    def current_epoch(self) -> int:
        """It is not known to a step that serves several lanes."""
        raise _unknown("current_epoch", "let a scheduler of configure_optimizers follow the epochs")

    @property
    def global_step(self) -> int:
        """It is not known to a step that serves several lanes."""
        raise _unknown("global_step", "let a scheduler of configure_optimizers follow the steps")


def _unknown(what: str, remedy: str) -> FusionError:
    return FusionError(f"self.{what} is not there in a trial of hfta_tune, where one call serves many; {remedy}.")


_kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


@functools.cache
def _class_for(kind: type[nn.Module]) -> type[nn.Module]:
    own = type(kind.__name__, (_Lane, kind), {"__module__": kind.__module__})
    own.__qualname__ = kind.__qualname__
    return own


def lane_class(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Make a module one of a lane: it keeps what it was built with beside it.

    Args:
        module: The module.
        arguments: What it was built with.
    """
    own = vars(module)
    numbers = [name for name, value in arguments.items() if type(value) is float and own.get(name) is value]
    saved = own.get("_hparams", {})
    _kept[module] = {name: own.pop(name) for name in (*numbers, *_HYPERPARAMETERS) if name in own}
    own["_hfta_tune_defaults"] = {name: value for name, value in saved.items() if name not in arguments}
    module.__class__ = _class_for(type(module))  # type: ignore[arg-type]


class _NoBatchIndex:
    """Stands for the number of a batch, which one call for all lanes does not know."""

    def _refuse(self, *others: Any) -> Any:
        raise FusionError(
            "training_step and validation_step are called once for many trials, so the number of the batch is not "
            "known: do without batch_idx."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __add__ = __radd__ = _refuse
    __sub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __int__ = __index__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


NO_BATCH_INDEX = _NoBatchIndex()


def takes(function: Any) -> tuple[set[str], bool]:
    """The names of a function's parameters without self, and whether it takes any others by name."""
    parameters = list(inspect.signature(function).parameters.values())
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)
