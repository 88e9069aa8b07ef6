"""trainable: a LightningModule, as it is, made a FusedTrainable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hfta_tune.fusion import FusionError
from hfta_tune.lightning._step import NO_BATCH_INDEX, lane_class, running, takes
from hfta_tune.lightning._supported import base_of, check_built, check_class, optimization_of, precision_of
from hfta_tune.trainable import FusedTrainable

__all__ = ["trainable"]

_OF_A_FUSED_TRAINABLE = {"seed", "gradient_clip_val", "precision", "accumulate_grad_batches", "steps_per_round"}


def trainable(
    module: type,
    datamodule: Any = None,
    *,
    train_dataloaders: Iterable[Any] | None = None,
    val_dataloaders: Iterable[Any] | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
) -> type[FusedTrainable]:
    """Make a LightningModule a FusedTrainable, for HFTAPacker and `hfta_tune.optimize`.

    A trial's config has the arguments of the module's __init__ by name, and those of the data module's. Metrics are
    those that the module logs, by the names that they have in `Trainer.callback_metrics`; a result is one epoch's.

    Args:
        module: The class, of lightning.pytorch or pytorch_lightning.
        datamodule: A LightningDataModule, or its class, which is built from config. Without one, `train_dataloaders`
            and `val_dataloaders` are used, else the module's own methods of the same names.
        train_dataloaders: The training data.
        val_dataloaders: The validation data.
        gradient_clip_val: As Trainer's; so are the others.
        gradient_clip_algorithm: "norm" or "value".
        precision: "32-true" or "bf16-mixed".
        accumulate_grad_batches: Of how many batches gradients are averaged.

    Returns:
        The class. Its checkpoints hold the module's plain state_dict.

    Raises:
        TypeError: if `module` is no LightningModule class, or overrides hooks that are not called.
        ValueError: if the precision is not known.
    """
    check_class(module)
    own: dict[str, Any] = {
        "_module": module,
        "_datamodule": staticmethod(datamodule) if callable(datamodule) else datamodule,
        "_loaders": (train_dataloaders, val_dataloaders),
        "gradient_clip_val": gradient_clip_val,
        "gradient_clip_algorithm": gradient_clip_algorithm,
        "precision": precision_of(precision),
        "accumulate_grad_batches": accumulate_grad_batches,
        "__module__": module.__module__,
        "__doc__": module.__doc__,
    }
    if module.validation_step is base_of(module).validation_step:  # type: ignore[attr-defined]
        own["val_dataloader"] = FusedTrainable.val_dataloader
    return type(module.__name__, (_LightningTrainable,), own)


class _LightningTrainable(FusedTrainable):
    _module: ClassVar[Any]
    _datamodule: ClassVar[Any] = None
    _loaders: ClassVar[tuple[Any, Any]] = (None, None)

    # Model and optimizer

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        arguments = self._arguments_of(type(self)._module.__init__, config)
        self._check_names(config)
        model: Any = type(self)._module(**arguments)
        check_built(model)
        model.configure_model()
        lane_class(model, arguments)
        built: nn.Module = model
        return built

    def _check_names(self, config: Mapping[str, Any]) -> None:
        """Raise for what nobody takes."""
        kinds = [type(self)._module, *([self._datamodule] if isinstance(self._datamodule, type) else [])]
        taken = [takes(kind.__init__) for kind in kinds]
        unknown = set(config) - _OF_A_FUSED_TRAINABLE - set().union(*(names for names, _ in taken))
        if unknown and not any(others for _, others in taken):
            raise FusionError(
                f"config[{min(unknown)!r}] is no argument of {' or '.join(kind.__name__ for kind in kinds)}; take it "
                "out of the search space, or add it to __init__."
            )

    @staticmethod
    def _arguments_of(function: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        names, others = takes(function)
        if others:
            names = names | (set(config) - _OF_A_FUSED_TRAINABLE)
        return {name: config[name] for name in sorted(names) if name in config}

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> Optimizer:
        chosen = optimization_of(type(self).__name__, model.configure_optimizers())  # type: ignore[operator]
        self._scheduler = chosen.scheduler
        self.lr_scheduler_interval, self.lr_scheduler_monitor = chosen.interval, chosen.monitor  # type: ignore[misc]
        return chosen.optimizer

    def build_lr_scheduler(self, optimizer: Any, config: dict[str, Any]) -> Any:
        return self._scheduler

    # Data

    def train_dataloader(self, config: dict[str, Any]) -> Iterable[Any]:
        return self._data("train_dataloader", 0, config)  # type: ignore[no-any-return]

    def val_dataloader(self, config: dict[str, Any]) -> Iterable[Any] | None:
        return self._data("val_dataloader", 1, config)  # type: ignore[no-any-return]

    def _data(self, hook: str, place: int, config: Mapping[str, Any]) -> Any:
        kind = type(self)
        if kind._loaders[place] is not None:
            return kind._loaders[place]
        base = base_of(kind._module)
        if kind._datamodule is None:
            own = getattr(kind._module, hook)
            if own is not getattr(base, hook):
                return own(_DataSource(kind._module, config))
            if place:
                return None
            raise FusionError(f"{kind.__name__} has no training data; pass datamodule or train_dataloaders.")
        data = kind._datamodule
        if isinstance(data, type):
            data = data(**self._arguments_of(data.__init__, config))  # type: ignore[misc]
        data.prepare_data()
        data.setup("fit")
        try:
            return getattr(data, hook)()
        except Exception as error:  # Lightning's own hooks raise where nobody has overridden them
            if place and "must be implemented" in str(error):
                return None
            raise

    # Steps

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Any:
        with running("training_step", config, batch) as logged:
            given = model.training_step(*_arguments(model.training_step, batch))  # type: ignore[operator]
        loss = given["loss"] if isinstance(given, Mapping) and "loss" in given else given
        return (loss, logged.metrics) if logged.metrics else loss

    def validation_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, Any]:
        with running("validation_step", config, batch) as logged:
            model.validation_step(*_arguments(model.validation_step, batch))  # type: ignore[operator]
        return logged.metrics

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, Any] | None:
        metrics: dict[str, Any] = {}
        for hook in ("on_validation_epoch_end", "on_train_epoch_end"):
            with running(hook, config) as logged:
                getattr(model, hook)()
            metrics.update({str(name): value for name, value in logged.metrics.items()})
        return metrics or None


def _arguments(step: Any, batch: Any) -> tuple[Any, ...]:
    """What a step is called with: the batch, and a stand-in for its number where it takes one."""
    names, _ = takes(step)
    return (batch, NO_BATCH_INDEX) if len(names) > 1 else (batch,)


class _DataSource:
    """`self` for a module's own data hooks: what they read of it are arguments of its __init__."""

    def __init__(self, kind: type, config: Mapping[str, Any]) -> None:
        self._kind, self._config = kind, config

    @property
    def hparams(self) -> Any:
        return _Entries(self._config)

    def __getattr__(self, name: str) -> Any:
        if name in self._config:
            return self._config[name]
        value = getattr(self._kind, name, self)
        if value is self:
            raise FusionError(
                f"{self._kind.__name__} makes its data of self.{name}, which is no entry of config; pass a datamodule "
                "or train_dataloaders."
            )
        return value.__get__(self) if hasattr(value, "__get__") else value


class _Entries:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return self._config[name]

    __getitem__ = __getattr__
